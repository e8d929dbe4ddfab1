"""Runs of every outcome: their effects on queue, status, store and log."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import attrs
import pytest
import trio
from one_controller import (
    OneController,
    RemovingReconciler,
    ScriptedReconciler,
    Thing,
    key,
    run_one_controller,
    thing,
)
from trio.testing import MockClock

from reconciled.api import Outcome, Result, Terminal, after, done, retry, terminal
from reconciled.core.queue.states import Priority
from reconciled.core.stages import Stage
from reconciled.journal.sqlite.store import Store


def answers(*results: Any) -> Callable[[Any], Awaitable[Any]]:
    """An act that returns the results in turn, the last one repeatedly."""
    left = list(results)

    async def act(_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return left.pop(0) if len(left) > 1 else left[0]

    return act


def raises(error: BaseException) -> Callable[[Any], Awaitable[Any]]:
    async def act(_: Any) -> NoReturn:
        await trio.lowlevel.checkpoint()
        raise error

    return act


async def one(
    tmp_path: Path, act: Callable[[Any], Awaitable[Any]], **options: Any
) -> OneController:
    """A rig, torn down, after one run of a key whose reconcile() is *act*."""
    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script, **options) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
    return runtime


async def test_done_leaves_no_queue_state(tmp_path: Path, autojump_clock: MockClock) -> None:
    """done() leaves no state in the queue, a status without a reason, and the applied spec."""
    runtime = await one(tmp_path, answers(done()))
    assert runtime.queue_state("a") is None
    status = runtime.controller.statuses[key("a")]
    assert (status.outcome, status.reason) == (Outcome.DONE, "")
    assert runtime.context.store.fingerprint(key("a")) == thing("a").fingerprint


async def test_after_requeues_the_key(tmp_path: Path, autojump_clock: MockClock) -> None:
    """after(d) counts as done, and the key runs again after d seconds, not before."""
    script = ScriptedReconciler()
    script.acts["a"] = answers(after("90s"), done())
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert runtime.queue_state("a") == "delayed"
        assert runtime.controller.statuses[key("a")].reason == ""
        assert runtime.context.store.fingerprint(key("a")) == thing("a").fingerprint
        await trio.sleep(89)
        assert len(script.requests) == 1
        await trio.sleep(2)
        assert script.requests[1].causes == ("after 1m30s",)


async def test_retry_backs_off_and_recovers(tmp_path: Path, autojump_clock: MockClock) -> None:
    """retry() backs off longer each time, with its count; done() resets both, logged once."""
    script = ScriptedReconciler()
    script.acts["a"] = answers(retry("no network"), retry("no network"), done())
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert runtime.queue_state("a") == "retrying"
        assert runtime.controller.statuses[key("a")].reason == "no network"
        assert runtime.context.store.fingerprint(key("a")) is None
        await trio.sleep(10)
        assert [request.failures for request in script.requests] == [0, 1, 2]
        assert runtime.queue_state("a") is None
        assert runtime.controller.statuses[key("a")].reason == ""
        assert len(runtime.log_lines("fault.recovered", key=key("a"))) == 1
        (line,) = runtime.log_lines("reconcile.failed")
        assert (line["reason"], line["failures"]) == ("no network", 1)


async def test_terminal_waits_for_another_spec(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A terminal key does not run for ticks or after a delay, and at once for a changed spec."""
    script = ScriptedReconciler()
    script.acts["a"] = answers(terminal("no such user"), done())
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert runtime.queue_state("a") == "terminal"
        for _ in range(100):
            runtime.enqueue("a", cause="every 10m", priority=Priority.RESYNC)
            await trio.sleep(600)
        assert len(script.requests) == 1
        runtime.declare(thing("a", 2))
        await runtime.wait_all_blocked()
        assert len(script.requests) == 2
        assert runtime.queue_state("a") is None


async def test_a_terminal_key_runs_when_its_old_spec_returns(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A spec that is changed back runs a terminal key, although that spec was applied."""
    script = ScriptedReconciler()
    script.acts["a"] = answers(done(), terminal("no such user"), done())
    async with run_one_controller(tmp_path, script) as runtime:
        for value in (1, 2, 1):
            runtime.declare(thing("a", value))
            await runtime.wait_all_blocked()
        assert [request.spec.value for request in script.requests] == [1, 2, 1]
        assert runtime.controller.statuses[key("a")].outcome is Outcome.DONE


class BrokenText(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("broken")


class ExitingText(Exception):
    """An exception whose str() raises SystemExit."""

    def __str__(self) -> str:
        raise SystemExit(3)


class BrokenRepr:
    """A result whose repr() fails."""

    def __repr__(self) -> str:
        raise RuntimeError("broken")


async def _cancelled_late(_: Any) -> NoReturn:
    """Keep a cancellation, and raise it again outside its scope."""
    kept: BaseException = ValueError("nothing was kept")
    with trio.CancelScope() as scope:
        scope.cancel(reason="to have one")
        try:
            await trio.sleep_forever()
        except trio.Cancelled as error:
            kept = error
            raise
    raise kept


GROUP = ExceptionGroup("several", [ExceptionGroup("inner", [ValueError("deep")]), OSError("wide")])
OUTSIDE: list[tuple[str, Any, Outcome, str]] = [
    ("exception", raises(ValueError("x is 3")), Outcome.RETRY, "ValueError: x is 3"),
    ("without a text", raises(ValueError()), Outcome.RETRY, "ValueError"),
    ("known", raises(OSError(28, "No space")), Outcome.RETRY, "OSError: [Errno 28] No space"),
    ("Terminal", raises(Terminal("never")), Outcome.TERMINAL, "never"),
    ("a group", raises(GROUP), Outcome.RETRY, "ValueError: deep"),
    (
        "Terminal in a group",
        raises(BaseExceptionGroup("", [Terminal("no")])),
        Outcome.TERMINAL,
        "no",
    ),
    (
        "generator exit",
        raises(GeneratorExit()),
        Outcome.RETRY,
        "GeneratorExit: raised by plugin code",
    ),
    ("kept cancellation", _cancelled_late, Outcome.RETRY, "Cancelled: plugin code raised it"),
    ("sys.exit", raises(SystemExit(3)), Outcome.RETRY, "SystemExit: 3: raised by plugin code"),
    (
        "KeyboardInterrupt",
        raises(KeyboardInterrupt()),
        Outcome.RETRY,
        "KeyboardInterrupt: raised by plugin code",
    ),
    ("BaseException", raises(BaseException("odd")), Outcome.RETRY, "BaseException: odd"),
    ("broken text", raises(BrokenText()), Outcome.RETRY, "BrokenText: its text cannot be read"),
    ("exiting text", raises(ExitingText()), Outcome.RETRY, "ExitingText: its text"),
    ("exit, broken text", raises(SystemExit(BrokenText())), Outcome.RETRY, "SystemExit"),
    ("long text", raises(ValueError("x" * 9000)), Outcome.RETRY, "…"),
    ("None", answers(None), Outcome.RETRY, "returned None: return done()"),
    ("garbage", answers({"state": "ok"}), Outcome.RETRY, "returned {'state': 'ok'}"),
    ("broken garbage", answers(BrokenRepr()), Outcome.RETRY, "RuntimeError: broken"),
]


@pytest.mark.parametrize(
    ("act", "outcome", "reason"), [x[1:] for x in OUTSIDE], ids=[x[0] for x in OUTSIDE]
)
async def test_c15_a_fault_of_a_reconciler_fails_its_key_alone(
    tmp_path: Path,
    autojump_clock: MockClock,
    act: Callable[[Any], Awaitable[Any]],
    outcome: Outcome,
    reason: str,
) -> None:
    """Whatever a reconciler raises or returns fails its own key; other keys run (C15)."""
    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        status = runtime.controller.statuses[key("a")]
        assert status.outcome is outcome
        assert reason in status.reason
        assert len(status.reason) < 600
        assert runtime.queue_state("a") == (
            "terminal" if outcome is Outcome.TERMINAL else "retrying"
        )
        assert runtime.controller.statuses[key("b")].outcome is Outcome.DONE
        runtime.enqueue("b")
        await runtime.wait_all_blocked()
        assert script.ran.count("b") == 2


async def test_c15_the_plugin_and_the_source_line_are_logged(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An unexpected exception is logged with plugin, version, file and line (C15)."""
    runtime = await one(tmp_path, raises(ZeroDivisionError("by 0")))
    (line,) = runtime.log_lines("plugin.failed", key=key("a"))
    assert (line["plugin"], line["version"]) == ("script", "1.0")
    assert line["at"].startswith(f"{__file__}:")
    assert "traceback" not in line
    assert (await one(tmp_path / "2", raises(OSError("full")))).log_lines("plugin.failed") == []


async def test_c15_a_failure_does_not_hide_a_cancellation(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A group of an error and a cancellation ends the run as cancelled, and the error is logged."""

    async def failing_cleanup(_: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleep_and_fail)
            await trio.sleep_forever()

    async def sleep_and_fail() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise ZeroDivisionError("in a finally")

    script = ScriptedReconciler()
    script.acts["a"] = failing_cleanup
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        runtime.context.stop.crash("the test wants it")
        await runtime.wait_all_blocked()
        assert key("a") not in runtime.controller.statuses
        assert runtime.failures("a") == 0
        assert runtime.queue_state("a") == "waiting"
        assert "in a finally" in runtime.log_lines("plugin.failed")[0]["reason"]
        assert runtime.log_lines("reconcile.failed") == []


async def test_c15_faults_outside_reconcile_fail_the_key_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An exception of can_undo() or of the spec's class fails its own key alone (C15)."""

    class Odd(ScriptedReconciler):
        def can_undo(self, spec: Thing) -> bool:
            if spec.value == 7:
                raise SystemExit(3)
            return False

    script = Odd()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a", 7), thing("b"))
        await runtime.wait_all_blocked()
        assert runtime.controller.statuses[key("a")].outcome is Outcome.RETRY
        assert runtime.controller.statuses[key("b")].outcome is Outcome.DONE


async def test_a_run_gets_the_spec_that_its_manifest_carries(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The object of the parser reaches each run; a manifest without one is structured."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        spec = Thing(3)
        runtime.declare(thing("a", 3).with_typed_spec(spec), thing("b", 4))
        await runtime.wait_all_blocked()
        runtime.declare(thing("a", 3).with_typed_spec(spec), thing("b", 5))
        await runtime.wait_all_blocked()
        values = sorted((request.name, request.spec.value) for request in script.requests)
        assert values == [("a", 3), ("b", 4), ("b", 5)]
        assert [each.spec is spec for each in script.requests if each.name == "a"] == [True]


async def test_a_spec_that_is_not_valid_any_more_is_terminal(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A spec that its class refuses is terminal, and its file, line and column are named."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(attrs.evolve(thing("a"), spec={"valu": 3}))
        await runtime.wait_all_blocked()
        assert script.requests == []
        status = runtime.controller.statuses[key("a")]
        assert status.outcome is Outcome.TERMINAL
        assert "/m/x.yaml:3:1" in status.reason
        assert "did you mean value?" in status.reason


async def test_a_run_that_takes_too_long_fails(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The configured timeout ends a run as a failure, with that reason."""

    async def slow(_: Any) -> Result:
        await trio.sleep(121)
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = slow
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(119)
        assert runtime.queue_state("a") == "running"
        await trio.sleep(1.1)
        assert runtime.controller.statuses[key("a")].reason == "Timeout: took longer than 2m"
        assert runtime.failures("a") == 1


async def test_a_critical_operation_does_not_count_for_the_timeout(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Time inside a critical operation does not count towards the timeout of the run."""
    ended: list[float] = []

    async def act(request: Any) -> Result:
        await trio.sleep(100)
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(49)
        ended.append(trio.current_time())
        await trio.sleep(100)
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        start = trio.current_time()
        runtime.declare(thing("a"))
        await trio.sleep(168)
        assert [round(time - start) for time in ended] == [149]
        assert runtime.queue_state("a") == "running"
        await trio.sleep(2)
        assert "Timeout" in runtime.controller.statuses[key("a")].reason
        assert runtime.failures("a") == 1


async def test_an_overrun_is_a_failure_with_its_reason(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A critical operation that overruns its budget is cut, fails, and is logged as interrupted."""

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="3s"):
            await trio.sleep_forever()
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(3.1)
        assert runtime.controller.statuses[key("a")].reason == (
            "Overrun: write was cut off after 3s by its own budget of 3s"
        )
        assert runtime.log_lines("operation.interrupted")[0]["name"] == "write"
        assert [record.name for record in runtime.context.operations.journal.list_open()] == [
            "write"
        ]
        assert runtime.context.stop.registry.cut_count == 0


@pytest.mark.parametrize("budget", ["61s", 0, -1, float("inf"), float("nan")])
async def test_a_budget_that_a_stop_could_not_keep_is_refused(
    tmp_path: Path, autojump_clock: MockClock, budget: float | str
) -> None:
    """A critical budget is finite, positive and within stop.critical, or the run fails."""

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget=budget):
            raise AssertionError("it began")
        return done()

    runtime = await one(tmp_path, act)
    assert runtime.controller.statuses[key("a")].reason.startswith("ValueError: ")
    assert "budget" in runtime.controller.statuses[key("a")].reason


async def test_a_run_without_changes_writes_nothing(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Of a hundred runs with the same spec only the first writes to the store."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        commits = runtime.context.store.commits
        for _ in range(99):
            runtime.enqueue("a")
            await runtime.wait_all_blocked()
        assert len(script.requests) == 100
        assert runtime.context.store.commits == commits


async def test_the_key_is_recorded_before_its_first_effect(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The store has the key when an operation's body runs, and as complete when it has ended."""
    seen: list[Any] = []

    async def act(request: Any) -> Result:
        async with request.operation("write"):
            store = request._context.store
            seen.append((store.incomplete_fingerprint(request.key), store.fingerprint(request.key)))
            recalled = await store.find_applied(request.key)
            seen.append((recalled.spec, recalled.base, recalled.complete))
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a", 5))
        await runtime.wait_all_blocked()
        print_of = thing("a", 5).fingerprint
        assert seen == [(print_of, None), ({"value": 5}, "/m", False)]
        assert runtime.context.store.fingerprint(key("a")) == print_of
        assert runtime.context.store.incomplete_fingerprint(key("a")) is None


async def test_a_failed_run_is_not_recorded_as_applied(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The spec of a failed operation remains recorded as incomplete, so that it can be removed."""

    async def act(request: Any) -> Result:
        async with request.operation("write"):
            pass
        return retry("not yet")

    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        assert runtime.context.store.incomplete_fingerprint(key("a")) == thing("a").fingerprint
        assert runtime.context.store.fingerprint(key("a")) is None
        assert script.requests[0].applied is None


@pytest.mark.parametrize("inside", [False, True], ids=["ordinary", "in an operation"])
async def test_interrupted_is_neither_success_nor_failure(
    tmp_path: Path,
    autojump_clock: MockClock,
    *,
    inside: bool,
) -> None:
    """A run cancelled by a stop is not a failure; its key waits again with its causes (inv. 8)."""

    async def act(request: Any) -> Result:
        if not inside:
            await trio.sleep_forever()
        async with request.operation("write"):
            await trio.sleep_forever()
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = answers(retry("once"))
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        script.acts["a"] = act
        runtime.enqueue("a", cause="by hand")
        await runtime.wait_all_blocked()
        retries = runtime.controller.lane.counters.retries
        await runtime.signal()
        await trio.sleep(10.1)
        assert runtime.context.stop.stage is Stage.STOPPING
        assert runtime.queue_state("a") == "waiting"
        assert runtime.failures("a") == 1
        (entry,) = runtime.controller.lane
        assert "by hand" in entry.causes
        assert runtime.controller.lane.counters.retries == retries
        assert runtime.controller.statuses[key("a")].reason == "once"
        (line,) = runtime.log_lines("reconcile.interrupted")
        assert (line["level"], line["reason"]) == ("info", "SIGTERM")
        assert len(runtime.log_lines("operation.interrupted")) == inside
        assert runtime.context.stop_recorder.report(0).interrupted == (key("a"),)


async def test_a_critical_operation_outlives_the_stop_and_is_recorded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Critical work continues during a stop, and its result counts as done (C01)."""
    ended: list[float] = []

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="40s"):
            await trio.sleep(35)
            ended.append(trio.current_time())
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        start = trio.current_time()
        await runtime.signal()
        await runtime.controller.ended.wait()
        assert [time - start for time in ended] == [35]
        assert trio.current_time() - start == pytest.approx(35)
        assert runtime.context.store.fingerprint(key("a")) == thing("a").fingerprint
        assert runtime.controller.statuses[key("a")].outcome is Outcome.DONE
        assert runtime.log_lines("reconcile.interrupted") == []
        assert runtime.context.stop.registry.cut_count == 0


async def test_the_request_reports_a_stop(tmp_path: Path, autojump_clock: MockClock) -> None:
    """request.stopping is False before the instant of a stop, and True from it on."""
    seen: list[bool] = []

    async def act(request: Any) -> Result:
        seen.append(request.stopping)
        await trio.sleep(1)
        seen.append(request.stopping)
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        await runtime.signal()
        await runtime.controller.ended.wait()
    assert seen == [False, True]


async def test_a_reconciler_that_swallows_its_cancellation_is_reported(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A run that continues after cancellation and cleanup is reported as left behind."""

    async def deaf(_: Any) -> Result:
        while True:
            try:
                await trio.sleep(3600)
            except trio.Cancelled:  # noqa: ASYNC103 - what careless plugins do
                with trio.CancelScope(shield=True, deadline=trio.current_time() + 90):
                    await trio.sleep_forever()
                return done()  # noqa: ASYNC104 - so is this

    script = ScriptedReconciler()
    script.acts["a"] = deaf
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        await runtime.signal()
        await trio.sleep(10 + 5 + 0.6)
        assert [work.key for work in runtime.stragglers] == [key("a")]
        await runtime.controller.ended.wait()


async def test_a_removal_that_returns_after_or_retry_is_repeated(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """remove() that returns after() or retry() is called again, and the key remains known."""
    script = RemovingReconciler()
    script.removal = answers(after("5s"), retry("busy"), done())
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert runtime.log_lines("reconcile.removed") == []
        assert key("a") in runtime.context.store.all_keys()
        await trio.sleep(60)
        assert len(script.removals) == 3
        assert len(runtime.log_lines("reconcile.removed")) == 1
        assert runtime.references("a") == []


async def test_a_failing_store_fails_the_run_alone(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A removal whose last spec cannot be read is a failed run, and the daemon continues."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()

        async def broken(*_: Any) -> NoReturn:
            await trio.lowlevel.checkpoint()
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Store, "find_applied", broken)
        runtime.declare(thing("b"))
        runtime.controller.absent.clear()  # as after a restart
        await runtime.wait_all_blocked()
        assert runtime.controller.statuses[key("a")].outcome is Outcome.RETRY
        assert "Input/output error" in runtime.controller.statuses[key("a")].reason
