"""Recovery that rolls back, and recovery of removals."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from one_controller import key, thing
from restarts import (
    AS_DESIRED,
    DIFFERENT,
    STEPS,
    RecoveringReconciler,
    UndoingReconciler,
    check_consistent,
    closed_operation,
    ending_of,
    hold_of,
    leave_open_operation,
    open_record,
    operation_act,
    record_earlier_apply,
    run_restarted,
)
from trio.testing import MockClock

from reconciled.api import (
    Abandon,
    Complete,
    Observation,
    Result,
    RollBack,
    done,
)
from reconciled.journal.operation_record import Ending

# -- rolling back ----------------------------------------------------------------


@pytest.mark.parametrize("by", ["policy", "recover"])
async def test_roll_back_without_undo_is_held(
    tmp_path: Path, autojump_clock: MockClock, by: str
) -> None:
    """RollBack is a hold if nothing can undo, and --back is not among its commands."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.decision = RollBack() if by == "recover" else None
    policy: Any = "roll-back" if by == "policy" else "hold"
    async with run_restarted(tmp_path, script, policy=policy) as runtime:
        await runtime.wait_all_blocked()
        assert "rolled back" in hold_of(runtime).reason
        (line,) = runtime.log_lines("operation.held")
        assert not any("--back" in command for command in line["commands"])


async def test_undo_runs_newest_first(tmp_path: Path, autojump_clock: MockClock) -> None:
    """undo() gets each step except PURE ones, newest first, with its data; both are linked."""
    script = UndoingReconciler()
    identity = await leave_open_operation(tmp_path, steps=STEPS, undoable=True)
    async with run_restarted(tmp_path, script, policy="roll-back") as runtime:
        runtime.declare(thing("a", 2))
        await runtime.wait_all_blocked()
        undone = [(step.name, step.done, step.data) for step in script.undone]
        assert undone == [("two", False, None), ("pay", True, 2), ("one", True, 1)]
        record = await closed_operation(runtime, identity)
        assert record is not None
        assert record.ending is Ending.ROLLED_BACK
        undoing = await closed_operation(runtime, record.undone_by)
        assert undoing is not None
        assert (undoing.undoes, undoing.ending) == (identity, Ending.DONE)
        assert undoing.pinned["spec"] == {"value": 1}
        # The declared spec runs after it, in a new operation.
        assert [request.spec.value for request in script.requests] == [2]
        assert runtime.context.store.fingerprint(key("a")) == thing("a", 2).fingerprint
        check_consistent(runtime)


async def test_programs_of_an_undone_operation_cannot_record_steps(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A program that outlived an operation cannot record steps once the operation is undone."""
    script = UndoingReconciler()
    identity = await leave_open_operation(tmp_path, steps=STEPS, undoable=True)
    directory = tmp_path / "state" / "operations" / identity
    directory.mkdir(parents=True)
    async with run_restarted(tmp_path, script, policy="roll-back") as runtime:
        await runtime.wait_all_blocked()
        assert (directory / "attempt").read_text().strip() == "closed"


async def test_an_interrupted_undo_continues(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An interrupted undoing continues where it was, whatever is observed, and is not undone."""
    script = UndoingReconciler()
    identity = await leave_open_operation(tmp_path, steps=STEPS, undoable=True)
    hang = [True]

    async def taking_back(step: Any) -> None:
        if step.name == "pay" and hang:
            await trio.sleep_forever()

    script.undo_act = taking_back
    async with run_restarted(tmp_path, script, policy="roll-back") as runtime:
        await runtime.wait_all_blocked()
        undoing = open_record(runtime)
        assert undoing.undoes == identity
        assert await ending_of(runtime, identity) is Ending.ROLLED_BACK
    hang.clear()
    script.observations = [AS_DESIRED]
    async with run_restarted(tmp_path, script, policy="roll-back") as runtime:
        await runtime.wait_all_blocked()
        assert [step.name for step in script.undone] == ["two", "pay", "pay", "one"]
        assert await ending_of(runtime, undoing.id) is Ending.DONE
        assert [view.undoes for view in script.interrupted] == ["", identity]
        # After the undoing nothing counts as applied.
        assert runtime.context.store.fingerprint(key("a")) is None
        check_consistent(runtime)


async def test_an_undo_cannot_be_undone(tmp_path: Path, autojump_clock: MockClock) -> None:
    """RollBack of an undoing is a hold, and so is an undoing without an undo() method."""
    script = UndoingReconciler()
    await leave_open_operation(tmp_path, steps=STEPS, undoable=True)

    async def hang(_: Any) -> None:
        await trio.sleep_forever()

    script.undo_act = hang
    async with run_restarted(tmp_path, script, policy="roll-back") as runtime:
        await runtime.wait_all_blocked()
    script.decision = RollBack()
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        hold = hold_of(runtime)
        assert "cannot be undone" in hold.reason
        await runtime.context.operations.journal.unhold(open_record(runtime).id)
    without = RecoveringReconciler()
    async with run_restarted(tmp_path, without) as runtime:
        await runtime.wait_all_blocked()
        assert "its reconciler has no undo() any more" in hold_of(runtime).reason
        assert without.ran == []


# -- removals --------------------------------------------------------------------


@pytest.mark.parametrize("observation", [AS_DESIRED, DIFFERENT, None])
async def test_a_removal_continues_with_remove(
    tmp_path: Path, autojump_clock: MockClock, observation: Observation | None
) -> None:
    """A removal continues with remove() in the same operation, also if observed as desired."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, operation="drop", removal=True)
    seen: list[Any] = []
    script.observations = [observation]
    script.removal = operation_act("one", name="drop", seen=seen)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert seen == [(identity, 2, 1), "new one"]
        assert script.ran == []
        assert await ending_of(runtime, identity) is Ending.DONE
        check_consistent(runtime)


@pytest.mark.parametrize("enters", [True, False])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_recovered_removal_is_not_recorded_as_applied(
    tmp_path: Path, autojump_clock: MockClock, *, enters: bool, declared: bool
) -> None:
    """After a recovered removal nothing counts as applied: declared again, the key runs."""
    script = RecoveringReconciler()
    await record_earlier_apply(tmp_path)
    identity = await leave_open_operation(tmp_path, operation="drop", removal=True)
    applied: list[str | None] = []

    async def act(request: Any) -> Result:
        applied.append(request.applied)
        return done()

    script.acts["a"] = act
    if enters:
        script.removal = operation_act("one", name="drop")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(*([thing("a", 1)] if declared else []), thing("b"))
        await runtime.wait_all_blocked()
        ending = Ending.DONE if enters else Ending.COMPLETED
        assert await ending_of(runtime, identity) is ending
        assert applied == ([None] if declared else [])
        if not declared:
            assert runtime.references("a") == []
        check_consistent(runtime)


async def test_a_started_removal_is_not_applied_any_more(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """From the first effect of a removal on, the spec counts as owned and not as applied."""
    script = RecoveringReconciler()
    await record_earlier_apply(tmp_path)

    async def hang(request: Any) -> Result:
        async with request.operation("drop"):
            await trio.sleep_forever()
        return done()

    script.removal = hang
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert runtime.context.store.fingerprint(key("a")) is None
        assert runtime.context.store.incomplete_fingerprint(key("a")) == thing("a", 1).fingerprint
    applied: list[str | None] = []

    async def act(request: Any) -> Result:
        applied.append(request.applied)
        return done()

    script.acts["a"] = act
    script.decision = Abandon("unknown")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
        assert applied == [None]


async def test_a_completed_removal_is_a_removal(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Complete for a removal means removed: the key is not recorded as applied."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, operation="drop", removal=True)
    script.decision = Complete("it is removed")
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED
        assert runtime.context.store.all_keys() == set()
        assert script.removals == []


async def test_a_removal_without_remove_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A removal is held if the reconciler has no remove() any more: reconcile() is not called."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, operation="drop", removal=True)
    script.remove = None  # type: ignore[assignment,method-assign]
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert "remove" in hold_of(runtime).reason
        assert script.ran == []
