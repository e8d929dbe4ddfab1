"""The daemon's tree as a whole: its start, its signals, its crashes and its end."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import json
import signal
from typing import Any, NoReturn

import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import World

from reconciled.api import Result, done
from reconciled.core.resources import Key
from reconciled.core.stages import Stage
from reconciled.observe.logs import Logs
from reconciled.programs.orphans import OrphanReaper
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.daemon.reload import Reloader
from reconciled.runtime.decisions.removals import (
    PendingApproval,
    RemovalApprovals,
    read_pending,
    write_approval,
)
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


async def test_an_idle_daemon_stops_at_once(world: World, autojump_clock: MockClock) -> None:
    """With nothing to wait for a stop takes no time, ends with 0 and is reported."""
    world.configure("a", "b")
    world.declared["a"] = [thing("x")]
    async with world.running():
        assert world.lines("daemon.ready")[0]["keys"] == 1
        began = trio.current_time()
        world.signal()
        await world.settle()
    assert world.code == 0
    assert world.ended_at == began
    report = json.loads((world.state / "last-stop.json").read_text())
    assert (report["exit_code"], report["signal"]) == (0, "SIGTERM")
    assert world.lines("stop.began")[0]["running"] == 0
    assert world.lines("stop.ended")[0]["exit_code"] == 0


async def test_the_stages_of_a_stop(world: World, autojump_clock: MockClock) -> None:
    """Ordinary work ends with the drain, critical work by itself, and the code stays 0."""
    ended: list[float] = []
    world.configure("a")
    world.declared["a"] = [thing("ordinary"), thing("critical"), thing("quick")]
    world.acts = {"a/ordinary": hang, "a/critical": critical_for(40, ended)}
    async with world.running() as daemon:
        began = trio.current_time()
        world.signal()
        await trio.sleep(9.9)
        assert stage_of(daemon) is Stage.DRAINING
        assert sorted(world.going) == ["a/critical", "a/ordinary"]
        await trio.sleep(0.2)
        assert stage_of(daemon) is Stage.STOPPING
        assert world.going == {"a/critical"}
    assert ended == [began + 40]
    assert world.ended_at == began + 40
    assert world.code == 0
    assert world.lines("reconcile.interrupted", key="a/ordinary")
    # It was brought to its end, so it is remembered.
    assert not world.lines("reconcile.interrupted", key="a/critical")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain(
    world: World, autojump_clock: MockClock, number: int
) -> None:
    """A repeated SIGTERM, or a SIGINT, cancels ordinary work at once and cuts nothing."""
    ended: list[float] = []
    world.configure("a")
    world.declared["a"] = [thing("ordinary"), thing("critical")]
    world.acts = {"a/ordinary": hang, "a/critical": critical_for(40, ended)}
    async with world.running():
        began = trio.current_time()
        world.signal()
        await trio.sleep(1)
        world.signal(number)
        await world.settle()
        assert world.going == {"a/critical"}
    assert ended == [began + 40]
    assert world.code == 0


async def test_only_sigint_cuts(world: World, autojump_clock: MockClock) -> None:
    """SIGTERM again and again never shortens critical work; SIGINT while STOPPING does: code 3."""
    ended: list[float] = []
    world.configure("a")
    world.declared["a"] = [thing("critical")]
    world.acts = {"a/critical": critical_for(40, ended)}
    async with world.running() as daemon:
        began = trio.current_time()
        for _ in range(5):
            world.signal()
            await trio.sleep(1)
        assert stage_of(daemon) is Stage.STOPPING
        assert world.going == {"a/critical"}
        world.signal(signal.SIGINT)
    assert ended == []
    assert world.ended_at == began + 5
    assert world.code == 3
    cut, ended_line = world.lines("operation.cut")[0], world.lines("stop.ended")[0]
    assert "write was cut off after 5s" in cut["reason"]
    assert cut["key"] == "a/critical"
    assert cut["operation"] == world.lines("operation.interrupted")[0]["operation"]
    assert ended_line["cut"] == 1
    assert ended_line["reason"] == "something was cut, not recorded, or left behind"


async def test_the_hard_limit_cuts(world: World, autojump_clock: MockClock) -> None:
    """A critical operation that began late in the drain ends at the hard limit, with code 3."""
    world.configure("a", stop="{drain: 10s, critical: 20s, cleanup: 5s}")
    world.declared["a"] = [thing("late")]

    async def late(request: Any) -> Result:
        await trio.sleep(8)
        async with request.operation("write") as operation, operation.critical(budget="20s"):
            await trio.sleep(19)
        return done()

    world.acts = {"a/late": late}
    async with world.running():
        began = trio.current_time()
        world.signal()
    assert world.ended_at == pytest.approx(began + 20, abs=0.1)
    assert world.code == 3


# -- crashes ---------------------------------------------------------------------------


async def crashes() -> NoReturn:
    await trio.sleep(5)
    raise ZeroDivisionError("a fault of ours")


PLACES: dict[str, tuple[type, str]] = {
    "dispatcher": (Dispatcher, "run"),
    "intake": (Controller, "watch"),
    "permits": (RemovalApprovals, "serve"),
    "reload": (Reloader, "serve"),
    "orphan reaper": (OrphanReaper, "reap"),
    "log": (Logs, "serve"),
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_crash_ends_in_a_staged_stop(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A fault of a long-lived task stops the daemon with 1, and cuts nothing that is critical."""
    ended: list[float] = []
    world.configure("a")
    world.declared["a"] = [thing("ordinary"), thing("critical"), thing("late")]
    world.acts = {"a/ordinary": hang, "a/critical": critical_for(40, ended)}
    cls, method = PLACES[place]
    real = getattr(cls, method)

    async def crash_later(self: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(crashes)
            await real(self)

    monkeypatch.setattr(cls, method, crash_later)
    async with world.running() as daemon:
        began = trio.current_time()
        assert world.going == {"a/ordinary", "a/critical"}
        await trio.sleep(5.1)
        assert stage_of(daemon) is Stage.STOPPING
        assert world.going == {"a/critical"}
    assert ended == [began + 40]
    assert world.ended_at == began + 40
    assert world.code == 1
    # Services outlive all work: what was done is remembered although one of them has crashed.
    assert world.lines("store.failed") == []
    assert world.lines("reconcile.done", key="a/critical")
    assert "a fault of ours" in json.dumps(world.lines("daemon.crashed"))
    assert daemon.context.stop.cut_count == 0


async def test_a_crash_before_anything_runs(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault while the daemon is put together is told as itself, and ends it with 1."""

    def fail(_: RemovalApprovals) -> None:
        raise ZeroDivisionError("a fault of ours")

    world.configure("a")
    monkeypatch.setattr(RemovalApprovals, "prepare", fail)
    async with world.running():
        pass
    assert world.code == 1
    assert "a fault of ours" in json.dumps(world.lines("daemon.crashed"))


async def test_a_crash_of_the_runs_place_cuts_nothing_either(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in what follows a run is the daemon's: staged, code 1, nothing cut."""
    ended: list[float] = []
    world.configure("a")
    world.declared["a"] = [thing("critical")]
    world.acts = {"a/critical": critical_for(40, ended)}
    async with world.running() as daemon:
        began = trio.current_time()

        def broken(*_: Any) -> NoReturn:
            raise ZeroDivisionError("a fault of ours")

        daemon.context.on_outcome = broken
        world.say("a", thing("critical"), thing("x"))
        await trio.sleep(1)
        assert stage_of(daemon) is Stage.STOPPING
        assert world.going == {"a/critical"}
        daemon.context.on_outcome = None
    assert ended == [began + 40]
    assert world.code == 1


# -- permits -----------------------------------------------------------------------------


async def test_a_permit_given_while_nothing_ran_is_used_at_the_start(
    world: World, autojump_clock: MockClock
) -> None:
    """``allow`` with the daemon down lets exactly the held removals go at the next start."""
    names = [f"k{number}" for number in range(8)]
    world.configure("a: {reconciler: 'mine:Removing'}")
    world.declared["a"] = [thing(name) for name in names]
    async with world.running():
        world.say("a", thing("k0"))
        await world.settle()
        assert world.removed == []
    held = read_pending(world.state, "a")
    assert held == PendingApproval("a", tuple(Key(f"a/{name}") for name in names[1:]), 8)
    async with world.running():
        assert world.removed == []
        assert len(world.lines("removals.held")) == 2
    write_approval(world.state, held)
    async with world.running():
        await world.settle()
        assert sorted(world.removed) == [f"a/{name}" for name in names[1:]]
        # Nobody is asked a second time about what has been permitted.
        assert len(world.lines("removals.held")) == 2
        assert read_pending(world.state, "a") is None


async def test_a_permit_for_no_controller_is_told(world: World, autojump_clock: MockClock) -> None:
    """A permit for a controller that does not run is told, and gone."""
    world.configure("a")
    async with world.running() as daemon:
        write_approval(world.state, PendingApproval("zz", (), 1))
        daemon.approvals.poll()
        assert world.lines("removals.bad_approval", controller="zz")


async def test_sigusr2_shows_the_tasks(world: World, autojump_clock: MockClock) -> None:
    """SIGUSR2 writes the live task tree to the log, with runs by their keys."""
    world.configure("a")
    world.declared["a"] = [thing("x")]
    world.acts = {"a/x": hang}
    async with world.running():
        world.signal(signal.SIGUSR2)
        await world.settle()
        told = (world.root / "log").read_text()
        assert "reconcile a/x" in told
        assert "tasks." in told
