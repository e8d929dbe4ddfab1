"""The decision about an interrupted operation: every row of its tables, and that it is legal."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.recovery import (
    Abandon,
    Complete,
    Decision,
    Facts,
    Hold,
    Interrupted,
    Observation,
    Observed,
    Policy,
    Retry,
    RollBack,
    RollForward,
    Step,
    StepKind,
    Wait,
    check_max_recoveries,
    decide,
    decision_fields,
    resolve_commands,
)

DONE = Step("first", StepKind.IDEMPOTENT, done=True)
HALF = Step("second", StepKind.IDEMPOTENT, done=False)
ONCE_DONE = Step("sent", StepKind.ONCE, done=True)
ONCE_HALF = Step("send", StepKind.ONCE, done=False)


def operation(*steps: Step, removal: bool = False, undoes: str = "") -> Interrupted:
    """An operation at its second attempt."""
    return Interrupted("id", "c/a", "apply", None, 2, steps, removal=removal, undoes=undoes)


def facts(
    policy: Policy = "roll-forward",
    seen: Observed | None = None,
    verdict: Decision | None = None,
    *,
    can_undo: bool = True,
) -> Facts:
    """The facts, with an observation if *seen* is given."""
    observation = None if seen is None else Observation(seen, "as found")
    return Facts(policy, can_undo, observation, verdict, retry_in=3.0)


A, D, U = Observed.AS_DESIRED, Observed.DIFFERENT, Observed.UNKNOWN

# observed, policy, whether it can be undone, steps: the decision without a verdict.
BY_DEFAULT: list[tuple[Observed | None, Policy, bool, tuple[Step, ...], type[Decision]]] = [
    # As desired is complete, whatever the policy and whatever step was started.
    (A, "roll-forward", True, (), Complete),
    (A, "roll-back", True, (DONE, HALF), Complete),
    (A, "hold", False, (DONE,), Complete),
    (A, "roll-forward", True, (ONCE_HALF,), Complete),
    # Unknown is observed again, and never taken for different.
    (U, "roll-forward", True, (), Wait),
    (U, "roll-back", True, (DONE,), Wait),
    (U, "hold", True, (DONE,), Wait),
    (U, "roll-forward", True, (ONCE_HALF,), Wait),
    # Different, or not observable: the policy.
    (D, "roll-forward", True, (), RollForward),
    (D, "roll-forward", False, (DONE, HALF), RollForward),
    (D, "roll-forward", True, (ONCE_DONE,), RollForward),
    (D, "roll-forward", True, (DONE, ONCE_HALF), Hold),
    (D, "roll-back", True, (), RollBack),
    (D, "roll-back", True, (DONE, HALF), RollBack),
    (D, "roll-back", True, (DONE, ONCE_HALF), RollBack),
    (D, "roll-back", False, (DONE,), Hold),
    (D, "hold", True, (), Hold),
    (D, "hold", True, (DONE,), Hold),
    (None, "roll-forward", True, (DONE, HALF), RollForward),
    (None, "roll-forward", True, (ONCE_HALF,), Hold),
    (None, "roll-back", True, (DONE,), RollBack),
    (None, "roll-back", False, (DONE,), Hold),
    (None, "hold", True, (DONE,), Hold),
]


@pytest.mark.parametrize(("seen", "policy", "can_undo", "steps", "wanted"), BY_DEFAULT)
def test_the_default_decision(
    seen: Observed | None,
    policy: Policy,
    can_undo: bool,  # noqa: FBT001 - a column of the table
    steps: tuple[Step, ...],
    wanted: type[Decision],
) -> None:
    """The observation decides, then the policy; neither runs a ONCE step again."""
    assert type(decide(operation(*steps), facts(policy, seen, can_undo=can_undo))) is wanted


# the reconciler's verdict, steps, whether it can be undone: the decision.
BY_VERDICT: list[tuple[Decision, tuple[Step, ...], bool, type[Decision]]] = [
    (Complete(), (ONCE_HALF,), False, Complete),
    (Abandon(), (ONCE_HALF,), False, Abandon),
    (Wait(5.0), (ONCE_HALF,), False, Wait),
    (Hold("check it"), (), True, Hold),
    # recover() may decide to run a ONCE step again; no decision may forget that it was started.
    (RollForward(), (DONE, ONCE_HALF), False, RollForward),
    (Retry(), (DONE, HALF), False, Retry),
    (Retry(), (ONCE_HALF,), True, Hold),
    (Retry(), (ONCE_DONE, HALF), True, Hold),
    (RollBack(), (DONE, ONCE_HALF), True, RollBack),
    (RollBack(), (DONE,), False, Hold),
]


@pytest.mark.parametrize(("verdict", "steps", "can_undo", "wanted"), BY_VERDICT)
@pytest.mark.parametrize("seen", [A, D, U, None])
def test_the_verdict_of_the_reconciler(
    verdict: Decision,
    steps: tuple[Step, ...],
    can_undo: bool,  # noqa: FBT001 - a column of the table
    wanted: type[Decision],
    seen: Observed | None,
) -> None:
    """A verdict precedes the observation and the policy, as far as it is legal."""
    decided = decide(operation(*steps), facts("hold", seen, verdict, can_undo=can_undo))
    assert type(decided) is wanted


@pytest.mark.parametrize("seen", [A, D, U, None])
@pytest.mark.parametrize("policy", ["roll-forward", "roll-back", "hold"])
def test_an_undo_is_continued(policy: Policy, seen: Observed | None) -> None:
    """An interrupted undo is continued, whatever is observed and whatever the policy."""
    half = operation(Step("undo first", StepKind.IDEMPOTENT, done=False), undoes="other")
    assert type(decide(half, facts(policy, seen))) is RollForward


def test_an_undo_is_not_undone() -> None:
    """An undo that recover() wants rolled back is held."""
    assert type(decide(operation(undoes="other"), facts(verdict=RollBack()))) is Hold


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [("roll-forward", RollForward), ("roll-back", RollBack), ("hold", Hold)],
)
@pytest.mark.parametrize("seen", [A, D, U, None])
def test_a_removal_is_decided_by_the_policy(
    policy: Policy, wanted: type[Decision], seen: Observed | None
) -> None:
    """An observation as desired does not complete a removal, nor does an unknown one delay it."""
    assert type(decide(operation(removal=True), facts(policy, seen))) is wanted


def test_a_recover_that_fails_is_a_hold() -> None:
    """After a recover() that raised, a person decides; the hold names the exception."""
    broken = attrs.evolve(facts(seen=A, verdict=RollForward()), recover_error="KeyError: 'x'")
    decided = decide(operation(), broken)
    assert isinstance(decided, Hold)
    assert "KeyError: 'x'" in decided.reason


@pytest.mark.parametrize(
    ("recoveries", "cap", "held"), [(0, 1, False), (1, 1, True), (2, 3, False), (3, 3, True)]
)
def test_c02_the_cap(recoveries: int, cap: int, held: bool) -> None:  # noqa: FBT001 - a column
    """At most max_recoveries attempts in a row are made without an outcome."""
    hold = check_max_recoveries(recoveries, cap)
    assert (hold is not None) == held
    assert hold is None or hold.by_cap


def test_a_hold_shows_what_was_seen() -> None:
    """A hold has the observation as its evidence, or that the state cannot be observed."""
    for seen, evidence in ((D, "observed different: as found"), (None, "cannot observe")):
        decided = decide(operation(ONCE_HALF), facts(seen=seen))
        assert isinstance(decided, Hold)
        assert evidence in decided.evidence
        assert "send" in decided.reason


def test_a_wait_is_as_long_as_the_retry() -> None:
    """An unknown state is observed again after the controller's first delay."""
    assert decide(operation(), facts(seen=U)) == Wait(
        3.0, "the state could not be determined: as found"
    )


def test_commands_offer_what_can_be_done() -> None:
    """The commands of a hold include --back only where the operation can be undone."""
    options = [command.split()[4] for command in resolve_commands("ID", can_undo=True)]
    assert options == ["--complete", "--forward", "--back", "--abandon"]
    assert "--back" not in " ".join(resolve_commands("ID", can_undo=False))


def test_a_log_line_describes_a_decision() -> None:
    """The fields of a decision are its name and its reasons, and nothing that is empty."""
    assert decision_fields(Wait(3.0, "busy")) == {
        "decision": "Wait", "reason": "busy", "retry_in": "3s",
    }  # fmt: skip
    assert decision_fields(Hold("check it", "seen")) == {
        "decision": "Hold", "reason": "check it", "evidence": "seen",
    }  # fmt: skip
    assert decision_fields(Complete()) == {"decision": "Complete"}


names = st.sampled_from(["a", "b", "c"])
steps = st.lists(
    st.builds(Step, names, st.sampled_from(StepKind), st.booleans()),
    max_size=3,
    unique_by=lambda step: step.name,
)
verdicts = st.one_of(
    st.none(),
    st.sampled_from([Complete(), RollForward(), Retry(), RollBack(), Hold("x"), Abandon()]),
    st.builds(Wait, st.floats(0, 300)),
)


@given(
    steps=steps,
    removal=st.booleans(),
    undoes=st.sampled_from(["", "other"]),
    policy=st.sampled_from(["roll-forward", "roll-back", "hold"]),
    can_undo=st.booleans(),
    seen=st.one_of(st.none(), st.sampled_from(Observed)),
    verdict=verdicts,
)
def test_a_decision_is_always_legal(  # noqa: PLR0917 - handed in by name
    steps: list[Step],
    removal: bool,  # noqa: FBT001 - handed in by name
    undoes: str,
    policy: Policy,
    can_undo: bool,  # noqa: FBT001 - handed in by name
    seen: Observed | None,
    verdict: Decision | None,
) -> None:
    """Whatever the facts, each decision is legal, and a verdict is replaced only by a hold."""
    interrupted = operation(*steps, removal=removal, undoes=undoes)
    decided = decide(interrupted, facts(policy, seen, verdict, can_undo=can_undo))
    began_once = [step for step in steps if step.kind is StepKind.ONCE]
    if isinstance(decided, Retry):
        assert not began_once
    if isinstance(decided, RollBack):
        assert can_undo
        assert not undoes
    if isinstance(decided, RollForward) and any(not step.done for step in began_once):
        assert isinstance(verdict, RollForward)
    if verdict is not None:
        assert decided == verdict or isinstance(decided, Hold)
    if isinstance(decided, Complete) and verdict is None:
        assert seen is Observed.AS_DESIRED
        assert not removal
        assert not undoes
