"""The running daemon: one tree of nurseries, from the first task to the last.

    services                 outlive all work
    └── work                 Stop.scope
        ├── intake           Stop.intake
        ├── dispatcher
        └── reconciles

Everything here is about order: what starts before what, and what outlives what. A comment
stands at each place that would break when reordered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import attrs
import trio

from reconciled.core.loop_detector import LoopDetector
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.resources import Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.observe.logs import Logs
from reconciled.programs.children import current_children
from reconciled.programs.orphans import OrphanReaper
from reconciled.runtime.adoption_registry import AdoptionRegistry
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.factory import build
from reconciled.runtime.controllers.loading import LoadedController, PreparedConfig
from reconciled.runtime.daemon.commands import Commands
from reconciled.runtime.daemon.integrations import Integrations
from reconciled.runtime.daemon.maintenance import run_maintenance
from reconciled.runtime.daemon.reload import Reloader, Swap, log_removed_controller
from reconciled.runtime.daemon.retention import Retention
from reconciled.runtime.daemon.run_once import OnceProgress
from reconciled.runtime.daemon.shutdown import Shutdown
from reconciled.runtime.decisions.removals import RemovalApprovals
from reconciled.runtime.decisions.resolutions import Resolutions
from reconciled.runtime.host.status_line import SYNC_TIMEOUT
from reconciled.runtime.operations.operation import Operations
from reconciled.runtime.runs.adoption import enqueue_open_operations
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.runtime.stop_recorder import StopRecorder
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop import Stop
from reconciled.stop.last_resort import LastResort


@attrs.define(eq=False)
class Daemon:
    """One daemon; run() is its whole life inside trio, and gives the exit code."""

    path: Path
    environ: Mapping[str, str]
    prepared: PreparedConfig
    logs: Logs
    signals: SignalHandlers
    integrations: Integrations
    store: Store
    journal: OperationJournal
    once: bool = False
    began: float = attrs.field(factory=time.monotonic)
    controllers: dict[str, Controller] = attrs.field(factory=dict, init=False)
    context: RuntimeContext = attrs.field(init=False)
    dispatcher: Dispatcher = attrs.field(init=False)
    approvals: RemovalApprovals = attrs.field(init=False)
    resolutions: Resolutions = attrs.field(init=False)
    reloader: Reloader = attrs.field(init=False)
    orphans: OrphanReaper = attrs.field(init=False)
    shutdown: Shutdown = attrs.field(init=False)
    last_resort: LastResort = attrs.field(init=False)
    commands: Commands = attrs.field(init=False)
    once_progress: OnceProgress | None = attrs.field(default=None, init=False)
    _intake: trio.Nursery = attrs.field(init=False)
    _reconciles: trio.Nursery = attrs.field(init=False)

    async def run(self) -> int:
        """Run until a stop has ended; the exit code."""
        try:
            async with trio.open_nursery() as services:
                self._assemble(services)
                await self.approvals.prepare()
                await self.resolutions.prepare()
                await self._serve(services)
                await self._work()
                await self.approvals.flush()  # ``allow`` reads it without a daemon
                # Whoever waits for the store or the log has ended: nothing is cut off here.
                services.cancel_scope.cancel(reason="work has ended")
        except* (Exception, GeneratorExit, SystemExit, KeyboardInterrupt) as group:
            self.logs.log.critical("daemon.crashed", exc_info=group)
            self.shutdown.crashed = True
        return self.shutdown.finish()

    # -- assembly ------------------------------------------------------------

    def _assemble(self, services: trio.Nursery) -> None:
        config = self.prepared.config
        stop = Stop("daemon", config.stop)
        stop.install()
        children = current_children()
        self.context = RuntimeContext(
            config.state,
            self.logs,
            self.signals,
            stop,
            WorkQueue(config.limits.concurrency, random.Random()),  # noqa: S311 - spreads load
            self.store,
            Operations(self.journal, config.state / "operations"),
            AdoptionRegistry(),
            children,
            LoopDetector(),
            StopRecorder(stop),
            services,
        )
        self.shutdown = Shutdown(self.context)  # first: it is what a fault of the rest is told by
        if self.once:
            # Before anything runs: the first keys end while later sources are still being read.
            self.once_progress = OnceProgress(self._end_once)
            self.context.on_outcome = self.once_progress.record_outcome
        self.approvals = RemovalApprovals(config.state, self.logs.log, self._approve_removals)
        self.resolutions = Resolutions(self.context, lambda: self.controllers)
        self.dispatcher = Dispatcher(self.context, lambda: self.controllers)
        self.orphans = OrphanReaper(children, self.logs.log)
        self.reloader = Reloader(
            self.path,
            self.environ,
            self.logs.log,
            config,
            self._running,
            self._swap,
            self.integrations.listeners,
        )
        self.last_resort = LastResort(
            stop,
            lambda: self.signals.stop_requested_at,
            lambda: self.integrations.has_watchdog,
            self.shutdown.log_blocked,
            self.shutdown.exit_hung,
            self.logs.sink.fileno(),
        )
        self.commands = Commands(
            self.context,
            self.dispatcher,
            self.shutdown,
            self.reloader,
            self.orphans,
            self.last_resort,
        )

    async def _serve(self, services: trio.Nursery) -> None:
        host = self.context
        # The store first: everything else may write. It is the last to end as well, since it
        # commits what still waits when it is cancelled.
        self.store.writer.on_writable_change = host.log_store_state
        await services.start(self.store.run, name="store writer")
        self._service("log", self.logs.serve)
        self._service("stop stages", host.stop.run_stages, self.shutdown.exit_leaving_work)
        self._service("orphan reaper", self.orphans.reap)
        self._service("reload", self.reloader.serve)
        self._service("resolutions", self.resolutions.serve)
        self._service("removal reports", self.approvals.serve_reports)
        self._service("housekeeping", Retention(host).serve)
        self._service("keeper", run_maintenance, self.context)
        self.integrations.begin(host, self.commands, self._service)
        self.last_resort.begin()

    def _service(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """Start a service, whose crash stops the daemon in stages.

        Left to the nursery it would cancel the other services at once, which work still needs.
        """

        async def serve() -> None:
            try:
                await function(*args)
            except* Exception as group:  # noqa: BLE001 - told, and the code is 1
                self._crashed(group)

        self.context.services.start_soon(serve, name=name)

    def _crashed(self, error: BaseException) -> None:
        self.logs.log.critical("daemon.crashed", exc_info=error)
        self.shutdown.crashed = True
        self.context.stop.crash(f"crash: {error!r}")

    async def _work(self) -> None:
        stop = self.context.stop
        with stop.scope:
            async with trio.open_nursery() as work:
                self._reconciles = await work.start(self._hold_reconciles, name="reconciles")
                self._intake = await work.start(self._hold_intake, name="intake")
                # What people decided meanwhile is what recovery goes by.
                await self.resolutions.wait_first_scan()
                for ready in self.prepared.ready:
                    if stop.began.is_set():
                        break  # a service has crashed: the nurseries for it are closing
                    await self._start(ready)
                for stalled in self.prepared.stalled:
                    self._log_stalled(stalled.config.name, stalled.reason)
                # Not before: an approval for a controller that is not there yet would be lost.
                self._service("removal approvals", self.approvals.serve)
                work.start_soon(stop.guard, self.dispatcher.run, name="dispatcher")
                # From here on a stop has stages: before, nothing had begun that could be cut.
                self.commands.start()
                # In the intake: a stop has nothing to wait for where a source has yet to answer.
                self._intake.start_soon(stop.guard, self._wait_synced, name="survey")

    async def _hold_reconciles(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await self.context.stop.began.wait()

    async def _hold_intake(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        with self.context.stop.intake:
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await trio.sleep_forever()

    async def _start(self, ready: LoadedController) -> None:
        controller = build(ready, self.context, self.context.stop, self.approvals)
        if self.once:
            controller.watchers = tuple(each for each in controller.watchers if each.declares)
        name = controller.name
        await self._reconciles.start(controller.supervise_runs, name=f"reconciles of {name}")
        self.controllers[name] = controller
        if self.context.stop.began.is_set():
            return  # meanwhile: the intake is closing
        # Before the first report: it decides what is held, and recovery comes first of all.
        await self.approvals.inbox.scan(name)
        if self.context.stop.began.is_set():
            return
        enqueue_open_operations(controller, trio.current_time())
        self._intake.start_soon(self.context.stop.guard, controller.watch, name=f"intake of {name}")
        for warning in ready.plugin.warnings:
            self.logs.log.warning("plugin.warning", plugin=ready.plugin.name, reason=warning)

    def _log_stalled(self, controller: str, reason: str) -> None:
        self.logs.log.error("controller.stalled", controller=controller, reason=reason)

    async def _wait_synced(self) -> None:
        """Wait until every source has said something, and say that the daemon is ready."""
        controllers = list(self.controllers.values())
        with trio.move_on_after(SYNC_TIMEOUT):
            for controller in controllers:
                await controller.synced.wait()
        self.logs.log.info(
            "daemon.ready",
            controllers=len(controllers),
            keys=sum(len(controller.manifests) for controller in controllers),
            duration_s=round(time.monotonic() - self.began, 3),
        )
        self.context.ready = True
        self.integrations.notify_ready()
        if self.once_progress is not None:
            for stalled in self.prepared.stalled:
                self.once_progress.stalled(stalled.config.name, stalled.reason)
            self.once_progress.begin(controllers)

    # -- reload and permits ----------------------------------------------------

    def _end_once(self) -> None:
        self.commands.stop("every key has had its turn")

    def _running(self) -> dict[str, LoadedController]:
        return {
            name: LoadedController(each.config, each.plugin, each.reconciler)
            for name, each in self.controllers.items()
        }

    async def _swap(self, swap: Swap) -> bool:
        # An approval reaches the old controller or its successor, never the gap between them.
        async with self.approvals.inbox.lock:
            return await self._swap_controllers(swap)

    async def _swap_controllers(self, swap: Swap) -> bool:
        if self.context.stopping:
            self.commands.reload()  # refused, and told
            return False
        config = swap.prepared.config
        self.logs.set_level(config.log.level)
        self.context.queue.limit = config.limits.concurrency
        for stop in self.context.stop.iter_tree():
            stop.limits = config.stop
        self.integrations.handle_reloaded()
        gone = set(self.controllers) - swap.kept
        for name in sorted(gone):
            self._retire(self.controllers.pop(name))
            # Backoffs and verdicts too: after a restart nobody would know of them (C13).
            self.context.queue.drop_lane(name)
        for name in sorted(swap.removed):
            log_removed_controller(self.logs.log, self.store, name)
        for stalled in swap.prepared.stalled:
            self._log_stalled(stalled.config.name, stalled.reason)
        for ready in swap.started:
            if self.context.stop.began.is_set():
                break  # the nurseries for it are closing
            await self._start(ready)
        return True

    def _retire(self, controller: Controller) -> None:
        controller.stop.begin("reload")
        self.context.start_background(f"stop of controller {controller.name}", _retire, controller)

    def _approve_removals(self, controller: str, keys: frozenset[Key]) -> None:
        running = self.controllers.get(controller)
        if running is None:
            reason = "there is no such controller"
            self.logs.log.warning("removals.bad_approval", controller=controller, reason=reason)
        else:
            running.approve_removals(keys)


async def _retire(controller: Controller) -> None:
    """Take an old controller through its stop; over when its last run has ended."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(controller.stop.run_stages, controller.log_stuck, name="stages")
        await controller.ended.wait()
        nursery.cancel_scope.cancel(reason="the controller has ended")
