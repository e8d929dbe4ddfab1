"""A shutdown of the machine, announced by logind: what the daemon does before its own stop."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from one_controller import OneController, ScriptedReconciler, key, run_one_controller, thing
from trio.testing import MockClock

from reconciled.api import Result, done
from reconciled.core.errors import LogindUnreachable
from reconciled.runtime.daemon.manager_integration import ManagerIntegration
from reconciled.runtime.host.shutdown_delay import (
    PAUSE_TIMEOUT,
    PAUSED,
    ShutdownDelay,
    drain_wait,
)
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.service.inhibitor import Logind

HOUR = 3600.0


@attrs.define(eq=False)
class Lock:
    """A lock, with the times at which it was taken and released."""

    taken: float
    released: float | None = None

    def release(self) -> None:
        assert self.released is None
        self.released = trio.current_time()


@attrs.define(eq=False)
class ScriptedLogind:
    """In place of logind; every connection to it is in connections."""

    monkeypatch: pytest.MonkeyPatch
    preparing: bool = False
    delay: float = 5.0
    # Errors of connect() and inhibit(); None: it succeeds.
    unreachable: Exception | None = None
    refusal: Exception | None = None
    connect_times: list[float] = attrs.field(factory=list)
    locks: list[Lock] = attrs.field(factory=list)
    connections: list[ScriptedConnection] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.monkeypatch.setattr(Logind, "connect", self.connect)

    async def connect(self) -> ScriptedConnection:
        await trio.lowlevel.checkpoint()
        self.connect_times.append(trio.current_time())
        if self.unreachable is not None:
            raise self.unreachable
        self.connections.append(ScriptedConnection(self))
        return self.connections[-1]

    @property
    def held(self) -> list[Lock]:
        return [lock for lock in self.locks if lock.released is None]

    def announce(self, *, preparing: bool) -> None:
        """A shutdown is prepared, or is not any more; and every connection hears of it."""
        self.preparing = preparing
        for connection in self.connections:
            connection.changed.set()

    def restart_bus(self, error: Exception | None = None) -> None:
        """Every connection ends."""
        for connection in self.connections:
            connection.broken = error or LogindUnreachable(
                "the system bus has closed the connection"
            )
            connection.changed.set()


@attrs.define(eq=False)
class ScriptedConnection:
    """One connection."""

    logind: ScriptedLogind
    changed: trio.Event = attrs.field(factory=trio.Event)
    broken: Exception | None = None
    closed: bool = False

    async def is_preparing_for_shutdown(self) -> bool:
        await self._ask()
        return self.logind.preparing

    async def delay_max(self) -> float:
        await self._ask()
        return self.logind.delay

    async def inhibit(self, who: str, why: str) -> Lock:
        await self._ask()
        assert (who, bool(why)) == ("reconciled", True)
        assert not self.logind.preparing, "a lock is refused while what it would delay goes on"
        if self.logind.refusal is not None:
            raise self.logind.refusal
        self.logind.locks.append(Lock(trio.current_time()))
        return self.logind.locks[-1]

    async def wait_changed(self) -> None:
        await self.changed.wait()
        self.changed = trio.Event()
        await self._ask()

    def close(self) -> None:
        self.closed = True

    async def _ask(self) -> None:
        assert not self.closed
        await trio.lowlevel.checkpoint()
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def logind(monkeypatch: pytest.MonkeyPatch) -> ScriptedLogind:
    return ScriptedLogind(monkeypatch)


@pytest.fixture
async def delayed(
    tmp_path: Path, logind: ScriptedLogind, autojump_clock: MockClock
) -> AsyncIterator[DelayedController]:
    """A running controller whose key ``a`` takes as long as the test wants, and the service."""
    async with run_delayed(tmp_path) as delayed:
        yield delayed


@attrs.define(eq=False)
class DelayedController:
    """A controller with the shutdown delay."""

    runtime: OneController
    service: trio.CancelScope
    finish: trio.Event

    async def run_a(self) -> None:
        """Key ``a`` is in the midst of a run."""
        self.runtime.declare(thing("a"))
        await self.runtime.wait_all_blocked()
        assert self.runtime.script.ran == ["a"]


@asynccontextmanager
async def run_delayed(tmp_path: Path) -> AsyncIterator[DelayedController]:
    script = ScriptedReconciler()
    finish = trio.Event()

    async def act(_: Any) -> Result:
        await finish.wait()
        return done()

    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime, trio.open_nursery() as nursery:
        delayed = DelayedController(runtime, trio.CancelScope(), finish)

        async def serve() -> None:
            with delayed.service:
                power_off = ShutdownDelay(runtime.context, runtime.dispatcher)
                power_off.ready()
                await power_off.serve()

        nursery.start_soon(serve)  # noqa: ASYNC113 - the next line waits for it
        await runtime.wait_all_blocked()
        yield delayed
        nursery.cancel_scope.cancel(reason="the test is over")


def test_the_wait_is_the_drain_but_below_the_limit_of_logind() -> None:
    """Runs get the drain, but the lock is released a second before logind's limit."""
    assert drain_wait(20, 5) == 4
    assert drain_wait(2, 30) == 2
    assert drain_wait(20, 1.5) == 0.75
    assert drain_wait(20, 0) == 0


async def test_active_runs_end_and_none_starts(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """After the announcement no key is handed out, active runs end, and the lock is released."""
    await delayed.run_a()
    (lock,) = logind.held
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    delayed.runtime.declare(thing("a"), thing("b"))
    began = trio.current_time()
    await trio.sleep(2)
    assert delayed.runtime.script.ran == ["a"]
    assert delayed.runtime.context.pause_reason == PAUSED
    assert lock.released is None
    delayed.finish.set()
    await trio.sleep(1)
    assert lock.released is not None
    assert lock.released - began == pytest.approx(2, abs=0.1)
    assert delayed.runtime.script.ran == ["a"]
    assert delayed.runtime.log_lines("shutdown.announced", running=1, wait_s=4.0)
    assert delayed.runtime.log_lines("shutdown.drained")
    # No stage has been entered: the stop follows.
    assert not delayed.runtime.context.stopping


async def test_an_idle_daemon_delays_nothing(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """Without active runs, the lock is released at once."""
    (lock,) = logind.held
    logind.announce(preparing=True)
    began = trio.current_time()
    await delayed.runtime.wait_all_blocked()
    assert lock.released == began


async def test_a_run_that_was_handed_out_counts(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """The lock is kept for a run that has not taken its first step yet."""
    (lock,) = logind.held
    delayed.runtime.context.queue._ring.running += 1
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    assert lock.released is None
    delayed.runtime.context.queue._ring.running -= 1
    await trio.sleep(1)
    assert lock.released is not None


@pytest.mark.parametrize(("delay", "wait"), [(5.0, 4.0), (30.0, 10.0)])
async def test_the_lock_is_released_in_time(
    delayed: DelayedController,
    logind: ScriptedLogind,
    delay: float,
    wait: float,
    autojump_clock: MockClock,
) -> None:
    """Runs that exceed the drain or logind's limit are named, and the lock is released."""
    logind.delay = delay
    await delayed.run_a()
    (lock,) = logind.held
    logind.announce(preparing=True)
    began = trio.current_time()
    await trio.sleep(60)
    assert lock.released == began + wait
    assert delayed.runtime.log_lines("shutdown.overran", running=["reconcile c/a"], count=1)
    # The run continues: it is not cancelled before the stop.
    delayed.finish.set()
    await delayed.runtime.wait_all_blocked()
    assert delayed.runtime.context.queue.running == 0
    assert delayed.runtime.log_lines("reconcile.interrupted") == []


async def test_a_cancelled_shutdown(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """After a cancelled shutdown, keys are handed out and the lock is taken again."""
    await delayed.run_a()
    logind.announce(preparing=True)
    await trio.sleep(2)
    delayed.runtime.declare(thing("a"), thing("b"))
    delayed.finish.set()
    await trio.sleep(2)
    assert logind.held == []
    logind.announce(preparing=False)
    await delayed.runtime.wait_all_blocked()
    assert delayed.runtime.script.ran == ["a", "b"]
    assert delayed.runtime.context.pause_reason == ""
    assert len(logind.held) == 1
    assert len(delayed.runtime.log_lines("shutdown.cancelled")) == 1
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    assert delayed.runtime.context.pause_reason
    assert len(delayed.runtime.log_lines("shutdown.announced")) == 2


async def test_a_shutdown_cancelled_during_the_wait(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """Cancelled while runs are still active: the present lock is kept."""
    await delayed.run_a()
    logind.announce(preparing=True)
    await trio.sleep(2)
    logind.announce(preparing=False)
    await trio.sleep(60)
    assert [lock.released for lock in logind.locks] == [None]
    assert not delayed.runtime.context.pause_reason


async def test_a_repeated_announcement_is_logged_once(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """Further signals about one shutdown are not logged and do not extend the wait."""
    await delayed.run_a()
    (lock,) = logind.held
    logind.announce(preparing=True)
    began = trio.current_time()
    for _ in range(6):
        await trio.sleep(1)
        logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    assert lock.released == began + 4
    assert len(delayed.runtime.log_lines("shutdown.announced")) == 1


async def test_a_stop_during_the_pause(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """SIGTERM during the pause begins an ordinary stop."""
    await delayed.run_a()
    delayed.runtime.declare(thing("a", 2), thing("b"))
    logind.announce(preparing=True)
    await trio.sleep(1)
    await delayed.runtime.signal()
    delayed.finish.set()
    await delayed.runtime.controller.ended.wait()
    assert delayed.runtime.script.ran[:1] == ["a"]
    assert delayed.runtime.log_lines("shutdown.cancelled") == []
    logind.announce(preparing=False)
    await delayed.runtime.wait_all_blocked()
    assert len(delayed.runtime.script.ran) == delayed.runtime.script.ran.count("a") + 1
    assert delayed.runtime.context.queue.running == 0


async def test_a_pause_does_not_turn_the_loop_hot(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A key that becomes due in a pause waits for its end, and the dispatcher sleeps."""
    delayed.runtime.declare(thing("b"))
    await delayed.runtime.wait_all_blocked()
    now = trio.current_time()
    delayed.runtime.controller.lane.add_at(key("b"), now + 5, now, "later")
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    asked = 0
    start_ready = Dispatcher._start_ready

    def counted(dispatcher: Dispatcher) -> None:
        nonlocal asked
        asked += 1
        assert asked < 100, "the dispatcher does not sleep"
        start_ready(dispatcher)

    logind.monkeypatch.setattr(Dispatcher, "_start_ready", counted)
    await trio.sleep(60)
    assert asked <= 1
    logind.announce(preparing=False)
    await delayed.runtime.wait_all_blocked()
    assert delayed.runtime.script.ran == ["b", "b"]


@pytest.mark.parametrize("managed", [False, True])
async def test_only_a_managed_daemon_delays(
    tmp_path: Path, autojump_clock: MockClock, *, managed: bool
) -> None:
    """A daemon without a service manager, as in a terminal, takes no lock."""
    served: list[str] = []
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")} if managed else {}
    async with run_one_controller(tmp_path, ScriptedReconciler()) as delayed:
        assembly: Any = SimpleNamespace(
            context=delayed.context, dispatcher=delayed.dispatcher, controllers={}
        )
        commands: Any = SimpleNamespace(reloader=SimpleNamespace())
        outside = ManagerIntegration.from_environ(environ)
        outside.begin(assembly, commands, lambda name, *_: served.append(name))
        assert ("shutdown lock" in served) is managed
        if outside.notifier._socket is not None:
            outside.notifier._socket.close()


async def test_the_end_of_the_service_releases_the_lock(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A cancellation releases the lock, at whatever point."""
    await delayed.run_a()
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    delayed.service.cancel(reason="work has ended")
    await delayed.runtime.wait_all_blocked()
    assert logind.held == []
    assert logind.connections[-1].closed


# -- without a bus, or refused by it ----- ---------------------------------------------------


async def test_a_lost_connection_is_replaced(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A restart of the bus is logged once; the lock is taken again within a second."""
    (lock,) = logind.held
    logind.restart_bus()
    began = trio.current_time()
    await delayed.runtime.wait_all_blocked()
    assert lock.released == began
    assert logind.connections[0].closed
    await trio.sleep(1.1)
    assert len(logind.held) == 1
    assert len(delayed.runtime.log_lines("shutdown.lock_missing", level="warning")) == 1


async def test_no_bus_is_no_warning(
    tmp_path: Path, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """Without a system bus, as in a container: one line at info, and rare attempts."""
    logind.unreachable = FileNotFoundError("this logind has no system bus")
    async with run_delayed(tmp_path) as delayed:
        await trio.sleep(HOUR)
        (line,) = delayed.runtime.log_lines("shutdown.lock_missing")
        assert line["level"] == "info"
        assert 12 <= len(logind.connect_times) <= 48 + 10
        logind.unreachable = None
        await trio.sleep(301)
        assert len(logind.held) == 1


async def test_a_refusal_is_logged_once(
    tmp_path: Path, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A refusal by polkit is one warning, and the lock is taken once it is allowed."""
    logind.refusal = LogindUnreachable("Inhibit is refused: install polkit")
    async with run_delayed(tmp_path) as delayed:
        await trio.sleep(HOUR)
        (line,) = delayed.runtime.log_lines("shutdown.lock_missing")
        assert line["level"] == "warning"
        assert "install polkit" in line["reason"]
        assert all(connection.closed for connection in logind.connections)
        logind.refusal = None
        await trio.sleep(301)
        assert len(logind.held) == 1
        assert len(delayed.runtime.log_lines("shutdown.lock_held")) == 1
        # Taken and lost again: this is logged.
        logind.restart_bus()
        await delayed.runtime.wait_all_blocked()
        assert len(delayed.runtime.log_lines("shutdown.lock_missing")) == 2


@pytest.mark.parametrize(
    "error",
    [ValueError("no message"), IndexError(), ExceptionGroup("", [OSError(5, "x")]), ImportError()],
)
async def test_any_error_is_logged_and_retried(
    delayed: DelayedController, logind: ScriptedLogind, error: Exception, autojump_clock: MockClock
) -> None:
    """Any error of the connection to logind is logged with a reason, and retried."""
    logind.restart_bus(error)
    await delayed.runtime.wait_all_blocked()
    (line,) = delayed.runtime.log_lines("shutdown.lock_missing")
    assert line["reason"]
    await trio.sleep(1.1)
    assert len(logind.held) == 1


async def test_a_missed_announcement(
    tmp_path: Path, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A connection that is made during a shutdown pauses the dispatcher, and takes no lock."""
    logind.preparing = True
    async with run_delayed(tmp_path) as delayed:
        assert delayed.runtime.context.pause_reason == PAUSED
        assert delayed.runtime.log_lines("shutdown.announced", wait_s=0.0)
        assert logind.locks == []


async def test_a_pause_outlives_the_connection(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """The bus may end before the daemon does: the pause is kept."""
    logind.announce(preparing=True)
    await trio.sleep(PAUSE_TIMEOUT + 10)
    logind.unreachable = LogindUnreachable("refused")
    logind.restart_bus()
    delayed.runtime.enqueue("b")
    await trio.sleep(PAUSE_TIMEOUT - 10)
    assert delayed.runtime.context.pause_reason
    assert delayed.runtime.script.ran == []
    assert delayed.runtime.log_lines("shutdown.lock_missing") == []


async def test_an_unconfirmed_pause_is_lifted(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A pause that logind does not confirm for two minutes is lifted."""
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    logind.unreachable = LogindUnreachable("refused")
    logind.restart_bus()
    delayed.runtime.declare(thing("b"))
    await trio.sleep(PAUSE_TIMEOUT + 10)
    assert delayed.runtime.script.ran == ["b"]
    assert delayed.runtime.log_lines("shutdown.cancelled")


async def test_a_new_connection_learns_of_a_cancelled_shutdown(
    delayed: DelayedController, logind: ScriptedLogind, autojump_clock: MockClock
) -> None:
    """A shutdown that logind forgot when it restarted does not keep the daemon paused."""
    logind.announce(preparing=True)
    await delayed.runtime.wait_all_blocked()
    logind.restart_bus()
    logind.preparing = False
    delayed.runtime.declare(thing("b"))
    await trio.sleep(1.1)
    assert delayed.runtime.script.ran == ["b"]
    assert len(logind.held) == 1
