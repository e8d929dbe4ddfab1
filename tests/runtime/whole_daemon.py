"""A whole daemon in this process: real configuration and plugin files, scripted sources.

``WholeDaemon.acts`` holds what each key (``controller/name``) does, ``WholeDaemon.declared`` what
the source of each controller declares. The last resort is left out, because it ends processes.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from one_controller import Act, Line, ScriptedSource, lines_of, logs_to

from reconciled.api import done
from reconciled.config.load import load
from reconciled.core.resources import Manifest
from reconciled.core.sources import Report, Snapshot
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.runtime.controllers import factory
from reconciled.runtime.controllers.loading import LoadedController, prepare
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.daemon.manager_integration import ManagerIntegration
from reconciled.signal_handlers import SignalHandlers

PLUGIN = """
import attrs
from whole_daemon import WholeDaemon
from reconciled.api import Reconciler

@attrs.frozen
class Thing:
    value: int = 0

class ThingReconciler(Reconciler[Thing]):
    async def reconcile(self, request):
        return await WholeDaemon.now.reconcile(self, request)

class Removing(ThingReconciler):
    async def remove(self, request):
        return await WholeDaemon.now.remove(self, request)
"""
CONFIG = """
state: {state}
log: {{level: {level}}}
limits: {{concurrency: {limit}}}
stop: {stop}
plugins: {{directories: [plugins]}}
controllers:
{controllers}
"""
STOP = "{drain: 10s, critical: 1m, cleanup: 5s}"


class NoLastResort:
    """In place of the thread that ends a hung process."""

    def __init__(self, *_: Any) -> None:
        self.armed = 0

    def begin(self) -> None:
        """Starts no thread."""

    def arm(self) -> None:
        self.armed += 1

    def wake(self) -> None:
        """There is no thread to wake."""


class ScriptedSignals(SignalHandlers):
    """Signals sent by the test: the handlers of this process are not replaced."""

    def install(self) -> None:
        """Replaces no handler."""

    def reclaim(self) -> list[str]:
        """No handler was replaced."""
        return []


@attrs.define(eq=False)
class WholeDaemon:
    """The directory of a daemon, with scripted sources and reconcilers."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    acts: dict[str, Act] = attrs.field(factory=dict)
    declared: dict[str, Iterable[Manifest]] = attrs.field(factory=dict)
    # Controllers that have a timer beside their source.
    timers: set[str] = attrs.field(factory=set)
    # What each start of a controller's source does instead of declaring.
    source_runs: dict[str, list[Act]] = attrs.field(factory=dict)
    sources: dict[str, list[ScriptedSource]] = attrs.field(factory=dict)
    ran: list[str] = attrs.field(factory=list)
    removed: list[str] = attrs.field(factory=list)
    active: set[str] = attrs.field(factory=set)
    # The connections of the next daemon; it listens only if listening is set.
    integrations: ManagerIntegration = attrs.field(
        factory=lambda: ManagerIntegration.from_environ({})
    )
    listening: bool = False
    daemon: Daemon = attrs.field(init=False)
    exit_code: int | None = attrs.field(default=None, init=False)
    once_exit_code: int | None = attrs.field(default=None, init=False)
    ended_at: float = attrs.field(default=0.0, init=False)

    now: Any = None  # the instance of the present test, for its plugin files

    def __attrs_post_init__(self) -> None:
        self.monkeypatch.setattr(WholeDaemon, "now", self, raising=False)
        self.monkeypatch.setattr("reconciled.runtime.daemon.daemon.LastResort", NoLastResort)
        self.monkeypatch.setattr(factory, "build_watchers", self.build_watchers)
        (self.root / "plugins").mkdir(mode=0o755)
        self.state.mkdir(mode=0o700)
        self.plugin("mine", PLUGIN)

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def config(self) -> Path:
        return self.root / "r.yaml"

    def plugin(self, name: str, source: str) -> None:
        """Write the plugin file *name*."""
        file = self.root / "plugins" / f"{name}.py"
        file.write_text(source)
        file.chmod(0o644)

    def configure(
        self,
        *lines: str,
        state: Path | None = None,
        level: str = "info",
        limit: int = 16,
        stop: str = STOP,
    ) -> None:
        """Write the configuration with these controllers, each ``name`` or ``name: {…}``."""
        controllers = [
            line if ":" in line else f"{line}: {{reconciler: 'mine:ThingReconciler'}}"
            for line in lines
        ]
        text = "\n".join(
            f"  {line[:-1]}, watch: [{{directory: {line.partition(':')[0]}}}]}}"
            for line in controllers
        )
        self.config.write_text(
            CONFIG.format(
                state=state or self.state, level=level, limit=limit, stop=stop, controllers=text
            )
        )
        self.config.chmod(0o600)

    def build_watchers(self, ready: LoadedController, *_: Any) -> Iterable[ScriptedSource]:
        """In place of loading.build_watchers: one scripted source."""
        name = ready.config.name

        async def declare(report: Callable[[Report], None]) -> None:
            report(Snapshot(tuple(self.declared.get(name, ())), complete=True))
            await trio.sleep_forever()

        source = ScriptedSource(f"source of {name}", starts=self.source_runs.pop(name, [declare]))
        self.sources.setdefault(name, []).append(source)
        return (
            [source, ScriptedSource("every 10m", declares=False)]
            if name in self.timers
            else [source]
        )

    async def reconcile(self, _: Any, request: Any) -> Any:
        """A run, by the function in acts."""
        assert request.key not in self.active, "one key ran twice at once"
        self.ran.append(request.key)
        self.active.add(request.key)
        try:
            act = self.acts.get(request.key)
            return done() if act is None else await act(request)
        finally:
            self.active.discard(request.key)

    async def remove(self, _: Any, request: Any) -> Any:
        """A removal, always done."""
        self.removed.append(request.key)
        return done()

    def declare(self, controller: str, *manifests: Manifest) -> None:
        """Declare exactly *manifests* from now on."""
        self.declared[controller] = manifests
        running = self.daemon.controllers[controller]
        running.handle_report(running.watchers[0], Snapshot(manifests, complete=True))

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Call the handler, as the interpreter does for a signal."""
        handler = self.daemon.signals._on_other
        if number in (signal.SIGTERM, signal.SIGINT):
            handler = self.daemon.signals._on_stop
        handler(number, None)

    async def wait_all_blocked(self) -> None:
        """Wait until every task is blocked: nothing continues before time passes."""
        await trio.testing.wait_all_tasks_blocked()

    async def reload(self) -> None:
        """Send SIGHUP, and wait until every task is blocked."""
        self.signal(signal.SIGHUP)
        await self.wait_all_blocked()

    def log_lines(self, event: str, **fields: Any) -> list[Line]:
        """Log lines of *event* with these fields."""
        return [
            line
            for line in lines_of(self.root / "log")
            if line["event"] == event and fields.items() <= line.items()
        ]

    @asynccontextmanager
    async def running(self, *, once: bool = False) -> AsyncIterator[Daemon]:
        """Run a daemon; when the block ends, stop it and wait for its end."""
        loaded = load(self.config, {})
        logs = logs_to(self.root / "log", loaded.config.log.level)
        store = Store.open(self.state)
        if self.listening:
            self.integrations.open(loaded.config, logs.log)
        self.daemon = Daemon(
            self.config,
            {},
            prepare(loaded.config),
            logs,
            ScriptedSignals(),
            self.integrations,
            store,
            OperationJournal.load(store),
            once=once,
        )
        self.exit_code = None
        async with trio.open_nursery() as nursery:
            ended = trio.Event()

            async def live() -> None:
                self.exit_code = await self.daemon.run()
                self.ended_at = trio.current_time()
                ended.set()

            nursery.start_soon(live, name="daemon")
            await self.wait_all_blocked()
            yield self.daemon
            if not ended.is_set() and self.daemon.signals.stop_requested_at is None:
                self.signal()
            await ended.wait()
            if self.daemon.once_progress is not None:
                self.once_exit_code = self.daemon.once_progress.log_result(logs.log)
        store.close()  # a daemon that crashed before its services started has not done so
        self.integrations.close()
        logs.close()
