"""The verbs of the control socket of a whole daemon, and their replies."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import WholeDaemon

from reconciled.api import Result, done
from reconciled.control.listening_sockets import Peer
from reconciled.control.protocol import ControlReply
from reconciled.core.errors import RequestRefused
from reconciled.core.stages import Stage
from reconciled.runtime.daemon import reload
from reconciled.runtime.daemon.control_verbs import ControlVerbs
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.decisions.resolutions import Resolutions

FAST = "{reconciler: 'mine:ThingReconciler', concurrency: 9"
ROOT = Peer(1, 0)


def verbs(daemon: Daemon) -> ControlVerbs:
    return ControlVerbs(daemon.context, daemon.commands)


async def send(whole_daemon: WholeDaemon, **request: Any) -> list[dict[str, Any]]:
    """The lines of the reply to *request*."""
    stream = await trio.open_unix_socket(str(whole_daemon.state / "control.sock"))
    async with stream:
        await stream.send_all(json.dumps(request).encode() + b"\n")
        data = b"".join([part async for part in stream])
    return [json.loads(line) for line in data.splitlines()]


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


# -- reload ------------------------------------------------------------------------------------


async def test_a_reload_replies_after_the_swap(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The reply comes when the new configuration is in force: code 0 and what changed."""
    whole_daemon.configure("a", "b")
    async with whole_daemon.running() as daemon:
        whole_daemon.configure("a", f"c: {FAST}}}")
        answer = await verbs(daemon).reload(ROOT)
        assert answer == ControlReply(
            0, ("The new configuration is in force.", "started: c", "kept: a", "removed: b")
        )
        assert sorted(daemon.controllers) == ["a", "c"]


async def test_c13_a_rejected_reload_reports_each_problem(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The reply is 78 with every problem and its origin; the previous configuration stays."""
    whole_daemon.configure("a")
    async with whole_daemon.running() as daemon:
        whole_daemon.configure("a", "b: {reconciler: nope}", "c: {reconciler: 'mine:Thin'}")
        before = daemon.controllers["a"]
        answer = await verbs(daemon).reload(ROOT)
        assert answer.code == 78
        assert answer.lines[-1] == "rejected: the previous configuration stays in force"
        problems = [
            f"{line['at']}: {line['reason']}" for line in whole_daemon.log_lines("config.invalid")
        ]
        assert list(answer.lines[:-1]) == problems
        assert len(problems) == 2
        assert daemon.controllers == {"a": before}
        whole_daemon.configure("a")
        assert (await verbs(daemon).reload(ROOT)).code == 0


async def test_a_verb_waits_for_the_end_of_the_start(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload or a stop that is requested during the start is carried out after it."""
    go_on = trio.Event()

    async def first_look(_: Resolutions) -> None:
        await go_on.wait()

    monkeypatch.setattr(Resolutions, "wait_first_scan", first_look)
    whole_daemon.configure("a")
    answers: list[ControlReply] = []
    async with whole_daemon.running() as daemon, trio.open_nursery() as nursery:

        async def one(verb: Any) -> None:
            answers.append(await verb(ROOT))

        nursery.start_soon(one, verbs(daemon).reload)
        await whole_daemon.wait_all_blocked()
        assert (answers, whole_daemon.log_lines("reload.done")) == ([], [])
        assert daemon.context.stop.stage is Stage.RUNNING
        go_on.set()
        await whole_daemon.wait_all_blocked()
        assert [answer.code for answer in answers] == [0]
        assert len(whole_daemon.log_lines("reload.done")) == 1


async def test_a_reload_during_a_stop_is_refused(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A reload that meets a stop is refused, at whichever point that happens."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    async with whole_daemon.running() as daemon:
        whole_daemon.signal()
        with pytest.raises(RequestRefused, match="stop in progress"):
            await verbs(daemon).reload(ROOT)
        assert whole_daemon.log_lines("reload.refused")


async def test_a_stop_that_comes_during_a_reload(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reload whose swap comes after the begin of a stop is refused, with a reply."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    real = reload.compare
    async with whole_daemon.running() as daemon:

        def compare(*arguments: Any) -> Any:
            whole_daemon.signal()
            return real(*arguments)

        monkeypatch.setattr(reload, "compare", compare)
        with pytest.raises(RequestRefused, match="stop in progress"):
            await verbs(daemon).reload(ROOT)
        assert whole_daemon.log_lines("reload.done") == []


async def test_requests_during_a_reload_share_the_next(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests that arrive during a reload share one further reload."""
    whole_daemon.configure("a")
    go_on, reads = trio.Event(), []

    async def in_thread(function: Any, **_: Any) -> Any:
        loaded = function()
        reads.append(function)
        await go_on.wait()
        return loaded

    monkeypatch.setattr(reload, "in_thread", in_thread)
    answers: list[ControlReply] = []
    async with whole_daemon.running() as daemon:

        async def one() -> None:
            answers.append(await verbs(daemon).reload(ROOT))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            await whole_daemon.wait_all_blocked()
            assert len(reads) == 1
            whole_daemon.configure("a", "b")  # after it was read
            for _ in range(20):
                nursery.start_soon(one)
            await whole_daemon.wait_all_blocked()
            go_on.set()
        assert len(reads) == 2
        assert sorted(daemon.controllers) == ["a", "b"]
        assert [("started: b" in answer.lines, answer.code) for answer in answers] == [
            (False, 0),
            *[(True, 0)] * 20,
        ]


async def test_c13_a_storm_ends_with_the_last_configuration(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """1000 SIGHUP and 301 reloads in parallel: each gets its reply, and the last content runs."""
    whole_daemon.listening = True
    whole_daemon.configure("a")
    answers: list[dict[str, Any]] = []

    async def one() -> None:
        answers.append((await send(whole_daemon, verb="reload"))[-1])

    async with whole_daemon.running() as daemon:
        async with trio.open_nursery() as nursery:
            for number in range(1000):
                whole_daemon.signal(signal.SIGHUP)
                if number % 100 == 0:
                    whole_daemon.configure("a", "b", limit=number + 1)
                if number % 10 < 3:
                    nursery.start_soon(one)
                    await trio.lowlevel.checkpoint()
            whole_daemon.configure("a", "last")
            whole_daemon.signal(signal.SIGHUP)
            nursery.start_soon(one)
        assert sorted(daemon.controllers) == ["a", "last"]
        assert len(whole_daemon.log_lines("reload.done")) > 1
    assert [answer["code"] for answer in answers] == [0] * 301
    assert whole_daemon.exit_code == 0


# -- stop --------------------------------------------------------------------------------------


async def test_a_second_stop_changes_nothing(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """`stop` begins a stop, a second one changes nothing; `--now` takes it one stage further."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x"), thing("critical")]

    async def critical(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(45)
        return done()

    whole_daemon.acts = {"a/x": hang, "a/critical": critical}
    async with whole_daemon.running() as daemon:
        ours = verbs(daemon)
        for _ in range(3):
            answer = await ours.stop(ROOT)
            assert answer == ControlReply(0, ("The daemon is draining: what runs may finish.",))
            assert daemon.context.stop.stage is Stage.DRAINING
        assert whole_daemon.log_lines("stop.began")[0]["reason"] == "stop by uid 0"
        assert await ours.stop(ROOT, now=True) == ControlReply(
            0, ("The daemon is stopping: only critical operations continue.",)
        )
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.active == {"a/critical"}
        assert (await ours.stop(ROOT)).code == 0
        assert daemon.context.stop.stage is Stage.STOPPING
        assert "at its hard limit" in (await ours.stop(ROOT, now=True)).lines[0]
    assert whole_daemon.exit_code == 3


async def test_now_begins_a_stop_of_a_running_daemon(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """`stop --now` of a running daemon begins its drain, which is the next stage."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    async with whole_daemon.running() as daemon:
        assert "draining" in (await verbs(daemon).stop(ROOT, now=True)).lines[0]
        assert daemon.context.stop.stage is Stage.DRAINING


async def test_a_stop_of_an_idle_daemon_is_answered(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A daemon without work ends at once, but sends the reply first."""
    whole_daemon.listening = True
    whole_daemon.configure("a")
    async with whole_daemon.running():
        told = await send(whole_daemon, verb="stop", now=False)
        assert told[-1]["code"] == 0
        whole_daemon.daemon.signals.stop_requested_at = (
            0.0  # so that the block does not ask once more
        )
    assert whole_daemon.exit_code == 0
    assert not (whole_daemon.state / "control.sock").exists()


# -- readiness ---------------------------------------------------------------------------------


async def test_why_it_is_not_ready(whole_daemon: WholeDaemon, autojump_clock: MockClock) -> None:
    """Starting until all sources have reported, paused with its reason, stopping in a stop."""
    whole_daemon.configure("a", "b: {reconciler: 'other:X'}")
    whole_daemon.plugin("other", "1/0")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    go_on = trio.Event()

    async def late(report: Any) -> None:
        await go_on.wait()
        await trio.sleep_forever()

    whole_daemon.source_runs["a"] = [late]
    async with whole_daemon.running() as daemon:
        ours = verbs(daemon)
        assert ours.not_ready_reasons() == ["starting: not every source has been read yet"]
        await trio.sleep(11)
        assert ours.not_ready_reasons() == []  # although b stalls
        daemon.context.pause_reason = "the host shuts down"
        assert ours.not_ready_reasons() == ["paused: the host shuts down"]
        daemon.context.pause_reason = ""
        daemon.signals.stop_requested_at = 0.0  # the handler has run, and the loop not yet
        assert ours.not_ready_reasons() == ["stopping: a signal was received"]
        daemon.signals.stop_requested_at = None
        whole_daemon.signal()
        await whole_daemon.wait_all_blocked()
        assert ours.not_ready_reasons() == ["stopping: SIGTERM"]
