"""Delayed entries ordered by due time, and the gates that hold them back.

A gate keeps enqueues less urgent than OPENS_GATE waiting until its time, so that a failing
run's self-triggered causes (ticks, own writes, an unchanged spec) cannot cut its backoff short.
A more urgent one opens the gate: the spec changed or a person acted, which may help.

Invariants: an entry has at most one due time, ``entry.due``: the earliest that was requested
and that its gate admits. Heap items that no longer agree with it are skipped, and are never
more than twice the live ones (plus a constant), so that moving an entry costs no memory.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reconciled.core.queue.states import OPENS_GATE, EntryState, Priority

if TYPE_CHECKING:
    from reconciled.core.queue.entry import Entry
    from reconciled.core.queue.ring import Ring

_SLACK = 64  # stale heap items that are not worth a clean-up

L = TypeVar("L")


class Delays(Generic[L]):
    """A heap with lazy removal: moving or dropping an entry leaves its old item behind."""

    __slots__ = ("_count", "_heap", "_live", "_ring", "first")

    def __init__(self, ring: Ring[Any]) -> None:
        # Not after the earliest due time: read before each hand-out, so a plain attribute.
        self.first = math.inf
        self._ring = ring
        self._heap: list[tuple[float, int, Entry[L]]] = []
        self._live = 0
        self._count = 0  # keeps equal times in order of arrival, and entries uncompared

    def __len__(self) -> int:
        return self._live

    def enqueue(self, entry: Entry[L], when: float, cause: str, priority: Priority) -> None:
        """Make *entry* due at *when*, or when its gate opens, unless it is due earlier.

        An entry without causes was kept only for its gate: this enqueue is its first.
        """
        if priority > OPENS_GATE:
            when = max(when, entry.gate)
        first = not entry.causes
        entry.record_cause(cause)
        entry.state = EntryState.DELAYED
        entry.priority = priority if first else min(entry.priority, priority)
        if when < math.inf and (first or entry.due is None or when < entry.due):
            self.move(entry, when)

    def close_gate(self, entry: Entry[L], until: float) -> None:
        """Hold back *entry*, which follows a run, unless one of its causes opens the gate.

        An infinite *until* holds it without an end: a terminal failure.
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

    def move(self, entry: Entry[L], when: float) -> None:
        """Make *entry* due at *when*, whatever its due time was."""
        self.drop(entry)
        entry.due = when
        self._live += 1
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, entry))
        if len(self._heap) > 2 * self._live + _SLACK:
            self._discard_stale()
        if when < self.first:
            self.first = when
            self._ring.wake_if_idle()

    def drop(self, entry: Entry[L]) -> None:
        """Remove the due time of *entry*; harmless where it has none."""
        if entry.due is not None:
            entry.due = None
            self._live -= 1

    def pop(self, now: float) -> Entry[L] | None:
        """Take out the earliest entry that is due at *now*; its wait counts from its due time."""
        heap = self._heap
        found: Entry[L] | None = None
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

    def _discard_stale(self) -> None:
        self._heap = [item for item in self._heap if item[2].due == item[0]]
        heapq.heapify(self._heap)
