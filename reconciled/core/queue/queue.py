"""The work queue: which key runs next. Keys, never events; pure, with time handed in.

Each controller has a lane; the lanes share one global limit, round-robin. ``lane`` describes
what an enqueue, an ending or a delay does to a key; this module hands out and closes.

Invariants: get() returns no key of a controller that runs as many as its limit, none at the
global limit, and none ever after close() (invariant 2). ``wake`` is called at most once
between two get() calls, and whenever get() returned None and would return a key now, or the
time of next_due() moved ahead. Not thread-safe: it belongs to the event loop.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs

from reconciled.core.queue.delays import Delays
from reconciled.core.queue.lane import Job, Lane
from reconciled.core.queue.ring import Ring
from reconciled.core.queue.states import KeyState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from reconciled.core.queue.backoff import Backoff


@attrs.frozen
class Unserved:
    """What a closed queue holds back: the next start's complete list brings it again."""

    waiting: int
    delayed: int
    retrying: int  # failed, and not yet tried again
    dirty: int  # running, with a cause that arrived since
    refused: int  # enqueues after the close


class WorkQueue:
    """All lanes.

    The dispatcher's loop: get() until None, then sleep until next_due() or ``wake``. Each
    job is given back by one of the endings of ``job.lane``.
    """

    def __init__(self, limit: int, rng: Random) -> None:
        self._rng = rng
        self._ring = Ring[Lane](limit)
        self._delays = Delays[Lane](self._ring)
        self._lanes: dict[str, Lane] = {}
        self._dropped: dict[str, Lane] = {}

    # -- lanes and limits

    def lane(self, name: str, limit: int, backoff: Backoff) -> Lane:
        """The lane of controller *name*, created or given this limit and backoff.

        A lane that was dropped while its keys ran is returned with these still running, so
        that a controller that returns at a reload never runs one of them twice at once.
        """
        self._discard_drained_lanes()
        lane = self._lanes.get(name) or self._dropped.pop(name, None)
        if lane is None:
            lane = Lane(name, limit, backoff, ring=self._ring, delays=self._delays, rng=self._rng)
        self._lanes[name] = lane
        lane.closed = self._ring.closed
        lane.backoff = backoff
        lane.limit = limit
        return lane

    def drop_lane(self, name: str) -> None:
        """Forget every key of controller *name*; its runs continue, later enqueues are refused."""
        lane = self._lanes.pop(name, None)
        if lane is None:
            return
        lane.closed = True
        for entry in list(lane):
            lane.forget(entry.key)
        self._dropped[name] = lane
        self._discard_drained_lanes()

    def __iter__(self) -> Iterator[Lane]:
        """The lanes, for inspection."""
        return iter(self._lanes.values())

    @property
    def limit(self) -> int:
        """How many keys may run at once over all lanes; 0 pauses. May be changed at any time."""
        return self._ring.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._ring.limit = limit
        self._ring.wake_if_ready()

    @property
    def running(self) -> int:
        """Jobs handed out and not given back, including those of dropped lanes."""
        return self._ring.running

    @property
    def wake(self) -> Callable[[], None]:
        """Called, synchronously, when get() returned None and should be called again."""
        return self._ring.wake

    @wake.setter
    def wake(self, wake: Callable[[], None]) -> None:
        self._ring.wake = wake

    # -- handing out

    def get(self, now: float) -> Job | None:
        """The next key to run, or None: nothing is ready, a limit is reached, or closed."""
        delays = self._delays
        ring = self._ring
        if delays.first <= now and not ring.closed:
            while (entry := delays.pop(now)) is not None:
                entry.lane.come_due(entry)
        if not ring.ready or ring.running >= ring.limit:
            ring.idle = True
            return None
        ring.running += 1
        return ring.ready.popleft().take(now)

    def next_due(self) -> float | None:
        """When the next delayed key is due and get() has to be called. None: nothing is delayed."""
        return None if self._ring.closed else self._delays.next()

    # -- the end

    def close(self) -> Unserved:
        """Hand out nothing and refuse enqueues from now on. Running jobs are still given back.

        Harmless when repeated.
        """
        self._ring.close()
        for lane in self._lanes.values():
            lane.closed = True
        return self.unserved()

    def unserved(self) -> Unserved:
        """The keys that are queued and not running. After a close: what it has held back."""
        lanes = self._lanes.values()
        keys = Counter(entry.key_state for lane in lanes for entry in lane)
        return Unserved(
            waiting=keys[KeyState.WAITING],
            delayed=keys[KeyState.DELAYED],
            retrying=keys[KeyState.RETRYING],
            dirty=keys[KeyState.DIRTY],
            refused=sum(lane.counters.refused for lane in (*lanes, *self._dropped.values())),
        )

    def _discard_drained_lanes(self) -> None:
        """Discard dropped lanes whose last run has ended."""
        for name in [name for name, lane in self._dropped.items() if not len(lane)]:
            del self._dropped[name]
