"""The running daemon: one tree of nurseries, from the first task to the last.

    services                 outlive all work
    └── work                 Stop.scope
        ├── intake           Stop.intake
        ├── dispatcher
        └── reconciles

The order in which tasks start and end matters here. A comment marks each statement that must not
be reordered.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import attrs
import trio

from reconciled.core.errors import NoThread
from reconciled.core.recovery import resolve_commands
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Hold, OperationRecord
from reconciled.journal.sqlite.store import Store
from reconciled.journal.state_identity import ExaminedState, Origin
from reconciled.observe.logs import Logs
from reconciled.programs.orphan_reaper import OrphanReaper
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.loading import LoadedController, PreparedConfig
from reconciled.runtime.daemon.assembly import Assembly, assemble
from reconciled.runtime.daemon.commands import Commands
from reconciled.runtime.daemon.lost_operations import restore_lost
from reconciled.runtime.daemon.manager_integration import ManagerIntegration
from reconciled.runtime.daemon.operation_retention import OperationRetention
from reconciled.runtime.daemon.reload import Reloader, Swap, log_removed_controller
from reconciled.runtime.daemon.run_once import OnceProgress
from reconciled.runtime.daemon.shutdown import Shutdown
from reconciled.runtime.decisions.resolutions import Resolutions
from reconciled.runtime.host.status_line import SYNC_TIMEOUT
from reconciled.runtime.runs.completion import log_loop
from reconciled.runtime.runs.program_adoption import enqueue_open_operations
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop.last_resort import LastResort
from reconciled.threads import in_thread

# Everything but a cancellation ends the daemon with exit code 1.
CRASHES = (Exception, GeneratorExit, SystemExit, KeyboardInterrupt)
CHECK_INTERVAL = 5.0  # seconds; one periodic check costs microseconds
# Seconds. Until the loss of the state directory is noticed, a second daemon may work beside this.
STATE_INTERVAL = 1.0


@attrs.define(eq=False)
class Daemon:
    """One daemon. run() runs it from its first task to its last, inside trio."""

    path: Path
    environ: Mapping[str, str]
    prepared: PreparedConfig
    logs: Logs
    signals: SignalHandlers
    integration: ManagerIntegration
    store: Store
    journal: OperationJournal
    once: bool = False
    began: float = attrs.field(factory=time.monotonic)
    # See StateLock.lost().
    state_lost: Callable[[], str] = attrs.field(default=str, init=False)
    # None: the identity of the state directory is neither compared nor written.
    examined: ExaminedState | None = attrs.field(default=None, init=False)
    # Operations that a damaged store has lost; see find_lost().
    lost: list[OperationRecord] = attrs.field(factory=list, init=False)
    # None unless this is ``run --once``.
    once_progress: OnceProgress | None = attrs.field(default=None, init=False)
    assembly: Assembly = attrs.field(init=False)
    resolutions: Resolutions = attrs.field(init=False)
    reloader: Reloader = attrs.field(init=False)
    orphans: OrphanReaper = attrs.field(init=False)
    last_resort: LastResort = attrs.field(init=False)
    commands: Commands = attrs.field(init=False)
    _intake: trio.Nursery = attrs.field(init=False)
    _reconciles: trio.Nursery = attrs.field(init=False)

    @property
    def context(self) -> RuntimeContext:
        """The parts that everything shares."""
        return self.assembly.context

    @property
    def controllers(self) -> dict[str, Controller]:
        """The running controllers, by name."""
        return self.assembly.controllers

    @property
    def shutdown(self) -> Shutdown:
        """How the process ends."""
        return self.assembly.shutdown

    async def run(self) -> int:
        """Run until a stop has ended; the exit code."""
        try:
            async with trio.open_nursery() as services:
                self._assemble(services)
                await self._serve(services)
                # Before recovery, which a copy's operations must not reach.
                await self._settle_identity()
                await restore_lost(self.lost, self.journal, self.logs.log)
                await self._work()
                if not self.context.state_lost():
                    # A pending report of held removals is read by ``allow`` without a daemon.
                    await self.assembly.approvals.flush()
                # What waits for the store or the log has ended: nothing is cut off here.
                services.cancel_scope.cancel(reason="work has ended")
        except* CRASHES as group:
            self.shutdown.handle_crash(group)
        return self.shutdown.finish()

    # -- assembly ------------------------------------------------------------

    def _assemble(self, services: trio.Nursery) -> None:
        config = self.prepared.config
        # First: the shutdown in it reports every later fault.
        self.assembly = assemble(
            state=config.state,
            limits=config.stop,
            concurrency=config.limits.concurrency,
            logs=self.logs,
            signals=self.signals,
            store=self.store,
            journal=self.journal,
            services=services,
            rng=random.Random(),  # noqa: S311 - spreads load
        )
        self.context.state_lost = self.state_lost
        self.store.writer.state_lost = self.state_lost
        if self.once:
            # Before anything runs: the first keys end while later sources are still being read.
            self.once_progress = OnceProgress(self._end_once)
            self.context.on_outcome = self.once_progress.record_outcome
        self.resolutions = Resolutions(
            self.context, lambda: self.controllers, self.assembly.unattended
        )
        self.orphans = OrphanReaper(self.context.children, self.logs.log)
        self.reloader = Reloader(
            self.path,
            self.environ,
            self.logs.log,
            config,
            self._running,
            self._swap,
            self.integration.listeners,
        )
        self.last_resort = LastResort(
            self.context.stop,
            lambda: self.signals.stop_requested_at,
            lambda: self.integration.has_watchdog,
            self.shutdown.log_blocked,
            self.shutdown.exit_hung,
            self.logs.sink.fileno(),
        )
        self.commands = Commands(
            self.context, self.shutdown, self.reloader, self.orphans, self.last_resort
        )

    async def _serve(self, services: trio.Nursery) -> None:
        context = self.context
        # The store first: every other service may write. It also ends last, because it commits
        # the pending writes when it is cancelled.
        self.store.writer.on_writable_change = context.log_store_state
        await services.start(self.store.run, name="store writer")
        self._service("log", self.logs.serve)
        self._service("stop stages", context.stop.run_stages, self.shutdown.exit_leaving_work)
        self._service("orphan reaper", self.orphans.reap)
        self._service("reload", self.reloader.serve)
        self._service("resolutions", self.resolutions.serve)
        self._service("removal reports", self.assembly.approvals.serve_reports)
        self._service("operation retention", OperationRetention(context).serve)
        self._service("periodic checks", self._check_periodically)
        self._service("state directory", self._watch_state)
        self.integration.begin(self.assembly, self.commands, self._service)
        self.last_resort.begin()

    def _service(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """Start a service, whose crash stops the daemon in stages.

        If the nursery handled it, it would at once cancel the other services, which work needs.
        """

        async def serve() -> None:
            try:
                await function(*args)
            except* Exception as group:  # noqa: BLE001 - it is logged, and the exit code is 1
                self.shutdown.handle_crash(group)

        self.context.services.start_soon(serve, name=name)

    async def _check_periodically(self) -> None:
        """Take lost signal handlers back, and log loops that have ended. In the main thread."""
        while True:
            await trio.sleep(CHECK_INTERVAL)
            # A plugin's run may change the handlers of the whole process.
            if lost := self.signals.reclaim():
                reason = "code of a plugin had replaced the handlers: a stop would have been missed"
                self.logs.log.error("signals.restored", signals=lost, reason=reason)
            for notice in self.context.loops.expire_quiet(trio.current_time()):
                log_loop(self.context, notice)

    async def _settle_identity(self) -> None:
        """Hold the open operations of a copied state directory, then record its identity."""
        examined = self.examined
        if examined is None:
            return
        if examined.origin is Origin.COPY:
            reason = "the state directory is a copy, and its original may still run this operation"
            earlier = examined.earlier.id if examined.earlier else "unknown"
            evidence = f"it was begun in the state directory with id {earlier}"
            self.logs.log.warning("state.copied", reason=reason, id=examined.current.id)
            journal = self.context.operations.journal
            for record in journal.list_open():
                if record.hold is None:
                    await journal.hold(record.id, Hold(reason, "copied", evidence, time.time()))
                    self.logs.log.error(
                        "operation.held",
                        key=record.key,
                        operation=record.id,
                        name=record.name,
                        last_step=record.last_step or None,
                        reason=reason,
                        evidence=evidence,
                        commands=list(resolve_commands(record.id, can_undo=False)),
                    )
        try:
            await in_thread(examined.save)
        except (OSError, NoThread) as error:
            reason = f"its identity cannot be recorded, by which a copy is recognised: {error}"
            self.logs.log.warning("state.warning", reason=reason)

    async def _watch_state(self) -> None:
        """Stop everything once the state directory was deleted, moved or exchanged."""
        while True:
            self.shutdown.check_state()
            await trio.sleep(STATE_INTERVAL)

    async def _work(self) -> None:
        stop = self.context.stop
        with stop.scope:
            async with trio.open_nursery() as work:
                self._reconciles = await work.start(self._hold_reconciles, name="reconciles")
                self._intake = await work.start(self._hold_intake, name="intake")
                await self._reconciles.start(self.assembly.adoption.supervise, name="adopted")
                # Recovery follows decisions that were made while the daemon was down.
                await self.resolutions.wait_first_scan()
                # Before the first controller: what runs later is of this daemon's own runs.
                self.assembly.adoption.adopt_survivors()
                self._configure_unattended(self.prepared)
                for loaded in self.prepared.ready:
                    if stop.began.is_set():
                        break  # a service has crashed: the nurseries for it are closing
                    await self._start(loaded)
                for stalled in self.prepared.stalled:
                    self._log_stalled(stalled.config.name, stalled.reason)
                self.assembly.unattended.hold_all()
                # Not before: an approval for a controller that does not run yet would be lost.
                self._service("removal approvals", self.assembly.approvals.serve)
                work.start_soon(stop.guard, self.assembly.dispatcher.run, name="dispatcher")
                # From here on a stop has stages: before, nothing had started that it could cut.
                self.commands.start()
                # In the intake: a stop must not wait for a source that has not reported yet.
                self._intake.start_soon(stop.guard, self._wait_synced, name="wait for sources")

    async def _hold_reconciles(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        async with trio.open_nursery() as nursery:
            task_status.started(nursery)
            await self.context.stop.began.wait()

    async def _hold_intake(self, *, task_status: trio.TaskStatus[trio.Nursery]) -> None:
        with self.context.stop.intake:
            async with trio.open_nursery() as nursery:
                task_status.started(nursery)
                await trio.sleep_forever()

    async def _start(self, loaded: LoadedController) -> None:
        controller = self.assembly.build_controller(loaded)
        if self.once:
            controller.watchers = tuple(each for each in controller.watchers if each.declares)
        name = controller.name
        await self._reconciles.start(controller.supervise_runs, name=f"reconciles of {name}")
        self.controllers[name] = controller
        if self.context.stop.began.is_set():
            return  # a stop began meanwhile: the intake is closing
        # Before the first report: it decides what is held, and recovery precedes all other work.
        await self.assembly.approvals.inbox.scan(name)
        held = await self.assembly.approvals.last_held(name)
        if self.context.stop.began.is_set():
            return
        if held is not None:
            controller.desired.guard.restore(held)
        enqueue_open_operations(controller, trio.current_time())
        self._intake.start_soon(self.context.stop.guard, controller.watch, name=f"intake of {name}")
        for warning in loaded.plugin.warnings:
            self.logs.log.warning("plugin.warning", plugin=loaded.plugin.name, reason=warning)

    def _configure_unattended(self, prepared: PreparedConfig) -> None:
        self.assembly.unattended.configure(
            frozenset(loaded.config.name for loaded in prepared.ready),
            {stalled.config.name: stalled.reason for stalled in prepared.stalled},
        )

    def _log_stalled(self, controller: str, reason: str) -> None:
        self.logs.log.error("controller.stalled", controller=controller, reason=reason)

    async def _wait_synced(self) -> None:
        """Wait until every source has reported, at most SYNC_TIMEOUT; then the daemon is ready."""
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
        self.integration.notify_ready()
        if self.once_progress is not None:
            for stalled in self.prepared.stalled:
                self.once_progress.record_stalled(stalled.config.name, stalled.reason)
            self.once_progress.begin(controllers)

    def _end_once(self) -> None:
        self.commands.stop("run --once: every key has an outcome")

    # -- reload --------------------------------------------------------------

    def _running(self) -> dict[str, LoadedController]:
        return {
            name: LoadedController(each.config, each.plugin, each.reconciler)
            for name, each in self.controllers.items()
        }

    async def _swap(self, swap: Swap) -> bool:
        # An approval reaches the old controller or its successor, never the gap between them.
        async with self.assembly.approvals.inbox.lock:
            return await self._swap_controllers(swap)

    async def _swap_controllers(self, swap: Swap) -> bool:
        if self.context.stopping:
            self.commands.log_reload_refused()
            return False
        config = swap.prepared.config
        self.logs.set_level(config.log.level)
        self.context.queue.limit = config.limits.concurrency
        for stop in self.context.stop.iter_tree():
            stop.limits = config.stop
        self.integration.handle_reloaded()
        self._configure_unattended(swap.prepared)
        for name in sorted(set(self.controllers) - swap.kept):
            self._retire(self.controllers.pop(name))
            # With its backoffs and outcomes: after a restart they would be unknown, too (C13).
            self.context.queue.drop_lane(name)
        for name in sorted(swap.removed):
            log_removed_controller(self.logs.log, self.store, name)
        for stalled in swap.prepared.stalled:
            self._log_stalled(stalled.config.name, stalled.reason)
        for loaded in swap.started:
            if self.context.stop.began.is_set():
                break  # the nurseries for it are closing
            await self._start(loaded)
        self.assembly.unattended.hold_all()
        return True

    def _retire(self, controller: Controller) -> None:
        self.assembly.unattended.retire(controller)
        controller.stop.begin("reload")
        name = f"stop of controller {controller.name}"
        self.context.start_background(name, self._end_retired, controller)

    async def _end_retired(self, controller: Controller) -> None:
        """Take a replaced controller through its stop; returns when its last run has ended."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(controller.stop.run_stages, controller.log_stuck, name="stages")
            await controller.ended.wait()
            nursery.cancel_scope.cancel(reason="the controller has ended")
        self.assembly.unattended.ended(controller)
