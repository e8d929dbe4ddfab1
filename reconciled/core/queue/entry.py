"""One entry of the work queue: a key from its first cause until its run has ended.

Invariants: what a run was handed (causes, priority, failures) never changes while it runs;
later causes go into an entry of their own, ``follow_up``. An entry keeps at most MAX_CAUSES
distinct causes and counts the others, so that a stream of events costs no memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

from reconciled.core.queue.states import EntryState, KeyState, Priority

if TYPE_CHECKING:
    from reconciled.core.resources import Key

MAX_CAUSES = 8  # distinct causes kept in one entry: enough to explain a run, and a bound

# The type of the lane, which lies above this module: an entry only carries it.
L = TypeVar("L")
# An attribute of an Enum class costs ten times as much to read as a global.
_WAITING = EntryState.WAITING


class Entry(Generic[L]):
    """An entry; as a ``Job`` it is what get() hands out. Changed by its lane and by delays alone.

    Not an attrs class: one is made for each add, and filling the slots by hand is what
    keeps that under half a microsecond.
    """

    __slots__ = (
        "causes",
        "due",
        "failures",
        "follow_up",
        "gate",
        "key",
        "lane",
        "more_causes",
        "priority",
        "since",
        "started",
        "state",
        "waited",
    )

    def __init__(
        self, lane: L, key: Key, causes: tuple[str, ...], priority: Priority, since: float
    ) -> None:
        self.lane = lane
        self.key = key
        self.causes = causes  # empty: no run is requested, only the gate is remembered
        self.priority = priority
        self.since = since  # when it could have run first
        self.state = _WAITING
        self.failures = 0
        self.more_causes = 0
        # Until then an enqueue less urgent than OPENS_GATE waits; infinite: terminal.
        self.gate = 0.0
        self.due: float | None = None  # set exactly while it is among the delays
        self.follow_up: Entry[L] | None = None
        self.started = 0.0
        self.waited = 0.0

    @property
    def dirty(self) -> bool:
        """See ``Job.dirty``."""
        return self.follow_up is not None and self.follow_up.state is _WAITING

    @property
    def running(self) -> bool:
        """Whether it is handed out and not yet given back."""
        return self.state is EntryState.RUNNING or self.state is EntryState.FORGOTTEN

    @property
    def key_state(self) -> KeyState:
        """The state of its key as a person sees it."""
        if self.running:
            return KeyState.DIRTY if self.dirty else KeyState.RUNNING
        if self.state is not EntryState.DELAYED:
            return KeyState.WAITING
        if self.gate == math.inf:
            return KeyState.TERMINAL
        if not self.causes:
            return KeyState.THROTTLED
        return KeyState.RETRYING if self.failures else KeyState.DELAYED

    def record_cause(self, cause: str) -> None:
        """Keep *cause*, once."""
        if cause in self.causes:
            return
        if len(self.causes) < MAX_CAUSES:
            self.causes += (cause,)
        else:
            self.more_causes += 1

    def absorb(self, other: Entry[L]) -> None:
        """Take over the causes and the urgency of *other*, which came later."""
        for cause in other.causes:
            self.record_cause(cause)
        self.more_causes += other.more_causes
        self.priority = min(self.priority, other.priority)
