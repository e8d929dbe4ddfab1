"""Whose turn it is: the controllers that have keys ready, in a ring, under one limit.

Invariants: a lane is in the ring exactly while it has waiting keys and runs fewer than its
own limit, and never after close(). Each hand-out takes the lane in front and puts it to
the back, so one controller's ten thousand keys delay another's one key by one turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reconciled.core.queue.lane import Lane


def wake_nobody() -> None:
    """Wakes nobody: the hook until someone sets theirs."""


class Ring:
    """The ring of ready lanes, the global limit, and the hook that wakes the dispatcher."""

    __slots__ = ("closed", "idle", "limit", "ready", "running", "wake")

    def __init__(self, limit: int) -> None:
        self.ready: deque[Lane] = deque()
        self.running = 0
        self.limit = limit
        self.closed = False
        self.idle = False  # the last get() had nothing: whoever asked may be asleep
        self.wake: Callable[[], None] = wake_nobody

    def offer(self, lane: Lane) -> None:
        """Put *lane*, which has become ready, at the back of the ring."""
        if self.closed:
            return
        lane.in_ring = True
        self.ready.append(lane)
        if self.idle:
            self.wake_if_ready()

    def withdraw(self, lane: Lane) -> None:
        """Take *lane* out of the ring; harmless where it is not in it."""
        if lane.in_ring:
            lane.in_ring = False
            self.ready.remove(lane)

    def wake_if_ready(self) -> None:
        """Wake the one that found nothing, if there is something for it now."""
        if self.idle and self.ready and self.running < self.limit:
            self.wake_if_idle()

    def wake_if_idle(self) -> None:
        """Wake the one that found nothing: its next time to look has changed."""
        if self.idle and not self.closed:
            self.idle = False
            self.wake()

    def close(self) -> None:
        """Hand out nothing any more; harmless when repeated."""
        self.closed = True
        for lane in self.ready:
            lane.in_ring = False
        self.ready.clear()
