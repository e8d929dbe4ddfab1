"""Attempts: their count, the cap on it, and operations left open while the daemon runs."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import key, thing, unavailable
from restarts import (
    RecoveringReconciler,
    check_consistent,
    ending_of,
    hold_of,
    leave_open_operation,
    open_record,
    operation_act,
    run_restarted,
)
from trio.testing import MockClock

from reconciled.api import (
    Hold,
    Result,
    Retry,
    done,
    retry,
)
from reconciled.journal.operation_record import Ending
from reconciled.runtime.runs.program_adoption import enqueue_open_operations

# -- the count and the cap -------------------------------------------------------


async def test_a_poison_pill_is_held_at_the_cap(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Attempts without an outcome are counted across starts; the operation is held at the cap."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)

    async def killed(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    script.acts["a"] = killed
    for number in (1, 2, 3):
        async with run_restarted(tmp_path, script, cap=3) as runtime:
            await runtime.wait_all_blocked()
            record = open_record(runtime)
            assert (record.recoveries, record.attempt) == (number, number + 1)
    async with run_restarted(tmp_path, script, cap=3) as runtime:
        await runtime.wait_all_blocked()
        assert hold_of(runtime).by_cap
        assert "3 times" in hold_of(runtime).reason
    assert script.calls_for("a").count("reconcile") == 3


@pytest.mark.parametrize("way", ["error", "retry"])
async def test_an_own_outcome_resets_the_count(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """An attempt that ends by its own error or result resets the count."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(
        tmp_path, recoveries=2, steps=[("one", "idempotent", True, 1)]
    )

    async def act(request: Any) -> Result:
        if way == "error":
            raise OSError(5, "busy")
        return retry("busy")

    script.acts["a"] = act
    async with run_restarted(tmp_path, script, cap=3) as runtime:
        await trio.sleep(120)
        record = open_record(runtime)
        assert record.id == identity
        assert record.attempt > 5
        assert (record.recoveries, record.hold) == (0, None)
        check_consistent(runtime)


@pytest.mark.parametrize("decision", [None, Retry()])
async def test_a_new_step_resets_the_count(
    tmp_path: Path, autojump_clock: MockClock, decision: Retry | None
) -> None:
    """An attempt with a step that none did before does not count; a Retry does none."""
    script = RecoveringReconciler()
    script.decision = decision
    await leave_open_operation(tmp_path)

    async def act(request: Any) -> Result:
        async with request.operation("apply") as operation:
            await operation.step(f"step {operation.attempt}", trio.lowlevel.checkpoint)
            # Its start makes the step before it durable.
            await operation.step("hangs", trio.sleep_forever)
        return done()

    script.acts["a"] = act
    for number in range(1, 6):
        async with run_restarted(tmp_path, script, cap=3) as runtime:
            await runtime.wait_all_blocked()
            record = open_record(runtime)
            assert (record.hold is None) == (decision is None or number <= 3)
            assert record.recoveries == (1 if decision is None else min(number, 3))


async def test_an_interruption_does_not_reset_the_count(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An attempt whose program was killed or whose critical part was cut has no own outcome."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, steps=[("one", "idempotent", True, 1)])

    async def cut(request: Any) -> Result:
        async with request.operation("apply") as operation, operation.critical(budget=1.0):
            await trio.sleep_forever()
        return done()

    script.acts["a"] = cut
    async with run_restarted(tmp_path, script, cap=2) as runtime:
        await trio.sleep(120)
        assert hold_of(runtime).by_cap
        assert script.calls_for("a").count("reconcile") == 2


@pytest.mark.parametrize("way", ["stop", "crash"])
async def test_a_requested_stop_is_not_counted(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """An attempt cut by a requested stop is not counted; one cut by a crash of the daemon is."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    killing(script)
    for number in range(1, 5):
        async with run_restarted(tmp_path, script, cap=3) as runtime:
            await runtime.wait_all_blocked()
            if way == "stop":
                runtime.context.stop.begin("SIGTERM")
                runtime.context.stop.end_drain("the test wants it")
            else:
                runtime.context.stop.crash("crash: the test wants it")
            await runtime.wait_all_blocked()
            assert script.calls_for("a").count("reconcile") == (
                number if way == "stop" else min(number, 3)
            )
            record = open_record(runtime)
            assert (record.hold is not None) == (way == "crash" and number > 3)


def killing(runtime: RecoveringReconciler) -> None:
    async def act(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    runtime.acts["a"] = act


async def test_a_hold_by_the_cap_outlives_a_restart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another start with the same spec does not lift a hold by the cap."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, recoveries=3)
    for _ in range(3):
        # Imposed, or found, before the first report of a source: each daemon may be killed.
        async with run_restarted(tmp_path, script) as runtime:
            await runtime.wait_all_blocked()
            assert hold_of(runtime).by_cap
            runtime.declare(thing("a", 1))
            await runtime.wait_all_blocked()
            assert hold_of(runtime).by_cap
    assert script.calls == []
    assert len(runtime.log_lines("operation.held")) == 1


async def test_a_changed_spec_lifts_a_hold_by_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A changed spec lifts a hold by the cap and resets the count; nothing else does."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, recoveries=3)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert hold_of(runtime).by_cap
    # Also at a later start: the spec may change while no daemon runs.
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert hold_of(runtime).by_cap
        killing(script)
        runtime.declare(thing("a", 2))
        await runtime.wait_all_blocked()
        assert script.requests[0].spec.value == 1
        record = open_record(runtime)
        assert (record.id, record.recoveries, record.hold) == (identity, 1, None)


async def test_an_unreadable_source_does_not_lift_a_hold(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An unreadable source does not lift a hold by the cap (invariant 11); a deleted spec does."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path, recoveries=3)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
    async with run_restarted(tmp_path, script) as runtime:
        runtime.report(unavailable("it is not mounted"))
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert hold_of(runtime).by_cap
        runtime.declare(thing("b"))
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert script.calls_for("a")[0] == "observe"


async def test_changed_options_lift_a_hold_by_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Changed options of the controller lift a hold by the cap."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, recoveries=3)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
        assert hold_of(runtime).by_cap
        runtime.controller.config = attrs.evolve(runtime.controller.config, options={"fast": True})
        enqueue_open_operations(runtime.controller, trio.current_time())
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED


async def test_a_hold_imposed_before_the_first_report_is_lifted_too(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A hold imposed before the sources were read takes their first report as its spec."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, recoveries=3)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
        assert hold_of(runtime).by_cap
        runtime.declare(thing("a", 2))
        await runtime.wait_all_blocked()
        assert await ending_of(runtime, identity) is Ending.COMPLETED


async def test_other_holds_are_not_lifted(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A hold by decision is not lifted by a change of spec or options."""
    script = RecoveringReconciler()
    await leave_open_operation(tmp_path)
    script.decision = Hold("unknown")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
        assert hold_of(runtime).context
        runtime.declare(thing("a", 2))
        runtime.controller.config = attrs.evolve(runtime.controller.config, options={"fast": True})
        enqueue_open_operations(runtime.controller, trio.current_time())
        await runtime.wait_all_blocked()
        assert not hold_of(runtime).by_cap
        assert script.calls == [("observe", "a"), ("recover", "a")]


# -- operations left open while the daemon runs ----------------------------------


async def test_an_error_before_any_step_closes_the_operation(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An error before any step closes the operation as failed; the retry has a new id."""
    script = RecoveringReconciler()
    seen: list[Any] = []
    script.acts["a"] = operation_act("one", seen=seen, one=OSError(5, "busy"))
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert runtime.context.operations.journal.find_by_key(key("a")) is None
        check_consistent(runtime)
        await trio.sleep(5)
        assert len(seen) > 1
        assert len({identity for identity, _, _ in seen}) == len(seen)
        assert {attempt for _, attempt, _ in seen} == {1}
        assert await ending_of(runtime, seen[0][0]) is Ending.FAILED
        assert "recover" not in script.calls_for("a")
        check_consistent(runtime)


@pytest.mark.parametrize("step", ["one", "one:pure"])
async def test_an_error_after_a_step_leaves_the_operation_open(
    tmp_path: Path, autojump_clock: MockClock, step: str
) -> None:
    """An error after a step leaves the operation open: same id, next attempt, ordinary backoff."""
    script = RecoveringReconciler()
    seen: list[Any] = []
    script.acts["a"] = operation_act(step, "two", seen=seen, two=OSError(5, "busy"))
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1))
        await runtime.wait_all_blocked()
        record = open_record(runtime)
        assert (record.attempt, record.last_step, record.recoveries) == (1, "one", 0)
        assert runtime.queue_state("a") == "retrying"
        check_consistent(runtime)
        script.acts["a"] = operation_act(step, "two", seen=seen)
        await trio.sleep(5)
        assert seen[2:5] == [(record.id, 2, 1), "new one", "new two"]
        assert await ending_of(runtime, record.id) is Ending.DONE
        assert runtime.context.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        check_consistent(runtime)


async def test_an_error_in_a_once_step_leaves_the_operation_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An error in a ONCE step leaves the operation open, and the retry holds it."""
    script = RecoveringReconciler()
    script.acts["a"] = operation_act("pay:once", pay=OSError(5, "busy"))
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(60)
        assert "pay" in hold_of(runtime).reason
        assert script.calls_for("a").count("reconcile") == 1


EXITS = ["error", "error after step", "cut", "removed", "stop", "exit", "group", "swallowed"]


async def go(operation: Any, way: str) -> None:
    """Leave *operation* in the way *way*."""
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
    """After every way of leaving an operation, memory and disk agree on the open operations."""
    script = RecoveringReconciler()

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
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        if way == "removed":
            runtime.declare(thing("b"))
            await trio.sleep(10.5)
        elif way == "stop":
            await runtime.signal()
            await trio.sleep(10.5)
        else:
            await trio.sleep(1.1)
        record = runtime.context.operations.journal.find_by_key(key("a"))
        assert (record is None) == (way == "error")
        check_consistent(runtime)
        assert script.calls_for("b") == ["reconcile"]


async def test_a_cancelled_begin_leaves_nothing_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An operation that is cancelled while its intent is written is not open afterwards."""
    script = RecoveringReconciler()

    async def act(request: Any) -> Result:
        with trio.move_on_after(0) as scope:
            async with request.operation("apply"):
                pytest.fail("it was cancelled before")
        assert scope.cancelled_caught
        return done()

    script.acts["a"] = act
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(1)
        assert runtime.context.operations.journal.find_by_key(key("a")) is None
        check_consistent(runtime)
