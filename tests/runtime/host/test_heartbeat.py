"""The notifications to the service manager, and their times."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import (
    OneController,
    ScriptedReconciler,
    ScriptedSource,
    run_one_controller,
    thing,
)
from trio.testing import MockClock

from reconciled.api import Result, done
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin
from reconciled.runtime.daemon.reload import ReloadResult
from reconciled.runtime.host import status_line
from reconciled.runtime.host.heartbeat import LONGEST_EXTENSION, Heartbeat

BAD = ReloadResult(problems=(Problem(Origin("/r.yaml", 1, 1), "it is no mapping"),))


@attrs.frozen
class Message:
    """One datagram, and the time at which it arrived."""

    at: float
    fields: dict[str, Any]

    @property
    def extension(self) -> float:
        """Seconds; 0 where none is asked for."""
        return float(self.fields.get("EXTEND_TIMEOUT_USEC", 0)) / 1e6


@attrs.define(eq=False)
class RecordingNotifier:
    """In place of a Notifier: keeps the messages; refuses them while it is full."""

    watchdog_s: float | None = None
    full: bool = False
    messages: list[Message] = attrs.field(factory=list)

    def notify(self, **fields: Any) -> bool:
        if not self.full:
            self.messages.append(Message(trio.current_time(), fields))
        return not self.full

    def set_status(self, text: str) -> bool:
        return self.notify(STATUS=text)

    def all(self, name: str) -> list[Message]:
        return [message for message in self.messages if name in message.fields]

    def since_stopping(self) -> list[Message]:
        """From STOPPING on."""
        return self.messages[self.messages.index(self.all("STOPPING")[0]) :]

    @property
    def texts(self) -> list[str]:
        return [message.fields["STATUS"] for message in self.all("STATUS")]

    @property
    def states(self) -> list[str]:
        """READY, RELOADING and STOPPING, in order."""
        names = ("READY", "RELOADING", "STOPPING")
        return [name for each in self.messages for name in names if name in each.fields]


@attrs.define(eq=False)
class BeatingController:
    """A controller with its heartbeat."""

    runtime: OneController
    notifier: RecordingNotifier
    heartbeat: Heartbeat
    nursery: trio.Nursery

    async def stop(self) -> None:
        """The instant of a stop; it ends when nothing runs any more."""
        await self.runtime.signal()

    async def over(self) -> None:
        """Until all work has ended, and the services end."""
        await self.runtime.controller.ended.wait()
        self.nursery.cancel_scope.cancel(reason="work has ended")
        with trio.CancelScope(shield=True):
            await self.runtime.wait_all_blocked()


@asynccontextmanager
async def run_with_heartbeat(
    tmp_path: Path,
    notifier: RecordingNotifier,
    script: ScriptedReconciler | None = None,
    **more: Any,
) -> AsyncIterator[BeatingController]:
    async with (
        run_one_controller(tmp_path, script or ScriptedReconciler(), **more) as runtime,
        trio.open_nursery() as nursery,
    ):
        heartbeat = Heartbeat(runtime.context, notifier, {"c": runtime.controller})  # type: ignore[arg-type]
        nursery.start_soon(heartbeat.serve, name="heartbeat")  # noqa: ASYNC113 - whenever it begins
        yield BeatingController(runtime, notifier, heartbeat, nursery)
        nursery.cancel_scope.cancel(reason="the test is over")


def critical_for(seconds: float, budget: str = "50s") -> Any:
    """An act: one critical operation of *seconds*."""

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget=budget):
            await trio.sleep(seconds)
        return done()

    return act


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


def gaps(messages: list[Message], until: float) -> Iterator[float]:
    """The time between each of *messages* and the next one, or the end."""
    times = [message.at for message in messages] + [until]
    return (after - before for before, after in itertools.pairwise(times))


# -- the start ---------------------------------------------------------------------------------


async def test_ready_comes_with_the_status(tmp_path: Path, autojump_clock: MockClock) -> None:
    """READY is sent once, when the daemon is ready, in one message with the status."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        await trio.sleep(3)
        assert beating.notifier.states == []
        beating.runtime.declare(thing("x"), thing("y"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        await trio.sleep(60)
        (ready,) = beating.notifier.all("READY")
        assert ready.at == 3
        assert ready.fields == {"READY": 1, "STATUS": "ready: 2 keys, 0 running, 0 held"}


async def test_the_start_has_a_status_and_an_extension(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Until the sources have reported, the status counts them, and their time is requested."""
    sources = [ScriptedSource("a"), ScriptedSource("b"), ScriptedSource("timer", declares=False)]
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), sources=sources) as beating:
        await trio.sleep(100)
        assert beating.notifier.texts == ["starting: reading 2 sources"]
        asked = beating.notifier.all("EXTEND_TIMEOUT_USEC")
        limit = max(message.at + message.extension for message in asked)
        assert limit == pytest.approx(status_line.SYNC_TIMEOUT + 5, abs=0.1)
        assert all(each.at < 0.5 * limit or each.at <= status_line.SYNC_TIMEOUT for each in asked)


# -- what a full socket refuses ------------------------------------------------------------------


async def test_ready_is_not_lost(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A state change that a full socket refused is sent with the next beat, in order and once."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        await trio.sleep(1.25)
        beating.notifier.full = True
        beating.heartbeat.notify_ready()
        beating.heartbeat.notify_reload(None)
        await trio.sleep(10)
        beating.heartbeat.notify_reload(ReloadResult())
        assert beating.notifier.states == []
        beating.notifier.full = False
        await trio.sleep(0.6)
        assert beating.notifier.states == ["READY", "RELOADING", "READY"]
        await trio.sleep(60)
        assert beating.notifier.states == ["READY", "RELOADING", "READY"]
        assert beating.notifier.texts[-1].startswith("ready:")


async def test_a_stop_is_sent_when_there_is_room_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """STOPPING and the extension wait for room as well."""
    script = ScriptedReconciler()
    script.acts["x"] = critical_for(40)
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), script) as beating:
        beating.runtime.declare(thing("x"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        beating.notifier.full = True
        await beating.stop()
        await trio.sleep(3)
        beating.notifier.full = False
        await trio.sleep(0.6)
        (told,) = beating.notifier.all("STOPPING")
        assert told.extension == LONGEST_EXTENSION


# -- while it runs -------------------------------------------------------------------------------


async def test_the_status_is_sent_when_it_changes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An unchanged status is not sent; a changed one is sent within a second."""
    script = ScriptedReconciler()
    script.acts["x"] = hang
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), script) as beating:
        beating.runtime.declare()
        beating.heartbeat.notify_ready()
        await trio.sleep(600)
        assert len(beating.notifier.messages) <= 2
        beating.runtime.declare(thing("x"))
        changed = trio.current_time()
        await trio.sleep(1.1)
        last = beating.notifier.messages[-1]
        assert last.fields == {"STATUS": "ready: 1 key, 1 running, 0 held"}
        assert last.at <= changed + 1
        beating.runtime.context.pause_reason = "the host shuts down"
        await trio.sleep(1.1)
        assert beating.notifier.texts[-1] == "paused: the host shuts down: 1 key, 1 running, 0 held"


@pytest.mark.parametrize("watchdog", [0.3, 3.0, 60.0])
async def test_watchdog_notifications_come_every_third(
    tmp_path: Path, autojump_clock: MockClock, watchdog: float
) -> None:
    """Two WATCHDOG=1 are at most a third of the manager's limit apart, and not much less."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier(watchdog)) as beating:
        beating.runtime.declare()
        beating.heartbeat.notify_ready()
        await trio.sleep(200 * watchdog)
        told = list(gaps(beating.notifier.all("WATCHDOG"), trio.current_time()))
        assert max(told) <= watchdog / 3 + 1e-6
        assert len(told) <= 200 * 3 * 1.1 + 2


async def test_without_a_watchdog_none_is_notified(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Without a watchdog of the manager, no WATCHDOG=1 is sent."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        beating.heartbeat.notify_ready()
        await trio.sleep(600)
        assert beating.notifier.all("WATCHDOG") == []


async def test_when_the_manager_watches(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The watchdog is active from the READY=1 that was taken to the signal of a stop."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier(60.0)) as beating:
        assert not beating.heartbeat.has_watchdog
        beating.notifier.full = True
        beating.heartbeat.notify_ready()
        assert not beating.heartbeat.has_watchdog
        beating.notifier.full = False
        await trio.sleep(1.1)
        assert beating.heartbeat.has_watchdog
        beating.heartbeat.notify_reload(None)
        assert beating.heartbeat.has_watchdog
        beating.runtime.context.signals.stop_requested_at = 0.0
        assert not beating.heartbeat.has_watchdog
    async with run_with_heartbeat(tmp_path / "other", RecordingNotifier()) as beating:
        beating.heartbeat.notify_ready()
        assert not beating.heartbeat.has_watchdog


# -- reloads -------------------------------------------------------------------------------------


async def test_a_reload_begins_and_ends(tmp_path: Path, autojump_clock: MockClock) -> None:
    """RELOADING says when it began, in the system's monotonic time, and READY follows."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        beating.runtime.declare()
        beating.heartbeat.notify_ready()
        before = time.monotonic_ns() // 1000
        beating.heartbeat.notify_reload(None)
        began = beating.notifier.messages[-1].fields
        assert before <= began["MONOTONIC_USEC"] <= time.monotonic_ns() // 1000
        assert began["STATUS"] == "reloading"
        beating.heartbeat.notify_reload(ReloadResult())
        assert beating.notifier.states == ["READY", "RELOADING", "READY"]
        assert beating.notifier.texts[-1] == "ready: 0 keys, 0 running, 0 held"


async def test_a_rejected_reload_is_ready_too(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A rejected reload ends with READY, too; the status says so until a reload succeeds."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        beating.runtime.declare()
        beating.heartbeat.notify_ready()
        for outcome, more in ((BAD, "; the last reload failed"), (ReloadResult(), "")):
            beating.heartbeat.notify_reload(None)
            beating.heartbeat.notify_reload(outcome)
            assert beating.notifier.states[-2:] == ["RELOADING", "READY"]
            text, _, note = beating.notifier.texts[-1].partition(", the previous configuration")
            assert text == f"ready: 0 keys, 0 running, 0 held{more}"
            assert bool(note) is bool(more)


async def test_nothing_is_ready_after_a_stop(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A reload that ends or begins during a stop is not notified: STOPPING is final."""
    script = ScriptedReconciler()
    script.acts["x"] = critical_for(20)
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), script) as beating:
        beating.runtime.declare(thing("x"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        beating.heartbeat.notify_reload(None)
        await beating.stop()
        await trio.sleep(1.1)
        beating.heartbeat.notify_reload(BAD)
        beating.heartbeat.notify_reload(None)
        beating.heartbeat.notify_reload(ReloadResult())
        await trio.sleep(1.1)
        assert beating.notifier.states == ["READY", "RELOADING", "STOPPING"]
        assert beating.notifier.texts[-1].startswith("draining: critical")


# -- stops ---------------------------------------------------------------------------------------


def covered(messages: list[Message], begun: float, ended: float) -> None:
    """Extensions leave no gap: each is renewed within two thirds of its time."""
    asked = [message for message in messages if message.extension]
    assert asked[0].at == begun
    for now, after in zip(asked, [*asked[1:], Message(ended, {})], strict=True):
        assert after.at < now.at + now.extension
        if after.extension:
            assert after.at <= now.at + now.extension / 3 + 0.5


async def test_extensions_are_requested_while_work_runs(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """From the first message of a stop to the end of its work, never for more than remains."""
    script = ScriptedReconciler()
    script.acts["x"] = critical_for(45, "50s")
    script.acts["y"] = hang
    async with run_with_heartbeat(tmp_path, RecordingNotifier(60.0), script) as beating:
        beating.runtime.declare(thing("x"), thing("y"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        begun = trio.current_time()
        await beating.stop()
        await beating.over()
        ended = trio.current_time()
        assert ended == pytest.approx(begun + 45)
        stop = beating.notifier.since_stopping()
        covered(stop, begun, ended)
        for message in stop:
            left = begun + 50 + beating.runtime.config.stop.cleanup - message.at
            enough = min(left + 5, LONGEST_EXTENSION)
            if message.at < ended:  # in the very instant it depends on who is first
                assert message.extension in (0, pytest.approx(enough, abs=0.01))
        # For a critical operation of 50 s the longest extension would have been too short.
        assert len([message for message in stop if message.extension]) >= 4


async def test_the_status_names_what_a_stop_waits_for(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """In each stage the status names the work and the time that it may take at most."""
    script = ScriptedReconciler()
    script.acts["x"] = critical_for(45, "50s")
    script.acts["y"] = script.acts["z"] = hang
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), script) as beating:
        beating.runtime.declare(thing("x"), thing("y"), thing("z"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        await beating.stop()
        await beating.runtime.wait_all_blocked()
        assert beating.notifier.texts[-1] == (
            "draining: waits for reconcile c/y and 1 more, 15s left;"
            " critical: write of c/x, 50s left"
        )
        await trio.sleep(10.6)  # the drain is over
        assert beating.notifier.texts[-1] == "stopping: critical: write of c/x, 40s left"
        await beating.over()
        assert beating.notifier.texts[-1] == "stopped"


async def test_the_final_status_reports_a_cut(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The status of a failed unit says that something was cut, and names the report."""
    script = ScriptedReconciler()
    script.acts["x"] = critical_for(45, "50s")
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), script) as beating:
        beating.runtime.declare(thing("x"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        await beating.stop()
        for _ in range(2):
            beating.runtime.context.stop.escalate("SIGINT again")
        await beating.over()
        told = (
            f"stopped: 1 critical operation cut, see {beating.runtime.context.state}/last-stop.txt"
        )
        assert beating.notifier.texts[-1] == told


async def test_an_idle_stop_requests_no_extension(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A stop without work is notified, and uses the unit's own limit."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        beating.runtime.declare()
        beating.heartbeat.notify_ready()
        await trio.sleep(100)
        await beating.stop()
        await trio.sleep(60)
        told = beating.notifier.since_stopping()
        assert told[0].fields == {"STOPPING": 1, "STATUS": "draining: nothing runs"}
        assert not any(message.extension for message in told)


async def test_a_stop_that_ends_at_once_is_notified(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """STOPPING is sent even if the services are cancelled before the next beat."""
    async with run_with_heartbeat(tmp_path, RecordingNotifier()) as beating:
        beating.runtime.declare()
        beating.heartbeat.notify_ready()
        await trio.sleep(1.1)
        beating.runtime.context.stop.begin("SIGTERM")
        beating.nursery.cancel_scope.cancel(reason="work has ended")
        with trio.CancelScope(shield=True):
            await beating.runtime.wait_all_blocked()
        assert beating.notifier.states == ["READY", "STOPPING"]
        assert beating.notifier.texts[-1] == "stopped"


async def test_an_extension_covers_a_cleanup(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Extensions are requested for ordinary work that cleans up after the drain."""

    async def cleans(request: Any) -> Result:
        try:
            await trio.sleep_forever()
        finally:
            async with request.cleanup():  # noqa: ASYNC102 - it is that scope
                await trio.sleep(4)  # noqa: ASYNC102 - see above
        return done()

    script = ScriptedReconciler()
    script.acts["y"] = cleans
    async with run_with_heartbeat(tmp_path, RecordingNotifier(), script) as beating:
        beating.runtime.declare(thing("y"))
        await beating.runtime.wait_all_blocked()
        beating.heartbeat.notify_ready()
        begun = trio.current_time()
        await beating.stop()
        await beating.over()
        ended = trio.current_time()
        assert ended == pytest.approx(begun + 10 + 4)
        covered(beating.notifier.since_stopping(), begun, ended)
        assert "stopping: waits for reconcile c/y, 3s left" in beating.notifier.texts
