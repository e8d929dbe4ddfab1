"""What the journal knows of one operation: values, and what may be wrong with a request.

1. A record is a value: it changes by being replaced.
2. An interrupted operation has no ending: it stays open until somebody decides.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from reconciled.core.resources import Fingerprint, Key


class Ending(enum.Enum):
    """How an operation was closed. An interrupted one is not closed: it stays open."""

    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"  # without a claim either way
    COMPLETED = "completed"  # settled by observation: what it was to do is there
    ROLLED_BACK = "rolled back"  # undone, or about to be, by the operation that it names


class StepState(enum.Enum):
    """STARTED without DONE: nobody knows whether it took effect."""

    STARTED = "started"
    DONE = "done"


class Resolution(enum.Enum):
    """What a person decided about a held operation (``journal resolve``)."""

    COMPLETE = "complete"
    FORWARD = "forward"
    BACK = "back"
    ABANDON = "abandon"


ONCE = "once"  # the kind of step that is never run again without a decision
PURE = "pure"  # the kind of step that has no effect, and so nothing to take back


@attrs.frozen
class StepRecord:
    """One step: *kind* is pure, idempotent or once; *data* what JSON can express.

    attempt  of its operation, in which it came to this state
    """

    name: str
    kind: str
    state: StepState
    data: Any = None
    attempt: int = 1


@attrs.frozen
class Hold:
    """Why an operation waits for a person.

    reason    a sentence
    code      one word for machines
    evidence  what was seen
    since     wall seconds
    by_cap    by the cap on recoveries: a changed spec lifts it too
    """

    reason: str
    code: str
    evidence: str
    since: float
    by_cap: bool = False
    context: str = ""  # of what was declared then: another one lifts a hold by the cap


@attrs.frozen
class Note:
    """What somebody decided about an operation: *who*, *what*, *why*, and when (wall seconds)."""

    at: float
    who: str
    what: str
    why: str


@attrs.frozen
class AppliedSpec:
    """What a key owns from the first effect of an operation on: its row of what was applied."""

    kind: str
    spec: dict[str, Any]
    fingerprint: Fingerprint
    base: str


@attrs.frozen
class OperationRecord:
    """An operation, open or past.

    attempt     1 for the first one
    epoch       of the start that its last attempt belongs to: a target may refuse a lower one
    pinned      the inputs its recovery works with, as plain data
    begun       wall time in seconds, for people
    recoveries  attempts in a row that were counted and ended without a word of their own
    undoes      the id of the operation that this one takes back; empty: none
    undone_by   the id of the one that takes this back
    critical    whether one of its parts was critical; noted with the next durable record
    boot_id     of its last attempt; empty: unknown
    machine_id  of its last attempt; empty: unknown
    ending      None: open
    ended       wall time in seconds; 0: open
    """

    id: str
    key: Key
    name: str
    attempt: int
    epoch: int
    pinned: Any
    begun: float
    steps: tuple[StepRecord, ...] = ()
    recoveries: int = 0
    undoes: str = ""
    undone_by: str = ""
    hold: Hold | None = None
    critical: bool = False
    boot_id: str = ""
    machine_id: str = ""
    notes: tuple[Note, ...] = ()
    ending: Ending | None = None
    ended: float = 0.0

    @property
    def last_step(self) -> str:
        """The last step that is done; empty before the first."""
        return next((s.name for s in self.steps[::-1] if s.state is StepState.DONE), "")

    @property
    def started_once_step(self) -> str:
        """A ONCE step that was started, done or not; empty: there is none."""
        return next((step.name for step in self.steps if step.kind == ONCE), "")

    @property
    def pending_resolution(self) -> str:
        """What a person decided and nobody has begun to carry out; empty: nothing."""
        last = self.notes[-1] if self.notes else None
        return last.what if last is not None and last.who else ""

    def step(self, name: str) -> StepRecord | None:
        """The step *name*, as it was last noted."""
        return next((step for step in self.steps if step.name == name), None)

    def with_step(self, step: StepRecord) -> OperationRecord:
        """This record with *step*, in the place of the one of that name or as the newest."""
        if self.step(step.name) is None:
            return attrs.evolve(self, steps=(*self.steps, step))
        steps = (step if other.name == step.name else other for other in self.steps)
        return attrs.evolve(self, steps=tuple(steps))
