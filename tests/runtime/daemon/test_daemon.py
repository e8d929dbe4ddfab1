"""The daemon's tree of tasks: its start, signals, crashes and end."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import json
import signal
from typing import Any, NoReturn

import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import WholeDaemon

from reconciled.api import Result, done
from reconciled.core.resources import Key
from reconciled.core.stages import Stage
from reconciled.journal.removal_approvals import PendingApproval, read_pending, write_approval
from reconciled.observe.logs import Logs
from reconciled.programs.orphan_reaper import OrphanReaper
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.daemon.reload import Reloader
from reconciled.runtime.decisions.approvals import RemovalApprovals
from reconciled.runtime.runs.dispatcher import Dispatcher


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


def stage_of(daemon: Daemon) -> Stage:
    return daemon.context.stop.stage


def critical_for(seconds: float, ended: list[float]) -> Any:
    """An act: one critical operation of *seconds*."""

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(seconds)
            ended.append(trio.current_time())
        return done()

    return act


async def test_an_idle_daemon_stops_at_once(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A stop without work takes no time, ends with 0 and is reported."""
    whole_daemon.configure("a", "b")
    whole_daemon.declared["a"] = [thing("x")]
    async with whole_daemon.running():
        assert whole_daemon.log_lines("daemon.ready")[0]["keys"] == 1
        began = trio.current_time()
        whole_daemon.signal()
        await whole_daemon.wait_all_blocked()
    assert whole_daemon.exit_code == 0
    assert whole_daemon.ended_at == began
    report = json.loads((whole_daemon.state / "last-stop.json").read_text())
    assert (report["exit_code"], report["signal"]) == (0, "SIGTERM")
    assert whole_daemon.log_lines("stop.began")[0]["running"] == 0
    assert whole_daemon.log_lines("stop.ended")[0]["exit_code"] == 0


async def test_the_stages_of_a_stop(whole_daemon: WholeDaemon, autojump_clock: MockClock) -> None:
    """Ordinary work is cancelled after the drain, critical work finishes, and the code is 0."""
    ended: list[float] = []
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("ordinary"), thing("critical"), thing("quick")]
    whole_daemon.acts = {"a/ordinary": hang, "a/critical": critical_for(40, ended)}
    async with whole_daemon.running() as daemon:
        began = trio.current_time()
        whole_daemon.signal()
        await trio.sleep(9.9)
        assert stage_of(daemon) is Stage.DRAINING
        assert sorted(whole_daemon.active) == ["a/critical", "a/ordinary"]
        await trio.sleep(0.2)
        assert stage_of(daemon) is Stage.STOPPING
        assert whole_daemon.active == {"a/critical"}
    assert ended == [began + 40]
    assert whole_daemon.ended_at == began + 40
    assert whole_daemon.exit_code == 0
    assert whole_daemon.log_lines("reconcile.interrupted", key="a/ordinary")
    # It finished, so its outcome is recorded.
    assert not whole_daemon.log_lines("reconcile.interrupted", key="a/critical")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, number: int
) -> None:
    """A repeated SIGTERM, or a SIGINT, cancels ordinary work at once and cuts nothing."""
    ended: list[float] = []
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("ordinary"), thing("critical")]
    whole_daemon.acts = {"a/ordinary": hang, "a/critical": critical_for(40, ended)}
    async with whole_daemon.running():
        began = trio.current_time()
        whole_daemon.signal()
        await trio.sleep(1)
        whole_daemon.signal(number)
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.active == {"a/critical"}
    assert ended == [began + 40]
    assert whole_daemon.exit_code == 0


async def test_only_sigint_cuts(whole_daemon: WholeDaemon, autojump_clock: MockClock) -> None:
    """Repeated SIGTERMs never shorten critical work; SIGINT while STOPPING cuts it: code 3."""
    ended: list[float] = []
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("critical")]
    whole_daemon.acts = {"a/critical": critical_for(40, ended)}
    async with whole_daemon.running() as daemon:
        began = trio.current_time()
        for _ in range(5):
            whole_daemon.signal()
            await trio.sleep(1)
        assert stage_of(daemon) is Stage.STOPPING
        assert whole_daemon.active == {"a/critical"}
        whole_daemon.signal(signal.SIGINT)
    assert ended == []
    assert whole_daemon.ended_at == began + 5
    assert whole_daemon.exit_code == 3
    cut, ended_line = (
        whole_daemon.log_lines("operation.cut")[0],
        whole_daemon.log_lines("stop.ended")[0],
    )
    assert "write was cut off after 5s" in cut["reason"]
    assert cut["key"] == "a/critical"
    assert cut["operation"] == whole_daemon.log_lines("operation.interrupted")[0]["operation"]
    assert ended_line["cut"] == 1
    assert ended_line["reason"] == "something was cut, not recorded, or left behind"


async def test_the_hard_limit_cuts(whole_daemon: WholeDaemon, autojump_clock: MockClock) -> None:
    """A critical operation that began late in the drain ends at the hard limit, with code 3."""
    whole_daemon.configure("a", stop="{drain: 10s, critical: 20s, cleanup: 5s}")
    whole_daemon.declared["a"] = [thing("late")]

    async def late(request: Any) -> Result:
        await trio.sleep(8)
        async with request.operation("write") as operation, operation.critical(budget="20s"):
            await trio.sleep(19)
        return done()

    whole_daemon.acts = {"a/late": late}
    async with whole_daemon.running():
        began = trio.current_time()
        whole_daemon.signal()
    assert whole_daemon.ended_at == pytest.approx(began + 20, abs=0.1)
    assert whole_daemon.exit_code == 3


# -- crashes ---------------------------------------------------------------------------


async def crashes() -> NoReturn:
    await trio.sleep(5)
    raise ZeroDivisionError("a fault of ours")


CRASHING_TASKS: dict[str, tuple[type, str]] = {
    "dispatcher": (Dispatcher, "run"),
    "intake": (Controller, "watch"),
    "approvals": (RemovalApprovals, "serve"),
    "reload": (Reloader, "serve"),
    "orphan reaper": (OrphanReaper, "reap"),
    "log": (Logs, "serve"),
}


@pytest.mark.parametrize("task", CRASHING_TASKS)
async def test_a_crash_ends_in_a_staged_stop(
    whole_daemon: WholeDaemon,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
) -> None:
    """A fault of a long-lived task stops the daemon with 1, and cuts nothing that is critical."""
    ended: list[float] = []
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("ordinary"), thing("critical"), thing("late")]
    whole_daemon.acts = {"a/ordinary": hang, "a/critical": critical_for(40, ended)}
    cls, method = CRASHING_TASKS[task]
    real = getattr(cls, method)

    async def crash_later(self: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crashes)
            await real(self)

    monkeypatch.setattr(cls, method, crash_later)
    async with whole_daemon.running() as daemon:
        began = trio.current_time()
        assert whole_daemon.active == {"a/ordinary", "a/critical"}
        await trio.sleep(5.1)
        assert stage_of(daemon) is Stage.STOPPING
        assert whole_daemon.active == {"a/critical"}
    assert ended == [began + 40]
    assert whole_daemon.ended_at == began + 40
    assert whole_daemon.exit_code == 1
    # Services outlive all work: outcomes are recorded although one service has crashed.
    assert whole_daemon.log_lines("store.failed") == []
    assert whole_daemon.log_lines("reconcile.done", key="a/critical")
    assert "a fault of ours" in json.dumps(whole_daemon.log_lines("daemon.crashed"))
    assert daemon.context.stop.registry.cut_count == 0


async def test_a_crash_before_anything_runs(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault during the assembly is logged as itself, and the exit code is 1."""

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    whole_daemon.configure("a")
    monkeypatch.setattr(Daemon, "_serve", fail)
    async with whole_daemon.running():
        pass
    assert whole_daemon.exit_code == 1
    assert "a fault of ours" in json.dumps(whole_daemon.log_lines("daemon.crashed"))


async def test_a_start_without_threads_is_late_and_does_not_fail(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started, as TasksMax= is used up, the start takes longer."""
    real, until = trio.to_thread.run_sync, trio.current_time() + 12

    async def run_sync(*given: Any, **named: Any) -> Any:
        if trio.current_time() < until:
            raise RuntimeError("can't start new thread")
        return await real(*given, **named)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    async with whole_daemon.running():
        await trio.sleep(30)
        assert whole_daemon.ran == ["a/x"]
        assert whole_daemon.log_lines("daemon.crashed") == []


async def test_a_file_in_place_of_a_directory_of_decisions_is_named(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The daemon runs without approvals, and says what is in the way."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    (whole_daemon.state / "removals").touch()
    async with whole_daemon.running():
        assert whole_daemon.ran == ["a/x"]
        assert "/removals" in whole_daemon.log_lines("removals.deferred")[0]["reason"]


async def test_a_crash_after_a_run_cuts_nothing(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the daemon after a run ends in a staged stop, with code 1 and without cuts."""
    ended: list[float] = []
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("critical")]
    whole_daemon.acts = {"a/critical": critical_for(40, ended)}
    async with whole_daemon.running() as daemon:
        began = trio.current_time()

        def broken(*_: Any) -> NoReturn:
            raise ZeroDivisionError("a fault of ours")

        daemon.context.on_outcome = broken
        whole_daemon.declare("a", thing("critical"), thing("x"))
        await trio.sleep(1)
        assert stage_of(daemon) is Stage.STOPPING
        assert whole_daemon.active == {"a/critical"}
        daemon.context.on_outcome = None
    assert ended == [began + 40]
    assert whole_daemon.exit_code == 1


# -- approvals ---------------------------------------------------------------------------


async def test_an_approval_without_a_daemon_is_used_at_the_start(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """``allow`` without a daemon approves exactly the held removals at the next start."""
    names = [f"k{number}" for number in range(8)]
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing(name) for name in names]
    async with whole_daemon.running():
        whole_daemon.declare("a", thing("k0"))
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.removed == []
    held = read_pending(whole_daemon.state, "a")
    assert held == PendingApproval("a", tuple(Key(f"a/{name}") for name in names[1:]), 8)
    async with whole_daemon.running():
        assert whole_daemon.removed == []
        assert len(whole_daemon.log_lines("removals.held")) == 2
    write_approval(whole_daemon.state, held)
    async with whole_daemon.running():
        await whole_daemon.wait_all_blocked()
        assert sorted(whole_daemon.removed) == [f"a/{name}" for name in names[1:]]
        # Approved removals are not held a second time.
        assert len(whole_daemon.log_lines("removals.held")) == 2
        assert read_pending(whole_daemon.state, "a") is None


async def test_a_restart_releases_no_held_removal(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A held set that has shrunk below the limits while no daemon ran needs its approval still."""
    names = [f"k{number}" for number in range(8)]
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing(name) for name in names]
    async with whole_daemon.running():
        whole_daemon.declare("a", thing("k0"))
        await whole_daemon.wait_all_blocked()
    whole_daemon.declared["a"] = [thing(name) for name in names[:6]]
    async with whole_daemon.running():
        assert whole_daemon.removed == []
        held = read_pending(whole_daemon.state, "a")
        assert held == PendingApproval("a", (Key("a/k6"), Key("a/k7")), 8)
        write_approval(whole_daemon.state, held)
        await whole_daemon.wait_all_blocked()
        assert sorted(whole_daemon.removed) == ["a/k6", "a/k7"]


async def test_a_report_that_cannot_be_read_is_logged(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A start continues where what an earlier daemon held is unknown."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    (whole_daemon.state / "removals").mkdir()
    (whole_daemon.state / "removals" / "a.held").write_text("[]")
    async with whole_daemon.running():
        assert whole_daemon.ran == ["a/x"]
        assert whole_daemon.log_lines("removals.unreadable", controller="a")


async def test_an_approval_without_its_controller_is_logged(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """An approval for a controller that does not run is logged and dropped."""
    whole_daemon.configure("a")
    async with whole_daemon.running() as daemon:
        write_approval(whole_daemon.state, PendingApproval("zz", (), 1))
        await daemon.assembly.approvals.inbox.scan()
        assert whole_daemon.log_lines("removals.bad_approval", controller="zz")


async def test_sigusr2_shows_the_tasks(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """SIGUSR2 writes the live task tree to the log, with runs by their keys."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts = {"a/x": hang}
    async with whole_daemon.running():
        whole_daemon.signal(signal.SIGUSR2)
        await whole_daemon.wait_all_blocked()
        told = (whole_daemon.root / "log").read_text()
        assert "reconcile a/x" in told
        assert "tasks." in told
