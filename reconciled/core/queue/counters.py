"""The counters of one controller's lane: plain numbers, read when metrics are scraped.

A metrics library called for each event would halve the queue's speed. Invariant: every
number only grows, so the difference of two reads is what happened between them.
"""

from __future__ import annotations

from reconciled.core.queue.states import Priority

# Upper bounds of the wait-time buckets, in seconds; a last bucket takes what is above.
WAIT_BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)


class Counters:
    """Written by the lane alone.

    adds           enqueues accepted, including those of a key that was already waiting
    dedupes        of these, enqueues of a key that was already going to run
    gets           keys handed out
    retries        failed runs that will be tried again
    interruptions  runs that were stopped from outside; their keys wait again
    refused        enqueues after the close, which are counted here and dropped
    waits          for each priority, how many waited so long (not cumulated; WAIT_BOUNDS)
    wait_sums      for each priority, seconds waited in total
    """

    __slots__ = (
        "adds",
        "dedupes",
        "gets",
        "interruptions",
        "refused",
        "retries",
        "wait_sums",
        "waits",
    )

    def __init__(self) -> None:
        self.adds = 0
        self.dedupes = 0
        self.gets = 0
        self.retries = 0
        self.interruptions = 0
        self.refused = 0
        self.waits = [[0] * (len(WAIT_BOUNDS) + 1) for _ in Priority]
        self.wait_sums = [0.0 for _ in Priority]
