"""Stays that are due later, by time, and the gates they stand behind.

A gate keeps wishes below OPENS_GATE waiting until its time, so that a failing run's own
echo (ticks, own writes, an unchanged spec) cannot cut its backoff short. What is above opens
it: someone else did something that may help.

Invariants: an entry is due at one time at most, ``entry.due``, the earliest that anybody
wished and its gate allows; places in the heap that no longer agree with it are passed over,
and are never more than twice the live ones (plus a constant), so that moving a wish around
costs no memory.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from reconciled.core.queue.entry import OPENS_GATE, Entry, EntryState, Priority

if TYPE_CHECKING:
    from reconciled.core.queue.ring import Ring

_SLACK = 64  # stale places that are not worth a clean-up


class Delays:
    """A heap with lazy removal: moving or dropping an entry leaves its old place behind."""

    __slots__ = ("_count", "_heap", "_live", "_ring", "first")

    def __init__(self, ring: Ring) -> None:
        # Not after the earliest due time: read before each hand-out, so a plain attribute.
        self.first = math.inf
        self._ring = ring
        self._heap: list[tuple[float, int, Entry]] = []
        self._live = 0
        self._count = 0  # keeps equal times in order of arrival, and entries uncompared

    def __len__(self) -> int:
        return self._live

    def enqueue(self, entry: Entry, when: float, cause: str, priority: Priority) -> None:
        """Let *entry* be due at *when*, or once its gate lets it, unless it is due before.

        An entry without causes stood there only for its gate: the wish is its first.
        """
        if priority > OPENS_GATE:
            when = max(when, entry.gate)
        first = not entry.causes
        entry.record_cause(cause)
        entry.state = EntryState.DELAYED
        entry.priority = priority if first else min(entry.priority, priority)
        if when < math.inf and (first or entry.due is None or when < entry.due):
            self.move(entry, when)

    def close_gate(self, entry: Entry, until: float) -> None:
        """Hold *entry*, which is to follow a run, unless it has a cause to go on at once.

        An infinite *until* holds it for good: a terminal failure.
        """
        opens = bool(entry.causes) and entry.priority <= OPENS_GATE
        if opens and entry.state is EntryState.WAITING:
            return
        entry.gate = until
        entry.state = EntryState.DELAYED
        if opens or (entry.causes and entry.due is not None and entry.due >= until):
            return
        if until < math.inf:
            self.move(entry, until)
        else:
            self.drop(entry)

    def move(self, entry: Entry, when: float) -> None:
        """Make *entry* due at *when*, whatever it was before."""
        self.drop(entry)
        entry.due = when
        self._live += 1
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, entry))
        if len(self._heap) > 2 * self._live + _SLACK:
            self._tidy()
        if when < self.first:
            self.first = when
            self._ring.wake_if_idle()

    def drop(self, entry: Entry) -> None:
        """Make *entry* due never; harmless where it is not."""
        if entry.due is not None:
            entry.due = None
            self._live -= 1

    def pop(self, now: float) -> Entry | None:
        """Take out the earliest entry that is due at *now*; its wait counts from its time."""
        heap = self._heap
        found: Entry | None = None
        while heap and found is None and heap[0][0] <= now:
            when, _, entry = heapq.heappop(heap)
            if entry.due == when:
                self.drop(entry)
                entry.since = when
                found = entry
        self.first = heap[0][0] if heap else math.inf
        return found

    def next(self) -> float | None:
        """The earliest due time; None: nothing is delayed."""
        heap = self._heap
        while heap and heap[0][2].due != heap[0][0]:
            heapq.heappop(heap)
        self.first = heap[0][0] if heap else math.inf
        return heap[0][0] if heap else None

    def _tidy(self) -> None:
        self._heap = [place for place in self._heap if place[2].due == place[0]]
        heapq.heapify(self._heap)
