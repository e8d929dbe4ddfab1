"""One controller with its dispatcher, store and stop in this process, driven by a script.

``ScriptedReconciler.acts`` holds a coroutine function for each name; declare() and report() give
what the source reports. Nothing here sleeps: the test moves the clock.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.testing

from reconciled.api import Reconciler, Request, Result, done
from reconciled.config.load import load
from reconciled.config.model import Config
from reconciled.core.queue.states import Priority
from reconciled.core.resources import Key, Manifest, Origin, fingerprint_of
from reconciled.core.sources import Report, Snapshot, Unavailable
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.observe.logs import Logs, configure
from reconciled.plugins.loading import Plugin
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.loading import LoadedController
from reconciled.runtime.daemon.assembly import assemble
from reconciled.runtime.daemon.shutdown import Shutdown
from reconciled.runtime.decisions.approvals import RemovalApprovals
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.runtime.runs.program_adoption import ProgramAdoption
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop import Work

Act = Callable[[Any], Awaitable[Any]]
Line = dict[str, Any]

CONFIG = """
state: {state}
stop: {{drain: 10s, critical: 1m, cleanup: 5s}}
controllers:
  c:
    reconciler: exec
    watch: [{{directory: .}}]
    concurrency: {concurrency}
    timeout: {timeout}
    removals: {{share: 50%, above: 4}}
"""


@attrs.frozen
class Thing:
    """A spec; value distinguishes two of them."""

    value: int = 0


class ScriptedReconciler(Reconciler[Thing]):
    """Calls the function in acts for the name, otherwise does nothing; keeps each request."""

    kind = "Thing"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.acts: dict[str, Act] = {}
        self.requests: list[Any] = []

    async def reconcile(self, request: Request[Thing]) -> Result:
        self.requests.append(request)
        act = self.acts.get(request.name)
        if act is None:
            return done()
        result: Result = await act(request)
        return result

    @property
    def ran(self) -> list[str]:
        """The names of all runs, in order of their starts."""
        return [request.name for request in self.requests]


class RemovingReconciler(ScriptedReconciler):
    """A ScriptedReconciler that can remove; a removal is done at once by default."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.removals: list[Any] = []
        self.removal: Act | None = None

    async def remove(self, request: Request[Thing]) -> Result:
        self.removals.append(request)
        if self.removal is None:
            return done()
        result: Result = await self.removal(request)
        return result


@attrs.define(eq=False)
class ScriptedSource:
    """A watcher that reports what the test reports. Each start of its task takes one of starts."""

    name: str
    declares: bool = True
    starts: list[Act] = attrs.field(factory=list)
    began: list[float] = attrs.field(factory=list)

    async def watch(self, report: Callable[[Report], None]) -> None:
        self.began.append(trio.current_time())
        if self.starts:
            await self.starts.pop(0)(report)
        else:
            await trio.sleep_forever()


def thing(name: str, value: int = 0, **fields: Any) -> Manifest:
    """A manifest."""
    spec = {"value": value}
    fingerprint = fingerprint_of({"kind": "Thing", "spec": spec})
    return Manifest("Thing", name, spec, Origin("/m/x.yaml", 3, 1), fingerprint, **fields)


def key(name: str) -> Key:
    """The key of *name*."""
    return Key(f"c/{name}")


def lines_of(file: Path) -> list[Line]:
    """The lines of a log."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def logs_to(file: Path, level: str = "info") -> Logs:
    """Logs to *file*, with the virtual clock."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    try:
        return configure(
            "json", level, descriptor=descriptor, environment={}, clock=trio.current_time
        )
    finally:
        os.close(descriptor)  # the log has a duplicate


def plugin_of(script: ScriptedReconciler) -> Plugin:
    """A Plugin as if *script* had been loaded."""
    return Plugin("script", "1.0", "script.py", type(script), "Thing", Thing, None)


@attrs.define(eq=False)
class OneController:
    """The parts, with the calls and checks of tests."""

    context: RuntimeContext
    config: Config
    script: ScriptedReconciler
    controller: Controller
    sources: list[ScriptedSource]
    approvals: RemovalApprovals
    dispatcher: Dispatcher
    adoption: ProgramAdoption
    shutdown: Shutdown
    log_file: Path
    # Work that still ran at the end of a stop.
    stragglers: list[Work] = attrs.field(factory=list)

    def report(self, report: Report, source: int = 0) -> None:
        """Report *report* from a source."""
        self.controller.handle_report(self.sources[source], report)

    def declare(self, *manifests: Manifest, complete: bool = True, source: int = 0) -> None:
        """Report exactly *manifests* as declared."""
        self.report(Snapshot(manifests, complete=complete), source)

    def enqueue(
        self, *names: str, cause: str = "requested", priority: Priority = Priority.ASKED
    ) -> None:
        """Queue a run of each name, whatever its state."""
        for name in names:
            self.controller.lane.add(key(name), trio.current_time(), cause, priority)

    async def wait_all_blocked(self) -> None:
        """Wait until every task is blocked: nothing continues before time passes."""
        await trio.testing.wait_all_tasks_blocked()

    def log_lines(self, event: str, **fields: Any) -> list[Line]:
        """Log lines of *event* with these fields."""
        return [
            line
            for line in lines_of(self.log_file)
            if line["event"] == event and fields.items() <= line.items()
        ]

    def queue_state(self, name: str) -> str | None:
        """The state of the key in the queue; None: it has no entry."""
        for entry in self.controller.lane:
            if entry.key == key(name):
                return entry.key_state.value
        return None

    def failures(self, name: str) -> int:
        """Failed runs in a row, as the queue counts them."""
        return max((e.failures for e in self.controller.lane if e.key == key(name)), default=0)

    def references(self, name: str) -> list[str]:
        """Every structure that still contains the key (invariant 14)."""
        wanted = key(name)
        containers: dict[str, Iterable[Any]] = {
            f"controller.{field.name}": value
            for field in attrs.fields(Controller)
            if isinstance(value := getattr(self.controller, field.name), dict | set)
        }
        containers["desired.owned"] = self.controller.desired.owned
        containers["desired.removing"] = self.controller.desired._removing
        containers["desired.manifests"] = self.controller.manifests
        containers["lane"] = self.controller.lane._entries
        containers["loops"] = self.context.loops._histories
        containers["folder"] = self.context.logs._folder._of_key
        containers["store"] = self.context.store.all_keys()
        containers["operations"] = self.context.operations.journal._mirror._by_key
        containers["works"] = [work.key for work in self.context.stop.all_works()]
        found = [name for name, container in containers.items() if wanted in container]
        rest = wanted.replace("/", "~").removeprefix("c~")
        found += [
            f"{directory}/"
            for directory in ("output", "memory")
            if (self.context.state / directory / "c" / rest).exists()
        ]
        return found

    async def signal(self) -> None:
        """Request a stop, as the daemon does for a SIGTERM."""
        self.context.signals.stop_requested_at = 0.0
        self.shutdown.begin_stop("SIGTERM", signal.SIGTERM)


@asynccontextmanager
async def run_one_controller(
    tmp_path: Path,
    script: ScriptedReconciler,
    *,
    sources: Iterable[ScriptedSource] = (),
    concurrency: int = 16,
    longest: str = "2m",
    level: str = "info",
) -> AsyncIterator[OneController]:
    """Run a controller named c until the block ends."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = tmp_path / "r.yaml"
    file.write_text(CONFIG.format(state=state, concurrency=concurrency, timeout=longest))
    file.chmod(0o600)
    config = load(file, {}).config
    logs = logs_to(tmp_path / "log", level)
    async with trio.open_nursery() as services:
        store = Store.open(state)
        assembly = assemble(
            state=state,
            limits=config.stop,
            concurrency=config.limits.concurrency,
            logs=logs,
            signals=SignalHandlers(),
            store=store,
            journal=OperationJournal.load(store),
            services=services,
            rng=random.Random(1),
        )
        context = assembly.context
        await services.start(store.run)
        services.start_soon(assembly.approvals.serve_reports)
        plugin = plugin_of(script)
        built = assembly.build_controller(LoadedController(config.controllers["c"], plugin, script))
        watchers = list(sources) or [ScriptedSource("source 0")]
        names = [watcher.name for watcher in watchers if watcher.declares]
        controller = assembly.controllers["c"] = attrs.evolve(
            built,
            watchers=tuple(watchers),
            desired=attrs.evolve(built.desired, sources=names, owned=built.desired.owned),
        )
        runtime = OneController(
            context,
            config,
            script,
            controller,
            watchers,
            assembly.approvals,
            assembly.dispatcher,
            assembly.adoption,
            assembly.shutdown,
            tmp_path / "log",
        )
        services.start_soon(context.stop.run_stages, runtime.stragglers.extend)
        await services.start(_work, runtime)
        try:
            yield runtime
        finally:
            logs.close()
            services.cancel_scope.cancel(reason="the test is over")


async def _work(  # noqa: ASYNC114 - started below, in a nursery that encloses it
    runtime: OneController, *, task_status: trio.TaskStatus[None]
) -> None:
    with runtime.context.stop.scope:
        async with trio.open_nursery() as work:
            await work.start(runtime.adoption.supervise)
            await work.start(runtime.controller.supervise_runs)
            work.start_soon(runtime.controller.watch)
            work.start_soon(runtime.dispatcher.run)
            task_status.started()


def unavailable(reason: str = "it is missing") -> Unavailable:
    """A source that cannot be read."""
    return Unavailable(reason)
