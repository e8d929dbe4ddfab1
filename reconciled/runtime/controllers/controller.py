"""One controller of the running daemon: its watchers, its desired state, and its runs.

A reload makes a new Controller beside the old one, which ends by its own staged stop; both
share the queue's lane, so that no key ever runs twice at once (invariant 1).

1. A bad manifest, key or watcher affects itself alone, and is logged (invariant 12).
2. The state of a key is freed with the key (invariant 14).
3. Only DesiredState decides on removals; a removal ends before its key is applied again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import trio

from reconciled.api import Reconciler
from reconciled.config.model import ControllerConfig
from reconciled.core.desired_state import Changes, DesiredState
from reconciled.core.problems import Problem
from reconciled.core.queue.lane import Lane
from reconciled.core.queue.states import Priority
from reconciled.core.resources import Fingerprint, Key, Manifest
from reconciled.core.sources import Report, Snapshot, Tick, Unavailable, Watcher
from reconciled.observe.task_tree import frames_of
from reconciled.plugins.loading import Plugin
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.status import Status
from reconciled.runtime.decisions.approvals import RemovalApprovals
from reconciled.runtime.plugin_errors import cancellation_in, failure_of
from reconciled.stop import Stop, Work

# A watcher that fails is started again, later each time.
WATCHER_BACKOFF_INITIAL = 1.0
WATCHER_BACKOFF_MAX = 60.0
# A change of a key's spec so soon after its own run, in seconds, may be an effect of that run.
SELF_TRIGGER_WINDOW = 1.0
# So many of them in a row are still treated as changes by a person.
SELF_TRIGGER_LIMIT = 3


@attrs.define(eq=False)
class Controller:
    """Made by ``build_controller``. Its tasks are watch(), supervise_runs(), and the runs."""

    config: ControllerConfig
    plugin: Plugin
    reconciler: Reconciler[Any]
    watchers: tuple[Watcher, ...]
    desired: DesiredState
    lane: Lane
    stop: Stop
    context: RuntimeContext
    approvals: RemovalApprovals
    # The nursery of the runs; None before and after supervise_runs().
    nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Set when each declaring source has reported, even as unavailable.
    synced: trio.Event = attrs.field(factory=trio.Event, init=False)
    statuses: dict[Key, Status] = attrs.field(factory=dict, init=False)
    # Of the specs whose secrets are registered with the redactor.
    _registered: dict[Key, Fingerprint] = attrs.field(factory=dict, init=False)
    # The last manifests of keys that are owned and not declared any more.
    absent: dict[Key, Manifest] = attrs.field(factory=dict, init=False)
    # Keys whose removal is due, until it has ended.
    removing: set[Key] = attrs.field(factory=set, init=False)
    # Changes in a row that may be effects of the key's own runs.
    self_triggers: dict[Key, int] = attrs.field(factory=dict, init=False)
    # Causes of ticks, from the configured schedule.
    _ticks: set[str] = attrs.field(factory=set, init=False)
    _silent: set[str] = attrs.field(init=False)
    _problems: frozenset[Problem] = attrs.field(default=frozenset(), init=False)

    def __attrs_post_init__(self) -> None:
        self._silent = {watcher.name for watcher in self.watchers if watcher.declares}
        if not self._silent:
            self.synced.set()

    def __repr__(self) -> str:
        return f"<Controller {self.name}: {self.stop.stage.name}, {len(self.manifests)} keys>"

    @property
    def name(self) -> str:
        """As configured."""
        return self.config.name

    @property
    def manifests(self) -> Mapping[Key, Manifest]:
        """The desired manifests, by key."""
        return self.desired.manifests

    # -- tasks ---------------------------------------------------------------

    async def supervise_runs(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Hold the nursery of the runs until a stop has begun and the last run has ended."""
        try:
            with self.stop.scope:
                async with trio.open_nursery() as nursery:
                    self.nursery = nursery
                    task_status.started()
                    await self.stop.began.wait()
        finally:
            self.stop.detach()
            self.ended.set()

    async def watch(self) -> None:
        """Run the watchers until a stop, which cancels them first, all at once."""
        with self.stop.intake:
            async with trio.open_nursery() as nursery:
                for watcher in self.watchers:
                    name = f"watch {self.name}: {watcher.name}"
                    nursery.start_soon(self._supervise, watcher, name=name)

    async def _supervise(self, watcher: Watcher) -> None:
        backoff = WATCHER_BACKOFF_INITIAL
        report = partial(self.handle_report, watcher)
        while True:
            began = trio.current_time()
            reason = "watch() returned"
            try:
                await watcher.watch(report)
            except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for one
                failure = failure_of(error)
                if failure is None:
                    raise
                if (cancelled := cancellation_in(error)) is not None:
                    raise cancelled from None  # noqa: ASYNC104 - the cancellation itself
                reason = failure.result.reason
            if watcher.declares:
                self.handle_report(watcher, Unavailable(f"its watcher failed: {reason}"))
            # A watcher that ran for long enough starts again with the shortest backoff.
            backoff = (
                WATCHER_BACKOFF_INITIAL
                if trio.current_time() - began > WATCHER_BACKOFF_MAX
                else backoff
            )
            self.context.log.error(
                "source.failed",
                controller=self.name,
                source=watcher.name,
                reason=reason,
                retry_in_s=backoff,
            )
            await trio.sleep(backoff)
            backoff = min(2 * backoff, WATCHER_BACKOFF_MAX)

    # -- reports of sources -------------------------------------------------

    def handle_report(self, watcher: Watcher, report: Report) -> None:
        """Apply a report of *watcher*; ignored after the instant of a stop."""
        if self.context.stopping or self.stop.began.is_set():
            return
        now = trio.current_time()
        if isinstance(report, Tick):
            self._ticks.add(report.cause)
            for key in self.manifests:
                self.lane.add(key, now, report.cause, Priority.RESYNC)
            return
        before = self.manifests
        was = self.desired.states[watcher.name]
        changes = self.desired.apply(watcher.name, report, now)
        self._log_source(watcher, report, first=watcher.name in self._silent, was=was.complete)
        self._log_problems(report, changes)
        self._apply(changes, before, now)
        if isinstance(report, Snapshot) and report.identity:
            self._record_identity(watcher.name, report.identity)
        self._silent.discard(watcher.name)
        if not self._silent:
            self.synced.set()

    def approve_removals(self, keys: frozenset[Key]) -> None:
        """Release the held removals of exactly *keys*, which a person has approved, once."""
        before = self.manifests
        self._apply(self.desired.approve(keys, trio.current_time()), before, trio.current_time())

    def _apply(self, changes: Changes, before: Mapping[Key, Manifest], now: float) -> None:
        for key in before.keys() - self.manifests.keys():
            self.absent[key] = before[key]
        for key in (*changes.added, *changes.changed):
            self.absent.pop(key, None)
            manifest = self.manifests[key]
            known = self.context.store.fingerprint(key) == manifest.fingerprint
            cause = "changed" if key in before else "start" if known else "declared"
            # A change back to the applied spec, from one that failed, is an ordinary change.
            not_urgent = (
                self._record_self_trigger(key, now)
                if key in before
                else known and key not in self.statuses
            )
            self.lane.add(key, now, cause, Priority.RESYNC if not_urgent else Priority.CHANGED)
        for key in changes.removed:
            self.removing.add(key)
            self.lane.add(key, now, "removed", Priority.CHANGED)
            self._stop_run_of(key, "its manifest was removed")
        if changes.held is not None or self.desired.complete:
            self.approvals.report_held(self.name, changes.held)

    def _record_self_trigger(self, key: Key, now: float) -> bool:
        """Count a change that came with the key's own run; whether it is self-triggered.

        A reconciler that writes its own manifest must not end its own backoff. A person who edits
        the manifest during a run must end it, so that the first few changes count as a person's.
        """
        status = self.statuses.get(key)
        running = key in self.context.adopting or any(w.key == key for w in self.stop.works)
        if not running and (status is None or now - status.ended > SELF_TRIGGER_WINDOW):
            self.self_triggers.pop(key, None)
            return False
        self.self_triggers[key] = self.self_triggers.get(key, 0) + 1
        return self.is_self_triggered(key)

    def is_self_triggered(self, key: Key) -> bool:
        """Whether the changes of *key* count as effects of its own runs."""
        return self.self_triggers.get(key, 0) > SELF_TRIGGER_LIMIT

    def _stop_run_of(self, key: Key, reason: str) -> None:
        """Stop the run of one key: it drains, is cancelled, and its critical part may finish."""
        for work in self.stop.works:
            if work.key == key:
                stop = self.stop.nest(work, self.stop.limits)
                self.context.start_background(f"stop of {work.name}", self._end_run, stop, reason)
                return

    async def _end_run(self, stop: Stop, reason: str) -> None:
        with trio.CancelScope() as over:
            stop.on_empty = partial(over.cancel, reason="the run has ended")
            stop.begin(reason)
            await stop.run_stages(self.log_stuck)

    def log_stuck(self, works: list[Work]) -> None:
        """Log the runs that continue after their cancellation and cleanup."""
        for work in works:
            where = frames_of(work.task)
            reason = "it ignores its cancellation"
            self.context.log.error("reconcile.stuck", key=work.key, reason=reason, where=where)

    def _record_identity(self, source: str, identity: str) -> None:
        if self.context.store.source_identity(self.name, source) != identity:
            write = self.context.store.set_source_identity
            self.context.start_background("source identity", write, self.name, source, identity)

    def _log_source(
        self, watcher: Watcher, report: Snapshot | Unavailable, *, first: bool, was: bool
    ) -> None:
        log = self.context.log.bind(controller=self.name, source=watcher.name)
        subject = f"{self.name}: {watcher.name}"
        if isinstance(report, Unavailable):
            log.warning("source.unavailable", reason=report.reason)
        elif not report.complete:
            log.warning(
                "source.incomplete",
                problems=len(report.problems),
                reason="nothing is removed until the source can be read completely",
            )
        elif first or not was:
            log.info("source.ready", manifests=len(report.manifests))
            self.context.logs.report_recovery(subject)

    def _log_problems(self, report: Snapshot | Unavailable, changes: Changes) -> None:
        problems = frozenset(changes.problems)
        if isinstance(report, Snapshot):
            problems |= frozenset(report.problems)
        for problem in sorted(problems - self._problems):
            self.context.log.error(
                "manifest.invalid",
                controller=self.name,
                at=str(problem.origin),
                reason=problem.message,
            )
        self._problems = problems

    # -- for the runs --------------------------------------------------------

    def spec_of(self, key: Key, manifest: Manifest) -> Any:
        """The manifest's spec as an object. Raises Invalid if its class refuses it now.

        Its secrets are registered with the redactor first: a program that fails may print what
        it was given, which must not reach a log (invariant 13). Not when a source reports it:
        for ten thousand keys at once that takes 50 ms, in which the loop would be blocked.
        """
        if self._registered.get(key) != manifest.fingerprint:
            self.context.logs.redactor.register_all(manifest.spec)
            self._registered[key] = manifest.fingerprint
        return self.plugin.spec_of(manifest)

    def scheduled(self, causes: tuple[str, ...]) -> bool:
        """Whether all of *causes* are ticks of the configured schedule."""
        return self._ticks.issuperset(causes)

    def forget(self, key: Key) -> None:
        """Free all state of *key* (invariant 14)."""
        for state in (self.statuses, self._registered, self.absent, self.self_triggers):
            state.pop(key, None)
        self.removing.discard(key)
        self.context.loops.forget(key)
        self.context.logs.forget(key)
