"""The waiting keys of one controller: a line for each priority, first in, first out.

Invariants: a waiting entry stands in the line of its priority exactly once; places it left
behind (raised, forgotten) are known by its state and priority, and are never more than the
waiting entries (plus a constant).

Fairness: most hand-outs take the most urgent key; every AGEING-th takes the one that has
waited longest of those that lead their line. So a key with *n* older ones before it runs
within ``AGEING * (n + 1)`` hand-outs of its controller, whatever keeps arriving above it. A
share by count, not a priority that grows with time: it costs nothing while one priority
waits, and needs no constant that must fit the load.

An OrderedDict could take an entry out at once, but costs 300 ns more for every key, a fifth
of the whole cycle; a plain dict is slow at its front after many removals there.
"""

from __future__ import annotations

from collections import deque

from reconciled.core.queue.entry import Entry, EntryState, Priority

AGEING = 8
_SLACK = 32  # places left behind that are not worth a clean-up


class PriorityFifo:
    """Where its lane puts entries in and takes them out itself; here is what is rarer."""

    __slots__ = ("by_priority", "stale")

    def __init__(self) -> None:
        self.by_priority: tuple[deque[Entry], ...] = tuple(deque() for _ in Priority)
        self.stale = 0  # places left behind

    def choose(self, handout: int) -> deque[Entry]:
        """The line whose first entry comes next, for the *turn*-th hand-out of its lane."""
        if self.stale:
            self._drop_stale_heads()
        if handout % AGEING == 0:
            # Of equal waits the least urgent: the others have the other turns.
            return min(filter(None, reversed(self.by_priority)), key=_head_since)
        for line in self.by_priority:
            if line:
                return line
        raise IndexError("nothing waits")

    def mark_stale(self, waiting: int) -> None:
        """An entry in line was raised or is gone; *waiting* are left."""
        self.stale += 1
        if self.stale <= waiting + _SLACK:
            return
        for urgency, line in enumerate(self.by_priority):
            kept = [entry for entry in line if _is_live(entry, urgency)]
            line.clear()
            line.extend(kept)
        self.stale = 0

    def _drop_stale_heads(self) -> None:
        """Make the first place of every line one that is taken."""
        for urgency, line in enumerate(self.by_priority):
            while line and not _is_live(line[0], urgency):
                line.popleft()
                self.stale -= 1


def _is_live(entry: Entry, urgency: int) -> bool:
    return entry.state is EntryState.WAITING and entry.priority == urgency


def _head_since(line: deque[Entry]) -> float:
    return line[0].since
