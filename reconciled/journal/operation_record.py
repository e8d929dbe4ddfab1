"""The values that describe one operation in the journal.

1. A record is immutable: a change replaces it.
2. An interrupted operation has no ending: it stays open until recovery or a person decides.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from reconciled.core.resources import Fingerprint, Key


class Ending(enum.Enum):
    """How an operation was closed. An interrupted operation is not closed: it stays open."""

    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"  # closed without a statement whether it took effect
    COMPLETED = "completed"  # by observation or decision: its effect is present
    ROLLED_BACK = "rolled back"  # undone, or being undone, by the operation in undone_by


class StepState(enum.Enum):
    """STARTED without DONE: the step may or may not have taken effect."""

    STARTED = "started"
    DONE = "done"


class Resolution(enum.Enum):
    """What a person decided about a held operation (``journal resolve``)."""

    COMPLETE = "complete"
    FORWARD = "forward"
    BACK = "back"
    ABANDON = "abandon"


ONCE = "once"  # the kind of step that is not repeated without a decision
PURE = "pure"  # the kind of step without an effect: nothing to undo
# What the daemon's own notes are about.
OWN_REQUEST = "own request"  # a program of the operation requested a stop or reload
RETRIED = "retried"  # a Retry has deleted the steps
CONTROLLER_MISSING = "controller"  # the code of a hold that ends when the controller runs again


@attrs.frozen
class StepRecord:
    """One step of an operation.

    kind     pure, idempotent or once
    data     its result, as JSON can express it
    attempt  the attempt of the operation in which it reached this state
    """

    name: str
    kind: str
    state: StepState
    data: Any = None
    attempt: int = 1


@attrs.frozen
class Hold:
    """Why an operation waits for a person.

    reason    a sentence for people
    code      one word for programs
    evidence  what was observed
    since     wall time in seconds
    by_cap    caused by max_recoveries: a changed spec also lifts it
    context   identifies what was declared then: another one lifts a hold by_cap
    """

    reason: str
    code: str
    evidence: str
    since: float
    by_cap: bool = False
    context: str = ""


@attrs.frozen
class Note:
    """A decision about an operation: when (wall seconds), who (empty: the daemon), what, why."""

    at: float
    who: str
    what: str
    why: str


@attrs.frozen
class AppliedSpec:
    """What a key owns from the first effect of an operation on: its row of the applied specs."""

    kind: str
    spec: dict[str, Any]
    fingerprint: Fingerprint
    base: str


@attrs.frozen
class OperationRecord:
    """An operation, open or past.

    attempt     1 for the first one
    epoch       of the start of its last attempt: a target may refuse a lower one (fencing token)
    pinned      the inputs that its recovery uses, as plain data
    begun       wall time in seconds, for people
    recoveries  attempts in a row that were counted and did not complete
    undoes      the id of the operation that this one undoes; empty: none
    undone_by   the id of the operation that undoes this one; empty: none
    critical    whether one of its parts was critical; durable with the next write
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
        """The last step that is done; empty: none is."""
        return next((s.name for s in self.steps[::-1] if s.state is StepState.DONE), "")

    @property
    def started_once_step(self) -> str:
        """A ONCE step that was started, done or not; empty: none."""
        return next((step.name for step in self.steps if step.kind == ONCE), "")

    @property
    def pending_resolution(self) -> str:
        """A person's decision that no attempt has used yet; empty: none."""
        last = self.notes[-1] if self.notes else None
        return last.what if last is not None and last.who else ""

    @property
    def own_request(self) -> str:
        """What a program of its last attempt requested of the daemon: stop, reload, or nothing."""
        last = self.notes[-1] if self.notes else None
        if last is None or last.what != OWN_REQUEST:
            return ""
        verb, _, attempt = last.why.partition(" in attempt ")
        return verb if attempt == str(self.attempt) else ""

    @property
    def retried(self) -> bool:
        """Whether a Retry has deleted steps: a step of its last attempt need not be a new one."""
        return any(note.what == RETRIED for note in self.notes)

    @property
    def progressed(self) -> bool:
        """Whether its last attempt has done a step that no earlier one had done."""
        return not self.retried and any(
            step.state is StepState.DONE and step.attempt == self.attempt for step in self.steps
        )

    def step(self, name: str) -> StepRecord | None:
        """The step *name* as last recorded; None: it was not started."""
        return next((step for step in self.steps if step.name == name), None)

    def with_step(self, step: StepRecord) -> OperationRecord:
        """This record with *step* in place of the one of that name, or appended."""
        if self.step(step.name) is None:
            return attrs.evolve(self, steps=(*self.steps, step))
        steps = (step if other.name == step.name else other for other in self.steps)
        return attrs.evolve(self, steps=tuple(steps))
