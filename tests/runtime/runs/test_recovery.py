"""Recovery within runs: its order, the count of attempts, and decisions."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import trio
from one_controller import ScriptedReconciler, key, run_one_controller, thing
from restarts import (
    AS_DESIRED,
    DIFFERENT,
    UNKNOWN,
    RecoveringReconciler,
    UndoingReconciler,
    check_consistent,
    closed_operation,
    ending_of,
    hold_of,
    leave_open_operation,
    open_record,
    operation_act,
    run_restarted,
)
from trio.testing import MockClock

from reconciled.api import (
    Abandon,
    Hold,
    Observation,
    ProgramFailed,
    Result,
    Retry,
    RollBack,
    RollForward,
    Wait,
    done,
)
from reconciled.core.errors import OperationAlreadyOpen
from reconciled.core.queue.states import Priority
from reconciled.journal import operation_record
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_record import Ending, Resolution

ONCE_STARTED = [("pay", "once", False, None)]
ONCE_DONE = [("pay", "once", True, 7)]

# -- order and counting ----------------------------------------------------------


async def test_recovery_comes_first_and_delays_no_other_key(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Recovery comes before any other work on its key and does not delay others (invariant 4)."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    release = trio.Event()

    async def slow(_: Any) -> Result:
        await release.wait()
        return done()

    script.acts["a"] = slow
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 2), thing("b"))
        runtime.enqueue("a", "b", priority=Priority.ASKED)
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]
        assert script.calls_for("b") == ["reconcile"]
        assert runtime.queue_state("b") is None
        assert [request.spec.value for request in script.requests if request.name == "a"] == [1]
        release.set()
        await runtime.wait_all_blocked()
        values = [request.spec.value for request in script.requests if request.name == "a"]
        assert values == [1, 2]
        check_consistent(runtime)


async def test_the_attempt_is_counted_before_any_code(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The attempt is on the disk before observe, recover or reconcile runs (invariant 5)."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.observations = [DIFFERENT]
    script.acts["a"] = operation_act("one")
    counted: list[tuple[str, int, int, int]] = []
    async with run_restarted(tmp_path, script) as runtime:

        def on_ask(what: str, _: str) -> None:
            counted.extend(
                (what, record.attempt, record.recoveries, record.epoch)
                for record in runtime.context.store.open_operations()
            )

        script.on_call = on_ask
        await runtime.wait_all_blocked()
        epoch = runtime.context.store.epoch
    assert counted == [(what, 2, 1, epoch) for what in ("observe", "recover", "reconcile")]


async def test_the_undo_is_counted_before_it_runs(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """undo() runs in a durable operation; its continuation is counted before it runs."""
    script = UndoingReconciler()
    identity = await leave_open_operation(tmp_path, steps=[("one", "idempotent", True, 1)])
    seen: list[tuple[str, int, int]] = []
    fails = [OSError(5, "busy")]

    async def taking_back(_: Any) -> None:
        (record,) = runtime.context.store.open_operations()
        seen.append((record.undoes, record.attempt, record.recoveries))
        if fails:
            raise fails.pop()

    script.undo_act = taking_back
    async with run_restarted(tmp_path, script, policy="roll-back") as runtime:
        await trio.sleep(10)
        check_consistent(runtime)
    assert seen == [(identity, 1, 0), (identity, 2, 1)]


# -- inputs, steps, identity -----------------------------------------------------


@pytest.mark.parametrize("declared", [2, None])
async def test_the_pinned_spec_is_used(
    tmp_path: Path, autojump_clock: MockClock, declared: int | None
) -> None:
    """Recovery uses the pinned spec, be it changed or deleted; the declared one runs afterwards."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, value=1)
    seen: list[Any] = []
    script.acts["a"] = operation_act("one", seen=seen)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(*([] if declared is None else [thing("a", declared)]))
        await runtime.wait_all_blocked()
        assert seen[:2] == [(identity, 2, 1), "new one"]
        assert await ending_of(runtime, identity) is Ending.DONE
        if declared is None:
            assert seen[2:] == []
            assert [request.name for request in script.removals] == []
            assert runtime.queue_state("a") is None
        else:
            assert seen[2][1:] == (1, 2)
            assert seen[2][0] != identity
        check_consistent(runtime)


async def test_finished_steps_return_their_data(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A finished step returns its data and does not run again; one without a result does."""
    script = RecoveringReconciler()
    steps = [
        ("one", "pure", True, {"x": 1}),
        ("two", "once", True, 2),
        ("three", "idempotent", False, None),
    ]
    identity = await leave_open_operation(tmp_path, steps=steps)
    seen: list[Any] = []
    script.acts["a"] = operation_act("one:pure", "two:once", "three", "four", seen=seen)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert seen == [(identity, 2, 1), {"x": 1}, 2, "new three", "new four"]
        assert await ending_of(runtime, identity) is Ending.DONE
        interrupted = script.interrupted[0]
        assert [(step.name, step.done) for step in interrupted.steps] == [
            ("one", True),
            ("two", True),
        ]
        assert (interrupted.attempt, interrupted.spec.value) == (2, 1)


async def test_retry_starts_from_the_first_step(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Retry continues the same operation from its first step."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, steps=[("one", "idempotent", True, 1)])
    script.decision = Retry()
    seen: list[Any] = []
    script.acts["a"] = operation_act("one", seen=seen)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert seen == [(identity, 2, 1), "new one"]
        assert await ending_of(runtime, identity) is Ending.DONE


async def test_another_name_is_refused(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Opening an operation of another name is refused with both names, and changes nothing."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, operation="install")
    script.acts["a"] = operation_act("one", name="upgrade")
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        (line,) = runtime.log_lines("reconcile.failed")
        assert "'install' has to be finished before 'upgrade'" in line["reason"]
        assert open_record(runtime).id == identity
        assert runtime.queue_state("a") == "retrying"
        check_consistent(runtime)


@pytest.mark.parametrize("again", ["apply", "other"])
async def test_one_operation_within_another_is_refused(
    tmp_path: Path, autojump_clock: MockClock, again: str
) -> None:
    """An operation within an open one is refused, naming the open one, which continues."""
    script = ScriptedReconciler()
    refused: list[str] = []

    async def act(request: Any) -> Result:
        async with request.operation("apply") as outer:
            with pytest.raises(OperationAlreadyOpen) as info:
                async with request.operation(again):
                    pass
            refused.append(str(info.value))
            assert open_record(runtime).id == outer.id
        return done()

    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert "c/a has the open operation apply" in refused[0]
        assert runtime.queue_state("a") is None
        check_consistent(runtime)


# -- ONCE ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["roll-forward", "roll-back", "hold"])
@pytest.mark.parametrize("observation", [DIFFERENT, None])
async def test_once_without_a_result_is_held(
    tmp_path: Path, autojump_clock: MockClock, policy: Any, observation: Observation | None
) -> None:
    """A ONCE step that was started and has no result is not run again by any policy."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, steps=ONCE_STARTED)
    script.observations = [observation]
    async with run_restarted(tmp_path, script, policy=policy) as runtime:
        runtime.declare(thing("a", 2))
        await trio.sleep(3600)
        assert not hold_of(runtime).by_cap
        assert script.calls_for("a") == ["observe", "recover"]
        (line,) = runtime.log_lines("operation.held", operation=identity)
        assert any("--forward" in command for command in line["commands"])


async def test_only_forward_runs_a_started_once_step_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A resolution by --forward runs the ONCE step again, in the same operation, once."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, steps=ONCE_STARTED)
    seen: list[Any] = []
    script.acts["a"] = operation_act("pay:once", seen=seen, pay=ProgramFailed("it broke"))
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        hold_of(runtime)
        await runtime.context.operations.journal.resolve(
            identity, Resolution.FORWARD, "eve", "checked by hand"
        )
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert [each[1] for each in seen] == [3]
        # The resolution applies to one attempt: the step has no result again.
        await trio.sleep(60)
        assert [each[1] for each in seen] == [3]
        hold_of(runtime)


async def test_retry_after_a_started_once_step_is_held(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Retry is a hold if a ONCE step was started, done or not."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, steps=ONCE_DONE)
    script.decision = Retry()
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert "cannot restart from its first step" in hold_of(runtime).reason
        assert script.ran == []


# -- decisions -------------------------------------------------------------------


async def test_recover_that_raises_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """recover() that raises is a hold, which names the exception."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.decision = KeyError("flavour")
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert "KeyError: 'flavour'" in hold_of(runtime).reason
        assert script.ran == []


async def _decides_later() -> RollForward:
    await trio.lowlevel.checkpoint()
    return RollForward()


@pytest.mark.parametrize("returned", [RollBack, "forward", True, 0])
async def test_recover_that_returns_no_decision_is_held(
    tmp_path: Path, autojump_clock: MockClock, returned: Any
) -> None:
    """recover() that returns no decision is a hold, which quotes the value."""
    script = UndoingReconciler()
    await leave_open_operation(tmp_path)
    script.decision = returned
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert "recover() failed: it returned" in hold_of(runtime).reason
        assert script.calls_for("a") == ["observe", "recover"]


async def test_an_async_recover_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """recover() written as async def is a hold, and its coroutine is closed."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.decision = _decides_later()
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert "async" in hold_of(runtime).reason
    script.decision = None
    gc.collect()  # a coroutine that was never awaited would warn here, which fails the test


async def test_observe_that_returns_no_observation_is_unknown(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """observe() that returns no Observation counts as unknown, and the value is logged."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.observations = [True]
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert script.ran == []
        assert runtime.queue_state("a") == "retrying"
        (line,) = runtime.log_lines("recovery.decided")
        assert "observe() returned True" in line["reason"]


async def test_complete_records_the_spec_as_applied(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As desired completes the operation: nothing runs, and its pinned spec is recorded."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    script.observations = [AS_DESIRED]
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED
        assert runtime.context.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        assert script.ran == []
        check_consistent(runtime)


async def test_abandon_records_nothing_as_applied(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Abandon closes the operation, records nothing as applied, and the declared spec runs."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    script.decision = Abandon("too old")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 2))
        await runtime.wait_all_blocked()
        record = await closed_operation(runtime, identity)
        assert record is not None
        assert record.ending is Ending.ABANDONED
        assert record.notes[-1].why == "too old"
        assert [request.spec.value for request in script.requests] == [2]
        check_consistent(runtime)


async def test_done_without_opening_the_operation_closes_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A run that succeeds without opening the operation closes it: settled by observation."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED
        assert runtime.context.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        check_consistent(runtime)


async def test_a_hold_of_the_reconciler_is_durable(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A hold is durable with reason and evidence, and logged with the commands it names."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.decision = Hold("the tape is in the drive", "drive 3", ("eject 3",))
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        hold = hold_of(runtime)
        assert (hold.reason, hold.evidence) == ("the tape is in the drive", "drive 3")
        (line,) = runtime.log_lines("operation.held")
        assert line["commands"] == ["eject 3"]
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        hold_of(runtime)
        assert script.calls_for("a") == ["observe", "recover"]


async def test_a_hold_blocks_its_key_alone(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A held key does not run for ticks, requests or another spec; other keys run."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, hold=operation_record.Hold("unknown", "decision", "", 1.0))
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 2), thing("b"))
        await runtime.wait_all_blocked()
        number = len(script.calls_for("b"))
        for cause in ("every 10m", "every 20m"):
            runtime.enqueue("a", "b", cause=cause, priority=Priority.RESYNC)
            await trio.sleep(600)
        runtime.enqueue("a")
        runtime.declare(thing("a", 3), thing("b"))
        await trio.sleep(600)
        assert script.calls_for("a") == []
        assert len(script.calls_for("b")) == number + 2
        assert runtime.controller.statuses[key("a")].reason == "unknown"
        hold_of(runtime)


async def test_wait_asks_again_later(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Wait calls recover() again after its seconds; it is an own outcome, never held."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    script.decision = Wait(90.0, "the disk syncs")
    async with run_restarted(tmp_path, script, cap=2) as runtime:
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover"]
        await trio.sleep(89)
        assert script.calls_for("a") == ["observe", "recover"]
        await trio.sleep(90 * 5)
        assert len(script.calls_for("a")) == 12
        record = open_record(runtime)
        assert (record.id, record.recoveries, record.hold) == (identity, 0, None)
        check_consistent(runtime)


async def test_wait_is_not_a_busy_loop(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Wait(0) calls recover() again no sooner than a failed run is retried."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.decision = Wait(0)
    async with run_restarted(tmp_path, script):
        await trio.sleep(10.5)
        assert script.calls_for("a").count("observe") == 11


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_wait_is_finite(seconds: float) -> None:
    """Wait() refuses infinite, negative and undefined times."""
    with pytest.raises(ValueError, match="finite"):
        Wait(seconds)


async def test_an_unknown_observation_is_repeated_and_then_held(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An unknown observation is repeated with backoff, and held after max_recoveries."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.observations = [UNKNOWN, OSError(5, "I/O"), UNKNOWN]
    times: list[float] = []
    script.on_call = lambda what, _: (
        times.append(trio.current_time()) if what == "observe" else None
    )
    async with run_restarted(tmp_path, script, cap=3) as runtime:
        await trio.sleep(600)
        assert len(times) == 3
        assert times[0] < times[1] < times[2]
        assert script.ran == []
        assert hold_of(runtime).by_cap
        assert len(runtime.log_lines("operation.held")) == 1


async def test_a_later_observation_completes_the_recovery(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An observation that is known at last completes the recovery."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    script.observations = [UNKNOWN, AS_DESIRED]
    async with run_restarted(tmp_path, script) as runtime:
        await trio.sleep(60)
        assert await ending_of(runtime, identity) is Ending.COMPLETED


# -- preconditions ---------------------------------------------------------------


async def test_another_kind_is_held(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An operation whose kind its controller no longer has is held, and not counted."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, kind="Flag")
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert "kind is Flag" in hold_of(runtime).reason
        assert script.calls == []
        assert open_record(runtime).attempt == 1


HERE = HostIdentity.current()


@pytest.mark.parametrize(
    ("machine", "is_held"),
    [
        (HostIdentity("another boot", "another machine"), True),
        (HostIdentity("another boot", ""), True),
        (HostIdentity("another boot", HERE.machine_id or "-"), not HERE.machine_id),
        (HostIdentity(HERE.boot_id, "another machine"), False),
        (HostIdentity("", ""), False),
    ],
)
async def test_an_operation_of_another_machine_is_held(
    tmp_path: Path, autojump_clock: MockClock, machine: HostIdentity, *, is_held: bool
) -> None:
    """An operation begun on another machine is held; one begun before a reboot is not."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, machine=machine)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        if not is_held:
            assert await ending_of(runtime, identity) is Ending.COMPLETED
            return
        assert "another machine" in hold_of(runtime).reason
        assert script.calls == []
        # A person's resolution lets it continue on this machine.
        await runtime.context.operations.journal.resolve(
            identity, Resolution.FORWARD, "eve", "it is off"
        )
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED
