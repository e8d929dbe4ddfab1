"""Keeps declared things true, and never leaves one half-done."""
