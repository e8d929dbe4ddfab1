"""Reconcilers by name: finding them, loading them, and containing their faults."""
