"""Every row of the decisions about an operation whose actor is gone."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

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
    commands_for,
    decide,
    describe,
    past_cap,
)

SEEN: dict[str, Observation | None] = {
    "cannot": None,
    "as desired": Observation(Observed.AS_DESIRED, "it is there"),
    "different": Observation(Observed.DIFFERENT, "it is not"),
    "unknown": Observation(Observed.UNKNOWN, "no route"),
}
FORWARD: Policy = "roll-forward"
BACK: Policy = "roll-back"
HOLD: Policy = "hold"
POLICIES = (FORWARD, BACK, HOLD)
ONCE, PURE, IDEMPOTENT = StepKind.ONCE, StepKind.PURE, StepKind.IDEMPOTENT
STARTED, DONE = Step("pay", ONCE, done=False), Step("pay", ONCE, done=True)
REPEATABLE = (Step("look", PURE, done=True), Step("write", IDEMPOTENT, done=False))


def operation(*steps: Step, **fields: Any) -> Interrupted:
    """An interrupted one."""
    return Interrupted("01X", "c/a", "apply", None, 2, steps, **fields)


def kind_of(decision: Decision) -> str:
    return type(decision).__name__


# What was seen x policy -> decision; nothing can undo. No ONCE step, no word of the reconciler's.
DEFAULTS = [
    ("cannot", FORWARD, "RollForward"),
    ("cannot", BACK, "Hold"),
    ("cannot", HOLD, "Hold"),
    ("as desired", FORWARD, "Complete"),
    ("as desired", BACK, "Complete"),
    ("as desired", HOLD, "Complete"),
    ("different", FORWARD, "RollForward"),
    ("different", BACK, "Hold"),
    ("different", HOLD, "Hold"),
    ("unknown", FORWARD, "Wait"),
    ("unknown", BACK, "Wait"),
    ("unknown", HOLD, "Wait"),
]


@pytest.mark.parametrize(("seen", "policy", "expected"), DEFAULTS)
@pytest.mark.parametrize("steps", [(), REPEATABLE], ids=["no step", "steps"])
@pytest.mark.parametrize("can_undo", [False, True])
def test_default(
    seen: str, policy: Policy, expected: str, steps: tuple[Step, ...], *, can_undo: bool
) -> None:
    """What was observed decides, then the policy; back only where something can undo."""
    if can_undo and policy == BACK and expected == "Hold":
        expected = "RollBack"
    facts = Facts(policy, can_undo, SEEN[seen], retry_in=7.0)
    decision = decide(operation(*steps), facts)
    assert kind_of(decision) == expected
    if isinstance(decision, Wait):
        assert decision.seconds == 7.0
        assert "no route" in decision.reason
    if isinstance(decision, Complete):
        assert "it is there" in decision.reason


# A ONCE step that was started and has no result, without a word: what was seen x policy.
UNCERTAIN = [
    ("cannot", FORWARD, "Hold"),
    ("cannot", BACK, "RollBack"),
    ("cannot", HOLD, "Hold"),
    ("as desired", FORWARD, "Complete"),
    ("as desired", BACK, "Complete"),
    ("as desired", HOLD, "Complete"),
    ("different", FORWARD, "Hold"),
    ("different", BACK, "RollBack"),
    ("different", HOLD, "Hold"),
    ("unknown", FORWARD, "Wait"),
    ("unknown", BACK, "Wait"),
    ("unknown", HOLD, "Wait"),
]


@pytest.mark.parametrize(("seen", "policy", "expected"), UNCERTAIN)
def test_once_without_a_result(seen: str, policy: Policy, expected: str) -> None:
    """No policy runs a ONCE step again that was started and has no result."""
    decision = decide(operation(STARTED), Facts(policy, can_undo=True, observation=SEEN[seen]))
    assert kind_of(decision) == expected
    if policy == FORWARD and expected == "Hold":
        assert isinstance(decision, Hold)
        assert "pay" in decision.reason
        assert not decision.by_cap


def test_once_with_a_result() -> None:
    """A ONCE step that is done stands in nobody's way: it gives its data."""
    decision = decide(operation(DONE, *REPEATABLE), Facts(FORWARD, can_undo=False))
    assert kind_of(decision) == "RollForward"


# A removal: what was seen never completes it, nor makes it wait.
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(
    ("policy", "expected"), [(FORWARD, "RollForward"), (BACK, "RollBack"), (HOLD, "Hold")]
)
def test_removal(seen: str, policy: Policy, expected: str) -> None:
    """A removal is not completed because the spec is as desired: it goes by the policy."""
    facts = Facts(policy, can_undo=True, observation=SEEN[seen])
    assert kind_of(decide(operation(removal=True), facts)) == expected


# An undoing goes on, whatever is seen and whatever the policy.
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("can_undo", [False, True])
def test_undoing(seen: str, policy: Policy, *, can_undo: bool) -> None:
    """Half an undoing is undone further, and is never undone itself."""
    facts = Facts(policy, can_undo, SEEN[seen])
    assert kind_of(decide(operation(*REPEATABLE, undoes="01W"), facts)) == "RollForward"


COMPLETE, ABANDON, WAIT = Complete("c"), Abandon("a"), Wait(3.0, "w")
AHEAD, AGAIN, UNDONE = RollForward("f"), Retry("r"), RollBack("b")
HELD = Hold("h", "e", ("look",))
# The word of recover() or of a person x the operation x whether it can be undone.
WORDS: list[tuple[Decision, Interrupted, bool, str]] = [
    (COMPLETE, operation(), False, "Complete"),
    (COMPLETE, operation(STARTED), False, "Complete"),
    (COMPLETE, operation(removal=True), False, "Complete"),
    (COMPLETE, operation(undoes="01W"), False, "Complete"),
    (ABANDON, operation(), False, "Abandon"),
    (ABANDON, operation(STARTED), False, "Abandon"),
    (ABANDON, operation(undoes="01W"), False, "Abandon"),
    (WAIT, operation(), False, "Wait"),
    (WAIT, operation(STARTED), False, "Wait"),
    (WAIT, operation(undoes="01W"), False, "Wait"),
    (HELD, operation(), False, "Hold"),
    (HELD, operation(STARTED), False, "Hold"),
    (AHEAD, operation(), False, "RollForward"),
    (AHEAD, operation(*REPEATABLE), False, "RollForward"),
    (AHEAD, operation(STARTED), False, "RollForward"),
    (AHEAD, operation(DONE), False, "RollForward"),
    (AHEAD, operation(undoes="01W"), False, "RollForward"),
    (AGAIN, operation(), False, "Retry"),
    (AGAIN, operation(*REPEATABLE), False, "Retry"),
    (AGAIN, operation(STARTED), False, "Hold"),
    (AGAIN, operation(DONE), False, "Hold"),
    (AGAIN, operation(*REPEATABLE, undoes="01W"), False, "Retry"),
    (UNDONE, operation(), True, "RollBack"),
    (UNDONE, operation(), False, "Hold"),
    (UNDONE, operation(STARTED), True, "RollBack"),
    (UNDONE, operation(STARTED), False, "Hold"),
    (UNDONE, operation(removal=True), True, "RollBack"),
    (UNDONE, operation(undoes="01W"), True, "Hold"),
    (UNDONE, operation(undoes="01W"), False, "Hold"),
]


@pytest.mark.parametrize("row", WORDS)
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("policy", POLICIES)
def test_word(row: tuple[Decision, Interrupted, bool, str], seen: str, policy: Policy) -> None:
    """A word comes before what was seen and before the policy, as far as it is legal."""
    word, interrupted, can_undo, expected = row
    facts = Facts(policy, can_undo, SEEN[seen], word)
    decision = decide(interrupted, facts)
    assert kind_of(decision) == expected
    if kind_of(word) == expected:
        assert decision is word
    elif isinstance(decision, Hold):
        assert decision.evidence
        assert not decision.by_cap


@pytest.mark.parametrize("word", [None, COMPLETE, AHEAD])
def test_broken(word: Decision | None) -> None:
    """Where recover() raised it is held with what it raised, whatever else is known."""
    facts = Facts(
        FORWARD, can_undo=True, observation=SEEN["as desired"], word=word, broken="KeyError: x"
    )
    decision = decide(operation(), facts)
    assert isinstance(decision, Hold)
    assert "KeyError: x" in decision.reason


@pytest.mark.parametrize(
    ("recoveries", "cap", "held"),
    [(0, 3, False), (2, 3, False), (3, 3, True), (4, 3, True), (0, 0, True)],
)
def test_cap(recoveries: int, cap: int, *, held: bool) -> None:
    """So many attempts in a row without a word, and no further one is made."""
    hold = past_cap(recoveries, cap)
    assert (hold is not None) is held
    if hold is not None:
        assert hold.by_cap
        assert str(recoveries) in hold.reason


@pytest.mark.parametrize(
    ("steps", "last", "uncertain", "began_once"),
    [
        ((), "", "", False),
        (REPEATABLE, "look", "", False),
        ((STARTED,), "", "pay", True),
        ((DONE,), "pay", "", True),
        ((*REPEATABLE, STARTED), "look", "pay", True),
        ((DONE, *REPEATABLE), "look", "", True),
    ],
)
def test_interrupted(
    steps: tuple[Step, ...], last: str, uncertain: str, *, began_once: bool
) -> None:
    """Only a ONCE step makes it uncertain; the last step is the last that is done."""
    interrupted = operation(*steps)
    assert interrupted.last_step == last
    assert interrupted.uncertain == uncertain
    assert interrupted.began_once is began_once


@pytest.mark.parametrize(
    ("can_undo", "verbs"),
    [
        (False, ["--complete", "--forward", "--abandon"]),
        (True, ["--complete", "--forward", "--back", "--abandon"]),
    ],
)
def test_commands(verbs: list[str], *, can_undo: bool) -> None:
    """The commands that settle it name it, the least drastic first; back only where it can."""
    commands = commands_for("01X", can_undo=can_undo)
    assert [command.split()[4] for command in commands] == verbs
    assert all("resolve 01X --" in command and "--why" in command for command in commands)


@pytest.mark.parametrize(
    ("decision", "told"),
    [
        (Complete(), {"decision": "Complete"}),
        (AHEAD, {"decision": "RollForward", "reason": "f"}),
        (WAIT, {"decision": "Wait", "reason": "w", "again_in": "3s"}),
        (HELD, {"decision": "Hold", "reason": "h", "evidence": "e"}),
        (attrs.evolve(HELD, evidence=""), {"decision": "Hold", "reason": "h"}),
    ],
)
def test_describe(decision: Decision, told: dict[str, str]) -> None:
    """A line of the log has what was decided and why, and nothing that is empty."""
    assert describe(decision) == told
