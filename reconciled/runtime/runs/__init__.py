"""Runs: from a key of the queue to an outcome, recovery and adoption included."""
