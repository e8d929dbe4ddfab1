"""Decides what to do about an operation without a live actor: facts in, a decision out.

``decide`` and its caller keep this order: a cap on attempts before anything runs; then the
reconciler's own verdict; then what was observed; then the controller's policy. No policy
re-runs a ONCE step that was started and has no result: that needs a person or recover().
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from reconciled.core.durations import format_duration

Policy = Literal["roll-forward", "roll-back", "hold"]


class StepKind(enum.Enum):
    """What may be done with a step that was started and has no result."""

    PURE = "pure"  # no effect: run it again
    IDEMPOTENT = "idempotent"  # twice is the same as once: run it again
    ONCE = "once"  # never run again without a decision


class Observed(enum.Enum):
    """The result of observing the actual state."""

    AS_DESIRED = "as desired"
    DIFFERENT = "different"
    UNKNOWN = "unknown"  # could not be determined now: never the same as DIFFERENT


@attrs.frozen
class Observation:
    """The result of a reconciler's observe(). detail is for people, data for recover()."""

    state: Observed
    detail: str = ""
    data: Any = None


@attrs.frozen
class Step:
    """One step of an operation: done, or started and without a result."""

    name: str
    kind: StepKind
    done: bool
    data: Any = None


@attrs.frozen
class ProgramEnd:
    """How a program that outlived its daemon ended: with an exit code, or by a signal."""

    action: str
    code: int | None
    signal: int | None = None


@attrs.frozen
class Interrupted:
    """An operation without a live actor, as recover() sees it.

    spec     the pinned one, as an object of the reconciler's class
    attempt  the one that is about to run
    removal  it removes what was applied: a state as desired does not complete it
    undoes   id of the operation that this one compensates; empty otherwise
    ended    how its program ended, where one outlived the daemon and left a record
    """

    id: str
    key: str
    name: str
    spec: Any
    attempt: int
    steps: tuple[Step, ...] = ()
    removal: bool = False
    undoes: str = ""
    ended: ProgramEnd | None = None

    @property
    def last_step(self) -> str:
        """The last step that is done; empty before the first."""
        return next((step.name for step in reversed(self.steps) if step.done), "")

    @property
    def uncertain(self) -> str:
        """The ONCE step that was started and has no result; empty where there is none."""
        for step in self.steps:
            if step.kind is StepKind.ONCE and not step.done:
                return step.name
        return ""

    @property
    def began_once(self) -> bool:
        """Whether any ONCE step was started, done or not."""
        return any(step.kind is StepKind.ONCE for step in self.steps)


@attrs.frozen
class Complete:
    """Record it as done; nothing runs."""

    reason: str = ""


@attrs.frozen
class RollForward:
    """Run reconcile() with the pinned spec; it re-enters the same operation."""

    reason: str = ""


@attrs.frozen
class Retry:
    """As RollForward, but from the first step; only if no ONCE step was started."""

    reason: str = ""


@attrs.frozen
class RollBack:
    """Undo it, step by step, newest first, as a separate operation."""

    reason: str = ""


@attrs.frozen
class Wait:
    """Recover again in so many seconds, but not sooner than a failed run would be retried."""

    seconds: float = attrs.field()
    reason: str = ""

    @seconds.validator
    def _finite(self, _: object, seconds: float) -> None:
        if not 0 <= seconds < math.inf:
            raise ValueError(f"Wait() takes a finite time of at least 0 s, got {seconds!r}")


@attrs.frozen
class Hold:
    """Leave it unchanged, block this key only, and wait for a person's decision.

    by_cap  attempts kept ending without an outcome: a changed spec lifts such a hold too
    """

    reason: str
    evidence: str = ""
    commands: tuple[str, ...] = ()
    by_cap: bool = False


@attrs.frozen
class Abandon:
    """Close it, neither as done nor as failed; the next reconcile starts a new operation."""

    reason: str = ""


Decision = Complete | RollForward | Retry | RollBack | Wait | Hold | Abandon


@attrs.frozen
class Facts:
    """Everything that a decision depends on, apart from the operation itself.

    observation    None: the reconciler cannot observe
    verdict        what its recover() returned; None: no opinion
    recover_error  the exception that recover() raised; empty: none
    retry_in       seconds until a failed run would be retried
    """

    policy: Policy
    can_undo: bool
    observation: Observation | None = None
    verdict: Decision | None = None
    recover_error: str = ""
    retry_in: float = 1.0


def check_max_recoveries(
    recoveries: int, max_recoveries: int, own_request: str = ""
) -> Hold | None:
    """A hold instead of the next attempt, once *max_recoveries* have ended without an outcome.

    own_request  what a program of the operation requested last: stop or reload; empty: nothing
    """
    if recoveries < max_recoveries:
        return None
    if own_request:
        return Hold(
            f"its recovery did not complete {recoveries} times in a row: its own program requested"
            f" a {own_request} of the daemon, which interrupts it",
            "run `reconciled stop` or `reload` from outside the operation",
            by_cap=True,
        )
    return Hold(
        f"its recovery did not complete {recoveries} times in a row",
        "each attempt was killed or cut, or could not determine the state",
        by_cap=True,
    )


def decide(interrupted: Interrupted, facts: Facts) -> Decision:
    """The decision; always one that is legal for this operation."""
    if facts.recover_error:
        return Hold(f"recover() failed: {facts.recover_error}")
    return _legal(interrupted, facts, facts.verdict or _default(interrupted, facts))


def _default(interrupted: Interrupted, facts: Facts) -> Decision:
    if interrupted.undoes:
        # An interrupted undo is continued: its steps are idempotent by contract.
        return RollForward("an undo is continued until it is complete")
    # A removal is run again whatever is observed: only that finds what it has left undone.
    observation = None if interrupted.removal else facts.observation
    if observation is not None and observation.state is Observed.AS_DESIRED:
        return Complete(f"observed as desired{_detail(observation)}")
    if observation is not None and observation.state is Observed.UNKNOWN:
        return Wait(facts.retry_in, f"the state could not be determined{_detail(observation)}")
    if facts.policy == "roll-forward":
        return RollForward("policy")
    if facts.policy == "roll-back":
        return RollBack("policy")
    return Hold("the controller's policy is hold", _evidence(observation))


def _legal(interrupted: Interrupted, facts: Facts, decision: Decision) -> Decision:
    evidence = _evidence(facts.observation)
    uncertain = interrupted.uncertain
    if isinstance(decision, RollForward) and uncertain and facts.verdict is None:
        return Hold(
            f"step {uncertain} must run only once, was started, and has no result",
            evidence,
        )
    if isinstance(decision, Retry) and interrupted.began_once:
        return Hold(
            "it cannot restart from its first step: a step that must run only once was started",
            evidence,
        )
    if isinstance(decision, RollBack):
        if interrupted.undoes:
            return Hold("it undoes another operation; an undo cannot be undone itself", evidence)
        if not facts.can_undo:
            return Hold("it cannot be rolled back: its reconciler cannot undo it", evidence)
    return decision


def _detail(observation: Observation) -> str:
    return f": {observation.detail}" if observation.detail else ""


def _evidence(observation: Observation | None) -> str:
    if observation is None:
        return "its reconciler cannot observe the state"
    return f"observed {observation.state.value}{_detail(observation)}"


def resolve_commands(operation: str, *, can_undo: bool) -> tuple[str, ...]:
    """The commands that resolve a held operation, the least drastic first."""
    verb = f"reconciled journal resolve {operation}"
    commands = [f'{verb} --complete --why "…"', f'{verb} --forward --why "…"']
    if can_undo:
        commands.append(f'{verb} --back --why "…"')
    return (*commands, f'{verb} --abandon --why "…"')


def decision_fields(decision: Decision) -> Mapping[str, str]:
    """The decision as fields of a log line."""
    fields = {"decision": type(decision).__name__}
    if decision.reason:
        fields["reason"] = decision.reason
    if isinstance(decision, Wait):
        fields["retry_in"] = format_duration(decision.seconds)
    if isinstance(decision, Hold) and decision.evidence:
        fields["evidence"] = decision.evidence
    return fields
