"""Reconcilers by their names: finding and loading them, and containing their faults."""
