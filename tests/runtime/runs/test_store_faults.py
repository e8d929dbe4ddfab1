"""Runs with a store that cannot be written, and with one that was set aside as damaged."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import key, thing
from restarts import (
    AS_DESIRED,
    DIFFERENT,
    STEPS,
    UNKNOWN,
    RecoveringReconciler,
    UndoingReconciler,
    check_consistent,
    ending_of,
    in_earlier_run,
    leave_open_operation,
    open_record,
    operation_act,
    record_earlier_apply,
    run_restarted,
    set_read_only,
)
from trio.testing import MockClock

from reconciled.api import (
    Result,
    RollBack,
    done,
)
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.store import Store


async def test_without_its_intent_nothing_starts(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An operation whose intent cannot be written does not start: its run is a retry."""
    script = RecoveringReconciler()
    await record_earlier_apply(tmp_path, "b", 0)
    seen: list[Any] = []
    script.acts["a"] = operation_act("one", seen=seen)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        set_read_only(runtime, on=True)
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        assert seen == []
        assert runtime.queue_state("a") == "retrying"
        (line,) = runtime.log_lines("reconcile.failed", key=key("a"))
        assert "NotJournaled: the store cannot be written" in line["reason"]
        check_consistent(runtime)
        runtime.enqueue("b")
        await runtime.wait_all_blocked()
        assert script.calls_for("b") == ["reconcile"] * 2
        assert runtime.failures("b") == 0
        set_read_only(runtime, on=False)
        await trio.sleep(60)
        assert seen[0][1:] == (1, 0)
        assert seen[1:] == ["new one"]
        assert await ending_of(runtime, seen[0][0]) is Ending.DONE
        check_consistent(runtime)


async def test_no_recovery_runs_that_cannot_be_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """No code of a recovery runs while its attempt cannot be counted; later it goes on."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    async with run_restarted(tmp_path, script) as runtime:
        set_read_only(runtime, on=True)
        await trio.sleep(30)
        assert script.calls == []
        set_read_only(runtime, on=False)
        await trio.sleep(30)
        assert await ending_of(runtime, identity) is Ending.COMPLETED
        check_consistent(runtime)


async def test_nothing_runs_before_the_outcome_is_durable(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A finished operation blocks its key until its outcome is durable, and is not recovered."""
    script = RecoveringReconciler()
    seen: list[str] = []

    async def act(request: Any) -> Result:
        async with request.operation("apply") as operation:
            seen.append(operation.id)
            set_read_only(runtime, on=len(seen) == 1)
        return done()

    script.acts["a"] = act
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await trio.sleep(60)
        assert script.calls_for("a") == ["reconcile"]
        assert runtime.queue_state("a") == "retrying"
        assert [record.id for record in runtime.context.operations.journal.pending] == seen
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["reconcile"]
        assert "not durable yet" in runtime.controller.statuses[key("a")].reason
        set_read_only(runtime, on=False)
        await trio.sleep(300)
        assert await ending_of(runtime, seen[0]) is Ending.DONE
        # The applied spec could not be recorded: the key runs once more, in a new operation.
        assert script.calls_for("a") == ["reconcile"] * 2
        assert "recover" not in script.calls_for("a")
        check_consistent(runtime)


async def test_an_undo_that_cannot_be_journaled_is_a_retry(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """If the undoing cannot be journaled nothing is undone, and the operation remains open."""
    script = UndoingReconciler()
    identity = await leave_open_operation(tmp_path, steps=STEPS, undoable=True)

    def on_ask(what: str, _: str) -> None:
        if what == "recover":
            set_read_only(runtime, on=True)

    script.on_call = on_ask
    script.decision = RollBack()
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert script.undone == []
        assert open_record(runtime).id == identity
        assert runtime.queue_state("a") == "retrying"
        script.on_call = lambda _, __: None
        set_read_only(runtime, on=False)
        await trio.sleep(60)
        assert await ending_of(runtime, identity) is Ending.ROLLED_BACK
        check_consistent(runtime)


async def damage(tmp_path: Path) -> None:
    """Leave the state as a daemon does that found its store damaged."""

    async def act(store: Store, _: OperationJournal) -> None:
        store.writer.meta = attrs.evolve(store.writer.meta, degraded="lost")

    await in_earlier_run(tmp_path, act)


@pytest.mark.parametrize(
    ("observation", "runs"),
    [(AS_DESIRED, True), (DIFFERENT, False), (UNKNOWN, False), (None, False), (OSError(5), False)],
)
async def test_after_damage_only_what_is_as_desired_runs(
    tmp_path: Path, autojump_clock: MockClock, observation: Any, *, runs: bool
) -> None:
    """After a damaged store a key is held, with the command to use, unless it is as desired."""
    script = RecoveringReconciler()
    await damage(tmp_path)
    script.observations = [observation]
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == (["observe", "reconcile"] if runs else ["observe"])
        status = runtime.controller.statuses[key("a")]
        assert ("resolve --all --abandon" in status.reason) != runs
        assert runtime.queue_state("a") == (None if runs else "terminal")


async def test_after_damage_nothing_is_removed(tmp_path: Path, autojump_clock: MockClock) -> None:
    """After a damaged store no removal runs until a person has resolved it."""
    script = RecoveringReconciler()
    await record_earlier_apply(tmp_path)
    await damage(tmp_path)
    script.observations = [AS_DESIRED]
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await trio.sleep(600)
        assert runtime.controller.removing == {key("a")}
        assert script.removals == []
        assert runtime.context.store.all_keys() == {key("a"), key("b")}
        await runtime.context.store.clear_degraded("eve", "checked by hand")
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert [request.name for request in script.removals] == ["a"]
