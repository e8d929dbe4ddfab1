"""Recovery as runs do it: what comes first, what is counted, what is decided and carried out."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from lives import (
    Actor,
    Undoing,
    consistent,
    earlier,
    ending_of,
    leave,
    operate,
    past_of,
    revived,
)
from rig import Rig, Script, key, rig, thing, unavailable
from trio.testing import MockClock

from reconciled.api import (
    Abandon,
    Complete,
    Hold,
    Observation,
    Observed,
    ProgramFailed,
    Result,
    Retry,
    RollBack,
    RollForward,
    Wait,
    done,
    retry,
)
from reconciled.core.jobs import Priority
from reconciled.journal import records
from reconciled.journal.durable import DurableOperations
from reconciled.journal.machine import Machine
from reconciled.journal.records import Ending, OperationRecord, Resolution
from reconciled.journal.store import Store
from reconciled.runtime.adoption import settle_open

AS_DESIRED = Observation(Observed.AS_DESIRED, "it is there")
DIFFERENT = Observation(Observed.DIFFERENT, "it is not")
UNKNOWN = Observation(Observed.UNKNOWN, "no route")
ONCE_STARTED = [("pay", "once", False, None)]
ONCE_DONE = [("pay", "once", True, 7)]


def open_record(made: Rig, name: str = "a") -> OperationRecord:
    record = made.host.operations.log.open_of(key(name))
    assert record is not None
    return record


def held(made: Rig, name: str = "a") -> records.Hold:
    """How the key is held: in the journal, in the queue and in the log."""
    consistent(made)
    hold = open_record(made, name).hold
    assert hold is not None
    assert made.standing(name) == "terminal"
    return hold


# -- order and counting ------------------------------------------------------


async def test_recovery_comes_first_and_delays_nobody(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Recovery comes before any other work on its key and does not delay others (invariant 4)."""
    script = Actor()
    await leave(tmp_path)
    release = trio.Event()

    async def slow(_: Any) -> Result:
        await release.wait()
        return done()

    script.acts["a"] = slow
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 2), thing("b"))
        made.wish("a", "b", priority=Priority.ASKED)
        await made.settle()
        assert script.of("a") == ["observe", "recover", "reconcile"]
        assert script.of("b") == ["reconcile"]
        assert made.standing("b") is None
        assert [request.spec.value for request in script.requests if request.name == "a"] == [1]
        release.set()
        await made.settle()
        values = [request.spec.value for request in script.requests if request.name == "a"]
        assert values == [1, 2]
        consistent(made)


async def test_the_attempt_is_counted_before_any_code(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The attempt is on the disk before observe, recover or reconcile runs (invariant 5)."""
    script = Actor()
    await leave(tmp_path)
    script.looks = [DIFFERENT]
    script.acts["a"] = operate("one")
    counted: list[tuple[str, int, int, int]] = []
    async with revived(tmp_path, script) as made:

        def on_ask(what: str, _: str) -> None:
            counted.extend(
                (what, record.attempt, record.recoveries, record.epoch)
                for record in made.host.store.open_operations()
            )

        script.on_ask = on_ask
        await made.settle()
        epoch = made.host.store.epoch
    assert counted == [(what, 2, 1, epoch) for what in ("observe", "recover", "reconcile")]


async def test_the_undo_is_counted_before_it_runs(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """undo() runs in an operation that is durable, and goes on in one that was counted."""
    script = Undoing()
    identity = await leave(tmp_path, steps=[("one", "idempotent", True, 1)])
    seen: list[tuple[str, int, int]] = []
    fails = [OSError(5, "busy")]

    async def taking_back(_: Any) -> None:
        (record,) = made.host.store.open_operations()
        seen.append((record.undoes, record.attempt, record.recoveries))
        if fails:
            raise fails.pop()

    script.taking_back = taking_back
    async with revived(tmp_path, script, policy="roll-back") as made:
        await trio.sleep(10)
        consistent(made)
    assert seen == [(identity, 1, 0), (identity, 2, 1)]


# -- inputs, steps, identity -------------------------------------------------


@pytest.mark.parametrize("declared", [2, None])
async def test_the_pinned_spec_is_used(
    tmp_path: Path, autojump_clock: MockClock, declared: int | None
) -> None:
    """The spec of then is used, be it changed or gone; what is declared now runs afterwards."""
    script = Actor()
    identity = await leave(tmp_path, value=1)
    seen: list[Any] = []
    script.acts["a"] = operate("one", seen=seen)
    async with revived(tmp_path, script) as made:
        made.declare(*([] if declared is None else [thing("a", declared)]))
        await made.settle()
        assert seen[:2] == [(identity, 2, 1), "new one"]
        assert await ending_of(made, identity) is Ending.DONE
        if declared is None:
            assert seen[2:] == []
            assert [request.name for request in script.removals] == []
            assert made.standing("a") is None
        else:
            assert seen[2][1:] == (1, 2)
            assert seen[2][0] != identity
        consistent(made)


async def test_finished_steps_give_their_data(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A finished step does not run again and gives its data; one without a result runs again."""
    script = Actor()
    steps = [
        ("one", "pure", True, {"x": 1}),
        ("two", "once", True, 2),
        ("three", "idempotent", False, None),
    ]
    identity = await leave(tmp_path, steps=steps)
    seen: list[Any] = []
    script.acts["a"] = operate("one:pure", "two:once", "three", "four", seen=seen)
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert seen == [(identity, 2, 1), {"x": 1}, 2, "new three", "new four"]
        assert await ending_of(made, identity) is Ending.DONE
        interrupted = script.interrupted[0]
        assert [(step.name, step.done) for step in interrupted.steps] == [
            ("one", True),
            ("two", True),
        ]
        assert (interrupted.attempt, interrupted.spec.value) == (2, 1)


async def test_retry_forgets_its_steps(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Retry goes on in the same operation from its first step."""
    script = Actor()
    identity = await leave(tmp_path, steps=[("one", "idempotent", True, 1)])
    script.word = Retry()
    seen: list[Any] = []
    script.acts["a"] = operate("one", seen=seen)
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert seen == [(identity, 2, 1), "new one"]
        assert await ending_of(made, identity) is Ending.DONE


async def test_another_name_is_refused(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Re-entering with another name is refused, with both names; the operation stays as it was."""
    script = Actor()
    identity = await leave(tmp_path, operation="install")
    script.acts["a"] = operate("one", name="upgrade")
    async with revived(tmp_path, script) as made:
        await made.settle()
        (line,) = made.lines("reconcile.failed")
        assert "'install' has to be settled before 'upgrade'" in line["reason"]
        assert open_record(made).id == identity
        assert made.standing("a") == "retrying"
        consistent(made)


@pytest.mark.parametrize("again", ["apply", "other"])
async def test_one_operation_within_another_is_refused(
    tmp_path: Path, autojump_clock: MockClock, again: str
) -> None:
    """An operation inside of an open one is refused with its name; the outer one may go on."""
    script = Script()
    refused: list[str] = []

    async def act(request: Any) -> Result:
        async with request.operation("apply") as outer:
            with pytest.raises(records.OperationOpen) as info:
                async with request.operation(again):
                    pass
            refused.append(str(info.value))
            assert open_record(made).id == outer.id
        return done()

    script.acts["a"] = act
    async with rig(tmp_path, script) as made:
        made.declare(thing("a"))
        await made.settle()
        assert "c/a has the open operation apply" in refused[0]
        assert made.standing("a") is None
        consistent(made)


# -- ONCE --------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["roll-forward", "roll-back", "hold"])
@pytest.mark.parametrize("look", [DIFFERENT, None])
async def test_once_without_a_result_is_held(
    tmp_path: Path, autojump_clock: MockClock, policy: Any, look: Observation | None
) -> None:
    """Under no policy does a ONCE step run again that was started without a result."""
    script = Actor()
    identity = await leave(tmp_path, steps=ONCE_STARTED)
    script.looks = [look]
    async with revived(tmp_path, script, policy=policy) as made:
        made.declare(thing("a", 2))
        await trio.sleep(3600)
        assert not held(made).by_cap
        assert script.of("a") == ["observe", "recover"]
        (line,) = made.lines("operation.held", operation=identity)
        assert any("--forward" in command for command in line["settle"])


async def test_only_forward_runs_it_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A person's forward runs the ONCE step once more, in the same operation, for one attempt."""
    script = Actor()
    identity = await leave(tmp_path, steps=ONCE_STARTED)
    seen: list[Any] = []
    script.acts["a"] = operate("pay:once", seen=seen, pay=ProgramFailed("it broke"))
    async with revived(tmp_path, script) as made:
        await made.settle()
        held(made)
        await made.host.operations.log.resolve(identity, Resolution.FORWARD, "eve", "I looked")
        made.wish("a")
        await made.settle()
        assert [each[1] for each in seen] == [3]
        # The word is used up: the step has no result once more.
        await trio.sleep(60)
        assert [each[1] for each in seen] == [3]
        held(made)


async def test_retry_with_a_begun_once_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Retry where a ONCE step began, done or not, is a hold."""
    script = Actor()
    await leave(tmp_path, steps=ONCE_DONE)
    script.word = Retry()
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert "cannot begin again" in held(made).reason
        assert script.ran == []


# -- decisions ---------------------------------------------------------------


async def test_recover_that_raises_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """recover() that raises is a hold that says what it raised."""
    script = Actor()
    await leave(tmp_path)
    script.word = KeyError("flavour")
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert "KeyError: 'flavour'" in held(made).reason
        assert script.ran == []


async def _decides_later() -> RollForward:
    await trio.lowlevel.checkpoint()
    return RollForward()


@pytest.mark.parametrize("word", [RollBack, "forward", True, 0])
async def test_recover_that_gives_no_decision_is_held(
    tmp_path: Path, autojump_clock: MockClock, word: Any
) -> None:
    """What is no decision is a hold that shows it: nothing is guessed from it."""
    script = Undoing()
    await leave(tmp_path)
    script.word = word
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert "recover() failed: it returned" in held(made).reason
        assert script.of("a") == ["observe", "recover"]


async def test_a_coroutine_is_no_decision(tmp_path: Path, autojump_clock: MockClock) -> None:
    """recover() written as async def is a hold, and its coroutine is not left behind."""
    script = Actor()
    await leave(tmp_path)
    script.word = _decides_later()
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert "async" in held(made).reason


async def test_observe_that_gives_no_observation_is_unknown(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """What is no observation counts as unknown, and is shown."""
    script = Actor()
    await leave(tmp_path)
    script.looks = [True]
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert script.ran == []
        assert made.standing("a") == "retrying"
        (line,) = made.lines("recovery.decided")
        assert "observe() returned True" in line["reason"]


async def test_complete_remembers(tmp_path: Path, autojump_clock: MockClock) -> None:
    """As desired completes it: nothing runs, and the pinned spec is what was applied."""
    script = Actor()
    identity = await leave(tmp_path)
    script.looks = [AS_DESIRED]
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED
        assert made.host.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        assert script.ran == []
        consistent(made)


async def test_abandon_claims_nothing(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Abandon closes it, remembers nothing as applied, and the declared spec begins anew."""
    script = Actor()
    identity = await leave(tmp_path)
    script.word = Abandon("too old")
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 2))
        await made.settle()
        record = await past_of(made, identity)
        assert record is not None
        assert record.ending is Ending.ABANDONED
        assert record.notes[-1].why == "too old"
        assert [request.spec.value for request in script.requests] == [2]
        consistent(made)


async def test_done_without_entering_settles_it(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A run that ends well without re-entering closes it as settled by observation."""
    script = Actor()
    identity = await leave(tmp_path)
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED
        assert made.host.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        consistent(made)


async def test_hold_of_the_reconciler(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A hold is durable with reason and evidence, and told with the commands it names."""
    script = Actor()
    await leave(tmp_path)
    script.word = Hold("the tape is in the drive", "drive 3", ("eject 3",))
    async with revived(tmp_path, script) as made:
        await made.settle()
        hold = held(made)
        assert (hold.reason, hold.evidence) == ("the tape is in the drive", "drive 3")
        (line,) = made.lines("operation.held")
        assert line["settle"] == ["eject 3"]
    async with revived(tmp_path, script) as made:
        await made.settle()
        held(made)
        assert script.of("a") == ["observe", "recover"]


async def test_held_blocks_its_key_alone(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A held key has no run for ticks, wishes or another spec; other keys have theirs."""
    script = Actor()
    await leave(tmp_path, hold=records.Hold("nobody knows", "decision", "", 1.0))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 2), thing("b"))
        await made.settle()
        number = len(script.of("b"))
        for cause in ("every 10m", "every 20m"):
            made.wish("a", "b", cause=cause, priority=Priority.RESYNC)
            await trio.sleep(600)
        made.wish("a")
        made.declare(thing("a", 3), thing("b"))
        await trio.sleep(600)
        assert script.of("a") == []
        assert len(script.of("b")) == number + 2
        assert made.controller.statuses[key("a")].reason == "nobody knows"
        held(made)


async def test_wait_looks_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Wait asks again in so many seconds, and is a word of its own: it is never held for that."""
    script = Actor()
    identity = await leave(tmp_path)
    script.word = Wait(90.0, "the disk syncs")
    async with revived(tmp_path, script, cap=2) as made:
        await made.settle()
        assert script.of("a") == ["observe", "recover"]
        await trio.sleep(89)
        assert script.of("a") == ["observe", "recover"]
        await trio.sleep(90 * 5)
        assert len(script.of("a")) == 12
        record = open_record(made)
        assert (record.id, record.recoveries, record.hold) == (identity, 0, None)
        consistent(made)


async def test_unknown_is_asked_again_and_then_held(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Unknown is asked again with backoff, and held after max_recoveries."""
    script = Actor()
    await leave(tmp_path)
    script.looks = [UNKNOWN, OSError(5, "I/O"), UNKNOWN]
    times: list[float] = []
    script.on_ask = lambda what, _: times.append(trio.current_time()) if what == "observe" else None
    async with revived(tmp_path, script, cap=3) as made:
        await trio.sleep(600)
        assert len(times) == 3
        assert times[0] < times[1] < times[2]
        assert script.ran == []
        assert held(made).by_cap
        assert len(made.lines("operation.held")) == 1


async def test_unknown_that_turns_out_well(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Once it can be told, it is settled."""
    script = Actor()
    identity = await leave(tmp_path)
    script.looks = [UNKNOWN, AS_DESIRED]
    async with revived(tmp_path, script) as made:
        await trio.sleep(60)
        assert await ending_of(made, identity) is Ending.COMPLETED


# -- rolling back ------------------------------------------------------------


@pytest.mark.parametrize("by", ["policy", "word"])
async def test_roll_back_without_undo_is_held(
    tmp_path: Path, autojump_clock: MockClock, by: str
) -> None:
    """RollBack is a hold where nothing can undo, and --back is not among its commands."""
    script = Actor()
    await leave(tmp_path)
    script.word = RollBack() if by == "word" else None
    policy: Any = "roll-back" if by == "policy" else "hold"
    async with revived(tmp_path, script, policy=policy) as made:
        await made.settle()
        assert "rolled back" in held(made).reason
        (line,) = made.lines("operation.held")
        assert not any("--back" in command for command in line["settle"])


STEPS = [
    ("look", "pure", True, None),
    ("one", "idempotent", True, 1),
    ("pay", "once", True, 2),
    ("two", "idempotent", False, None),
]


async def test_undo_runs_newest_first(tmp_path: Path, autojump_clock: MockClock) -> None:
    """undo() gets each step but the PURE ones, newest first, with its data; both are linked."""
    script = Undoing()
    identity = await leave(tmp_path, steps=STEPS, undoable=True)
    async with revived(tmp_path, script, policy="roll-back") as made:
        made.declare(thing("a", 2))
        await made.settle()
        told = [(step.name, step.done, step.data) for step in script.undone]
        assert told == [("two", False, None), ("pay", True, 2), ("one", True, 1)]
        record = await past_of(made, identity)
        assert record is not None
        assert record.ending is Ending.ROLLED_BACK
        undoing = await past_of(made, record.undone_by)
        assert undoing is not None
        assert (undoing.undoes, undoing.ending) == (identity, Ending.DONE)
        assert undoing.pinned["spec"] == {"value": 1}
        # What is declared begins anew, after it.
        assert [request.spec.value for request in script.requests] == [2]
        assert made.host.store.fingerprint(key("a")) == thing("a", 2).fingerprint
        consistent(made)


async def test_nobody_of_the_undone_may_note_steps(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A program that got away from an operation that is undone is refused its steps."""
    script = Undoing()
    identity = await leave(tmp_path, steps=STEPS, undoable=True)
    directory = tmp_path / "state" / "operations" / identity
    directory.mkdir(parents=True)
    async with revived(tmp_path, script, policy="roll-back") as made:
        await made.settle()
        assert (directory / "attempt").read_text().strip() == "closed"


async def test_an_interrupted_undo_goes_on(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An interrupted undoing goes on where it was, whatever is observed, and is never undone."""
    script = Undoing()
    identity = await leave(tmp_path, steps=STEPS, undoable=True)
    hang = [True]

    async def taking_back(step: Any) -> None:
        if step.name == "pay" and hang:
            await trio.sleep_forever()

    script.taking_back = taking_back
    async with revived(tmp_path, script, policy="roll-back") as made:
        await made.settle()
        undoing = open_record(made)
        assert undoing.undoes == identity
        assert await ending_of(made, identity) is Ending.ROLLED_BACK
    hang.clear()
    script.looks = [AS_DESIRED]
    async with revived(tmp_path, script, policy="roll-back") as made:
        await made.settle()
        assert [step.name for step in script.undone] == ["two", "pay", "pay", "one"]
        assert await ending_of(made, undoing.id) is Ending.DONE
        assert [view.undoes for view in script.interrupted] == ["", identity]
        # Undone is undone: nothing of it counts as applied.
        assert made.host.store.fingerprint(key("a")) is None
        consistent(made)


async def test_an_undo_cannot_be_undone(tmp_path: Path, autojump_clock: MockClock) -> None:
    """RollBack for an undoing is a hold, and so is an undoing that nothing can carry out."""
    script = Undoing()
    await leave(tmp_path, steps=STEPS, undoable=True)

    async def hang(_: Any) -> None:
        await trio.sleep_forever()

    script.taking_back = hang
    async with revived(tmp_path, script, policy="roll-back") as made:
        await made.settle()
    script.word = RollBack()
    async with revived(tmp_path, script) as made:
        await made.settle()
        hold = held(made)
        assert "cannot be undone" in hold.reason
        await made.host.operations.log.unhold(open_record(made).id)
    without = Actor()
    async with revived(tmp_path, without) as made:
        await made.settle()
        assert "nothing here can undo it" in held(made).reason
        assert without.ran == []


# -- removals ----------------------------------------------------------------


@pytest.mark.parametrize("look", [AS_DESIRED, DIFFERENT, None])
async def test_a_removal_goes_on_with_remove(
    tmp_path: Path, autojump_clock: MockClock, look: Observation | None
) -> None:
    """A removal goes on with remove() in the same operation, also if observed as desired."""
    script = Actor()
    identity = await leave(tmp_path, operation="drop", removal=True)
    seen: list[Any] = []
    script.looks = [look]
    script.removal = operate("one", name="drop", seen=seen)
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert seen == [(identity, 2, 1), "new one"]
        assert script.ran == []
        assert await ending_of(made, identity) is Ending.DONE
        consistent(made)


async def own(tmp_path: Path, name: str = "a", value: int = 1) -> None:
    """Let an earlier life have applied it."""

    async def act(store: Store, _: DurableOperations) -> None:
        manifest = thing(name, value)
        await store.remember(
            key(name), "Thing", manifest.spec, manifest.fingerprint, base="/m", complete=True
        )

    await earlier(tmp_path, act)


@pytest.mark.parametrize("enters", [True, False])
@pytest.mark.parametrize("declared", [True, False])
async def test_what_was_removed_is_not_remembered_as_applied(
    tmp_path: Path, autojump_clock: MockClock, *, enters: bool, declared: bool
) -> None:
    """After a recovered removal nothing counts as applied: declared again, it is applied anew."""
    script = Actor()
    await own(tmp_path)
    identity = await leave(tmp_path, operation="drop", removal=True)
    applied: list[str | None] = []

    async def act(request: Any) -> Result:
        applied.append(request.applied)
        return done()

    script.acts["a"] = act
    if enters:
        script.removal = operate("one", name="drop")
    async with revived(tmp_path, script) as made:
        made.declare(*([thing("a", 1)] if declared else []), thing("b"))
        await made.settle()
        ending = Ending.DONE if enters else Ending.COMPLETED
        assert await ending_of(made, identity) is ending
        assert applied == ([None] if declared else [])
        if not declared:
            assert made.traces("a") == []
        consistent(made)


async def test_what_began_to_be_removed_is_not_applied(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """From the first effect of a removal on the spec does not count as applied, but as owned."""
    script = Actor()
    await own(tmp_path)

    async def hang(request: Any) -> Result:
        async with request.operation("drop"):
            await trio.sleep_forever()
        return done()

    script.removal = hang
    async with revived(tmp_path, script) as made:
        made.declare(thing("b"))
        await made.settle()
        assert made.host.store.fingerprint(key("a")) is None
        assert made.host.store.begun(key("a")) == thing("a", 1).fingerprint
    applied: list[str | None] = []

    async def act(request: Any) -> Result:
        applied.append(request.applied)
        return done()

    script.acts["a"] = act
    script.word = Abandon("nobody knows")
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        assert applied == [None]


async def test_a_completed_removal_is_a_removal(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Complete for a removal means that it is removed: the key is not remembered as applied."""
    script = Actor()
    identity = await leave(tmp_path, operation="drop", removal=True)
    script.word = Complete("it is gone")
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED
        assert made.host.store.all_keys() == set()
        assert script.removals == []


async def test_a_removal_that_nothing_can_do_is_held(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Where remove() left the reconciler a removal is held: it never applies what it removes."""
    script = Actor()
    await leave(tmp_path, operation="drop", removal=True)
    script.remove = None  # type: ignore[assignment,method-assign]
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert "remove" in held(made).reason
        assert script.ran == []


# -- the count and the cap ---------------------------------------------------


async def test_a_pill_is_held_at_the_cap(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Attempts that end without a word are counted over starts, and held at the cap, not later."""
    script = Actor()
    await leave(tmp_path)

    async def killed(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    script.acts["a"] = killed
    for number in (1, 2, 3):
        async with revived(tmp_path, script, cap=3) as made:
            await made.settle()
            record = open_record(made)
            assert (record.recoveries, record.attempt) == (number, number + 1)
    async with revived(tmp_path, script, cap=3) as made:
        await made.settle()
        assert held(made).by_cap
        assert "3 times" in held(made).reason
    assert script.of("a").count("reconcile") == 3


@pytest.mark.parametrize("way", ["error", "retry"])
async def test_an_end_by_itself_resets_the_count(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """An attempt that ends by an error or a result of its own sets the count back."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=2, steps=[("one", "idempotent", True, 1)])

    async def act(request: Any) -> Result:
        if way == "error":
            raise OSError(5, "busy")
        return retry("busy")

    script.acts["a"] = act
    async with revived(tmp_path, script, cap=3) as made:
        await trio.sleep(120)
        record = open_record(made)
        assert record.id == identity
        assert record.attempt > 5
        assert (record.recoveries, record.hold) == (0, None)
        consistent(made)


async def test_an_end_from_outside_leaves_the_count(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A program that was killed, or a critical part that was cut, is no word of its own."""
    script = Actor()
    await leave(tmp_path, steps=[("one", "idempotent", True, 1)])

    async def cut(request: Any) -> Result:
        async with request.operation("apply") as operation, operation.critical(budget=1.0):
            await trio.sleep_forever()
        return done()

    script.acts["a"] = cut
    async with revived(tmp_path, script, cap=2) as made:
        await trio.sleep(120)
        assert held(made).by_cap
        assert script.of("a").count("reconcile") == 2


def killing(made: Actor) -> None:
    async def act(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    made.acts["a"] = act


async def test_a_hold_by_the_cap_outlives_a_start(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another start with the same spec lifts no hold by the cap, whenever it was imposed."""
    script = Actor()
    await leave(tmp_path, recoveries=3)
    for _ in range(3):
        # Imposed, or found, before any source has spoken: the daemon may be killed each time.
        async with revived(tmp_path, script) as made:
            await made.settle()
            assert held(made).by_cap
            made.declare(thing("a", 1))
            await made.settle()
            assert held(made).by_cap
    assert script.asked == []
    assert len(made.lines("operation.held")) == 1


async def test_a_changed_spec_lifts_a_hold_by_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another spec lifts a hold by the cap, with a count that begins anew, and nothing else."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        made.wish("a")
        await made.settle()
        assert held(made).by_cap
    # In a later life too: the spec may change while nothing runs.
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert held(made).by_cap
        killing(script)
        made.declare(thing("a", 2))
        await made.settle()
        assert script.requests[0].spec.value == 1
        record = open_record(made)
        assert (record.id, record.recoveries, record.hold) == (identity, 1, None)


async def test_a_source_that_cannot_be_read_lifts_no_hold(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """That a source cannot be read is no change of a spec (invariant 11); that one went is."""
    script = Actor()
    await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
    async with revived(tmp_path, script) as made:
        made.say(unavailable("it is not mounted"))
        made.wish("a")
        await made.settle()
        assert held(made).by_cap
        made.declare(thing("b"))
        made.wish("a")
        await made.settle()
        assert script.of("a")[0] == "observe"


async def test_changed_options_lift_a_hold_by_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Other options of the controller lift a hold by the cap."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        assert held(made).by_cap
        made.controller.config = attrs.evolve(made.controller.config, options={"fast": True})
        settle_open(made.controller, trio.current_time())
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED


async def test_other_holds_are_not_lifted(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A hold that was decided stays, whatever spec and options become."""
    script = Actor()
    await leave(tmp_path, hold=records.Hold("nobody knows", "decision", "", 1.0))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 2))
        made.controller.config = attrs.evolve(made.controller.config, options={"fast": True})
        settle_open(made.controller, trio.current_time())
        await made.settle()
        assert not held(made).by_cap
        assert script.asked == []


# -- where nothing may be tried ----------------------------------------------


async def test_another_kind_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An operation of a kind that its controller left is held, and not counted."""
    script = Actor()
    await leave(tmp_path, kind="Flag")
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert "kind is Flag" in held(made).reason
        assert script.asked == []
        assert open_record(made).attempt == 1


HERE = Machine.this()


@pytest.mark.parametrize(
    ("machine", "is_held"),
    [
        (Machine("another boot", "another machine"), True),
        (Machine("another boot", ""), True),
        (Machine("another boot", HERE.machine_id or "-"), not HERE.machine_id),
        (Machine(HERE.boot_id, "another machine"), False),
        (Machine("", ""), False),
    ],
)
async def test_a_foreign_machine_is_held(
    tmp_path: Path, autojump_clock: MockClock, machine: Machine, *, is_held: bool
) -> None:
    """Begun on another machine, which may be at work, it is held; another boot is none."""
    script = Actor()
    identity = await leave(tmp_path, machine=machine)
    async with revived(tmp_path, script) as made:
        await made.settle()
        if not is_held:
            assert await ending_of(made, identity) is Ending.COMPLETED
            return
        assert "another machine" in held(made).reason
        assert script.asked == []
        # Who says that the other one is dead has it go on here.
        await made.host.operations.log.resolve(identity, Resolution.FORWARD, "eve", "it is off")
        made.wish("a")
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED


# -- operations that lose their actor in a living daemon ----------------------


async def test_an_error_before_any_step_closes_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An error before any step closes it as failed; the retry is a new one with a new id."""
    script = Actor()
    seen: list[Any] = []
    script.acts["a"] = operate("one", seen=seen, one=OSError(5, "busy"))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await made.settle()
        assert made.host.operations.log.open_of(key("a")) is None
        consistent(made)
        await trio.sleep(5)
        assert len(seen) > 1
        assert len({identity for identity, _, _ in seen}) == len(seen)
        assert {attempt for _, attempt, _ in seen} == {1}
        assert await ending_of(made, seen[0][0]) is Ending.FAILED
        assert "recover" not in script.of("a")
        consistent(made)


@pytest.mark.parametrize("step", ["one", "one:pure"])
async def test_an_error_after_a_step_leaves_it_open(
    tmp_path: Path, autojump_clock: MockClock, step: str
) -> None:
    """An error after a step leaves it open: same id, next attempt, after the ordinary backoff."""
    script = Actor()
    seen: list[Any] = []
    script.acts["a"] = operate(step, "two", seen=seen, two=OSError(5, "busy"))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        record = open_record(made)
        assert (record.attempt, record.last_step, record.recoveries) == (1, "one", 0)
        assert made.standing("a") == "retrying"
        consistent(made)
        script.acts["a"] = operate(step, "two", seen=seen)
        await trio.sleep(5)
        assert seen[2:5] == [(record.id, 2, 1), "new one", "new two"]
        assert await ending_of(made, record.id) is Ending.DONE
        assert made.host.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        consistent(made)


async def test_an_error_in_a_once_step_leaves_it_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A ONCE step that was started and raised leaves it open, and holds it when it is retried."""
    script = Actor()
    script.acts["a"] = operate("pay:once", pay=OSError(5, "busy"))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await trio.sleep(60)
        assert "pay" in held(made).reason
        assert script.of("a").count("reconcile") == 1


EXITS = ["error", "error after step", "cut", "removed", "stop", "exit", "group", "swallowed"]


async def go(operation: Any, way: str) -> None:
    """Leave *operation* in that way."""
    if way in ("removed", "stop"):
        await trio.sleep_forever()
    if way == "cut":
        async with operation.critical(budget=1.0):
            await trio.sleep_forever()
    if way == "exit":
        raise SystemExit(3)
    if way == "group":
        raise ExceptionGroup("several", [OSError(5, "a"), ValueError("b")])
    raise OSError(5, "busy")


@pytest.mark.parametrize("way", EXITS)
async def test_every_exit_leaves_the_journal_consistent(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """However a run leaves its operation, memory and disk agree on what is open of the key."""
    script = Actor()

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    async def act(request: Any) -> Result:
        try:
            async with request.operation("apply") as operation:
                if way != "error":
                    await operation.step("one", nothing)
                await go(operation, way)
        except OSError:
            if way != "swallowed":
                raise
        return done()

    script.acts["a"] = act
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"), thing("b"))
        await made.settle()
        if way == "removed":
            made.declare(thing("b"))
            await trio.sleep(10.5)
        elif way == "stop":
            await made.signal()
            await trio.sleep(10.5)
        else:
            await trio.sleep(1.1)
        record = made.host.operations.log.open_of(key("a"))
        assert (record is None) == (way == "error")
        consistent(made)
        assert script.of("b") == ["reconcile"]


async def test_a_cancelled_begin_leaves_nothing_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Cancelled while its intent is on its way, an operation is open for nobody afterwards."""
    script = Actor()

    async def act(request: Any) -> Result:
        with trio.move_on_after(0) as scope:
            async with request.operation("apply"):
                pytest.fail("it was cancelled before")
        assert scope.cancelled_caught
        return done()

    script.acts["a"] = act
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await trio.sleep(1)
        assert made.host.operations.log.open_of(key("a")) is None
        consistent(made)


# -- a store that cannot be written, and one that was damaged ------------------


def read_only(made: Rig, *, on: bool) -> None:
    """Let the store refuse to be written, by SQLite's own word."""
    made.host.store.writer.connection.execute(f"PRAGMA query_only={'ON' if on else 'OFF'}").close()


async def test_without_its_intent_nothing_starts(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Where no intent can be written it does not start: a retry; others go on; it returns."""
    script = Actor()
    await own(tmp_path, "b", 0)
    seen: list[Any] = []
    script.acts["a"] = operate("one", seen=seen)
    async with revived(tmp_path, script) as made:
        made.declare(thing("b"))
        await made.settle()
        read_only(made, on=True)
        made.declare(thing("a"), thing("b"))
        await made.settle()
        assert seen == []
        assert made.standing("a") == "retrying"
        (line,) = made.lines("reconcile.failed", key=key("a"))
        assert "NotJournaled: the store could not be written" in line["reason"]
        consistent(made)
        made.wish("b")
        await made.settle()
        assert script.of("b") == ["reconcile"] * 2
        assert made.failures("b") == 0
        read_only(made, on=False)
        await trio.sleep(60)
        assert seen[0][1:] == (1, 0)
        assert seen[1:] == ["new one"]
        assert await ending_of(made, seen[0][0]) is Ending.DONE
        consistent(made)


async def test_no_recovery_runs_that_cannot_be_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """While the count cannot be written no code of a recovery runs; then it goes on."""
    script = Actor()
    identity = await leave(tmp_path)
    async with revived(tmp_path, script) as made:
        read_only(made, on=True)
        await trio.sleep(30)
        assert script.asked == []
        read_only(made, on=False)
        await trio.sleep(30)
        assert await ending_of(made, identity) is Ending.COMPLETED
        consistent(made)


async def test_an_undo_that_cannot_be_journaled_is_a_retry(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Where the undoing cannot be noted nothing is undone, and the undone one is open as before."""
    script = Undoing()
    identity = await leave(tmp_path, steps=STEPS, undoable=True)

    def on_ask(what: str, _: str) -> None:
        if what == "recover":
            read_only(made, on=True)

    script.on_ask = on_ask
    script.word = RollBack()
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert script.undone == []
        assert open_record(made).id == identity
        assert made.standing("a") == "retrying"
        script.on_ask = lambda _, __: None
        read_only(made, on=False)
        await trio.sleep(60)
        assert await ending_of(made, identity) is Ending.ROLLED_BACK
        consistent(made)


async def damage(tmp_path: Path) -> None:
    """Let an earlier life have found the store damaged."""

    async def act(store: Store, _: DurableOperations) -> None:
        store.writer.meta = attrs.evolve(store.writer.meta, degraded="lost")

    await earlier(tmp_path, act)


@pytest.mark.parametrize(
    ("look", "runs"),
    [(AS_DESIRED, True), (DIFFERENT, False), (UNKNOWN, False), (None, False), (OSError(5), False)],
)
async def test_after_damage_only_what_is_as_desired_runs(
    tmp_path: Path, autojump_clock: MockClock, look: Any, *, runs: bool
) -> None:
    """After a damaged store a key is held, with the way out, unless it is observed as desired."""
    script = Actor()
    await damage(tmp_path)
    script.looks = [look]
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await made.settle()
        assert script.of("a") == (["observe", "reconcile"] if runs else ["observe"])
        status = made.controller.statuses[key("a")]
        assert ("resolve --all --abandon" in status.reason) != runs
        assert made.standing("a") == (None if runs else "terminal")


async def test_after_damage_nothing_is_removed(tmp_path: Path, autojump_clock: MockClock) -> None:
    """After a damaged store no removal runs, until a person trusts it again."""
    script = Actor()
    await own(tmp_path)
    await damage(tmp_path)
    script.looks = [AS_DESIRED]
    async with revived(tmp_path, script) as made:
        made.declare(thing("b"))
        await trio.sleep(600)
        assert made.controller.removing == {key("a")}
        assert script.removals == []
        assert made.host.store.all_keys() == {key("a"), key("b")}
        await made.host.store.end_degraded("eve", "I looked")
        made.wish("a")
        await made.settle()
        assert [request.name for request in script.removals] == ["a"]
