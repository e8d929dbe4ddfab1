"""The round-robin ring of lanes that have keys ready, under one global limit.

Invariants: a lane is in the ring exactly while it has waiting keys and runs fewer than its
own limit, and never after close(). Each hand-out takes the lane at the front and puts it at
the back, so ten thousand keys of one controller delay a key of another by one hand-out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class RingMember(Protocol):
    """What the ring needs of a lane."""

    in_ring: bool  # written by the ring and, for speed, by the lane that it hands out


L = TypeVar("L", bound=RingMember)


def wake_nothing() -> None:
    """The ``wake`` hook until the dispatcher sets its own."""


class Ring(Generic[L]):
    """The ring of ready lanes, the global limit, and the hook that wakes the dispatcher."""

    __slots__ = ("closed", "idle", "limit", "ready", "running", "wake")

    def __init__(self, limit: int) -> None:
        self.ready: deque[L] = deque()
        self.running = 0
        self.limit = limit
        self.closed = False
        self.idle = False  # the last get() returned None: the dispatcher may be asleep
        self.wake: Callable[[], None] = wake_nothing

    def offer(self, lane: L) -> None:
        """Put *lane*, which has become ready, at the back of the ring."""
        if self.closed:
            return
        lane.in_ring = True
        self.ready.append(lane)
        if self.idle:
            self.wake_if_ready()

    def withdraw(self, lane: L) -> None:
        """Take *lane* out of the ring; harmless where it is not in it."""
        if lane.in_ring:
            lane.in_ring = False
            self.ready.remove(lane)

    def wake_if_ready(self) -> None:
        """Wake an idle dispatcher if get() would return a key now."""
        if self.idle and self.ready and self.running < self.limit:
            self.wake_if_idle()

    def wake_if_idle(self) -> None:
        """Wake an idle dispatcher: the time of its next get() has changed."""
        if self.idle and not self.closed:
            self.idle = False
            self.wake()

    def close(self) -> None:
        """Hand out nothing from now on; harmless when repeated."""
        self.closed = True
        for lane in self.ready:
            lane.in_ring = False
        self.ready.clear()
