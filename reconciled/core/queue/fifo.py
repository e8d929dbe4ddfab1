"""The waiting keys of one controller: a fifo for each priority.

Invariants: a waiting entry is in the fifo of its priority exactly once; the slots that it left
behind (its priority was raised, its key forgotten) are recognised by its state and priority,
and are never more than the waiting entries (plus a constant).

Fairness: most hand-outs take the most urgent key; every AGEING-th takes the one that has
waited longest among the heads of the fifos. So a key with *n* older ones before it runs
within ``AGEING * (n + 1)`` hand-outs of its controller, whatever more urgent keys keep
arriving. Rejected: a priority that grows with time. A share by count costs nothing while one
priority waits, and needs no constant that must fit the load.

Rejected: an OrderedDict, from which an entry can be removed at once. It costs 300 ns more for
every key, a fifth of the whole cycle; a plain dict is slow at its front after many removals.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

from reconciled.core.queue.entry import Entry
from reconciled.core.queue.states import EntryState, Priority

AGEING = 8
_SLACK = 32  # slots left behind that are not worth a clean-up

L = TypeVar("L")


class PriorityFifo(Generic[L]):
    """The fifos of one lane, which appends and removes entries; the less frequent steps."""

    __slots__ = ("by_priority", "stale")

    def __init__(self) -> None:
        self.by_priority: tuple[deque[Entry[L]], ...] = tuple(deque() for _ in Priority)
        self.stale = 0  # slots left behind

    def choose(self, handout: int) -> deque[Entry[L]]:
        """The fifo whose head is next, for hand-out number *handout* of its lane.

        Raises IndexError if nothing waits.
        """
        if self.stale:
            self._drop_stale_heads()
        if handout % AGEING == 0:
            # Of equal waits the least urgent: the others are taken by the other hand-outs.
            return min(filter(None, reversed(self.by_priority)), key=_head_since)
        for fifo in self.by_priority:
            if fifo:
                return fifo
        raise IndexError("nothing waits")

    def mark_stale(self, waiting: int) -> None:
        """A waiting entry was raised or removed; *waiting* are left."""
        self.stale += 1
        if self.stale <= waiting + _SLACK:
            return
        for urgency, fifo in enumerate(self.by_priority):
            kept = [entry for entry in fifo if _is_live(entry, urgency)]
            fifo.clear()
            fifo.extend(kept)
        self.stale = 0

    def _drop_stale_heads(self) -> None:
        """Remove slots left behind until each fifo starts with a live entry."""
        for urgency, fifo in enumerate(self.by_priority):
            while fifo and not _is_live(fifo[0], urgency):
                fifo.popleft()
                self.stale -= 1


def _is_live(entry: Entry[Any], urgency: int) -> bool:
    return entry.state is EntryState.WAITING and entry.priority == urgency


def _head_since(fifo: deque[Entry[L]]) -> float:
    return fifo[0].since
