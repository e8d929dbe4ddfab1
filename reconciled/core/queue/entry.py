"""A key's stay in the work queue: from the first cause until its run has ended.

Invariants: what a run was handed (causes, priority, failures) never changes while it runs,
since later causes go into a stay of their own, ``again``. A stay holds at most CAUSES
distinct causes and counts the others, so that a stream of events costs no memory.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from reconciled.core.queue.lane import Lane
    from reconciled.core.resources import Key

MAX_CAUSES = 8  # distinct causes kept of one stay; enough to explain a run, and a bound


class Priority(enum.IntEnum):
    """How urgent a wish is; smaller comes first, and nothing waits for ever (see Lane)."""

    RECOVERY = 0  # an interrupted operation: before any other work on its key
    ASKED = 1  # a person asked for it
    CHANGED = 2  # a foreign change of the spec
    RETRY = 3  # a failed run's next try
    RESYNC = 4  # ticks, own writes, an unchanged spec


# Up to here a wish opens a closed gate (see ``delays``).
OPENS_GATE = Priority.CHANGED


class EntryState(enum.Enum):
    """Where a stay stands."""

    WAITING = "waiting"
    DELAYED = "delayed"  # until it is due, or until a wish that its gate lets through
    RUNNING = "running"
    FORGOTTEN = "forgotten"  # running, and nothing of it is kept at its end
    REMOVED = "gone"  # taken out while waiting; only its place in the line is left


class KeyState(enum.Enum):
    """Where a key stands, in the words that people see."""

    WAITING = "waiting"
    RUNNING = "running"
    DIRTY = "dirty"  # running, with a cause that arrived since
    DELAYED = "delayed"
    RETRYING = "retrying"  # failed; until its backoff is over
    TERMINAL = "terminal"  # failed for good, until somebody changes something
    THROTTLED = "resting"  # as desired; only its gate is remembered


class Job(Protocol):
    """One key handed out for one run. Valid until it is given back to its lane."""

    @property
    def lane(self) -> Lane:
        """Where to give it back: ``job.lane.done(job, now)`` and the other endings."""

    @property
    def key(self) -> Key:
        """What to reconcile."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Why it runs: distinct, in order of arrival, CAUSES at most."""

    @property
    def more_causes(self) -> int:
        """How many wishes had a cause that found no room any more."""

    @property
    def priority(self) -> Priority:
        """The highest that was wished."""

    @property
    def waited(self) -> float:
        """Seconds from when it could have run until it did."""

    @property
    def started(self) -> float:
        """When it was handed out, in the clock of the queue's callers."""

    @property
    def failures(self) -> int:
        """Failed runs in a row before this one."""

    @property
    def dirty(self) -> bool:
        """Whether a cause arrived since it was handed out that wants a run at once."""


class Entry:
    """A stay; as a Job it is what get() hands out. Changed by its lane and by delays alone.

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
        self, lane: Lane, key: Key, causes: tuple[str, ...], priority: Priority, since: float
    ) -> None:
        self.lane = lane
        self.key = key
        self.causes = causes  # empty: nobody wants a run, only the gate is remembered
        self.priority = priority
        self.since = since  # when it could have run first
        self.state = _WAITING
        self.failures = 0
        self.more_causes = 0
        self.gate = 0.0  # before this, wishes below OPENS_GATE wait; infinite: terminal
        self.due: float | None = None  # set exactly while it is among the delays
        self.follow_up: Entry | None = None
        self.started = 0.0
        self.waited = 0.0

    @property
    def dirty(self) -> bool:
        """See Job."""
        return self.follow_up is not None and self.follow_up.state is _WAITING

    @property
    def running(self) -> bool:
        """Handed out and not back."""
        return self.state is EntryState.RUNNING or self.state is EntryState.FORGOTTEN

    @property
    def key_state(self) -> KeyState:
        """The state as people see it."""
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

    def absorb(self, other: Entry) -> None:
        """Take over the causes and the urgency of *other*, which came later."""
        for cause in other.causes:
            self.record_cause(cause)
        self.more_causes += other.more_causes
        self.priority = min(self.priority, other.priority)


_WAITING = EntryState.WAITING
