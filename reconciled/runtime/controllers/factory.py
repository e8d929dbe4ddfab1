"""Building of controllers and their watchers from what ``loading`` has loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reconciled.config.manifests import Parser, SpecReader
from reconciled.config.watches import DirectoryWatch, EveryWatch
from reconciled.config.yaml.positions import Path as Steps
from reconciled.config.yaml.positions import Positions
from reconciled.core.desired_state import DesiredState
from reconciled.core.durations import format_duration
from reconciled.core.errors import Invalid
from reconciled.core.queue.backoff import Backoff
from reconciled.core.removal_guard import RemovalGuard
from reconciled.core.resources import controller_of
from reconciled.core.schedule import Cron, Every
from reconciled.core.sources import Watcher
from reconciled.journal.sqlite.store import Store
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.loading import LoadedController
from reconciled.runtime.decisions.approvals import RemovalApprovals
from reconciled.runtime.plugin_errors import text_of
from reconciled.stop import Stop
from reconciled.watchers.directory import DirectoryWatcher
from reconciled.watchers.timers import CronWatcher, EveryWatcher, find_zone, local_zone


def build_controller(
    ready: LoadedController, context: RuntimeContext, stop: Stop, approvals: RemovalApprovals
) -> Controller:
    """A controller of the running daemon, with a stop nested in *stop*. Not a checkpoint."""
    config = ready.config
    watchers = tuple(build_watchers(ready, lambda: stop.limits.critical, context.store))
    removals = config.removals
    return Controller(
        config,
        ready.plugin,
        ready.reconciler,
        watchers,
        DesiredState(
            config.name,
            ready.plugin.kind,
            [watcher.name for watcher in watchers if watcher.declares],
            RemovalGuard(removals.share, removals.above),
            {key for key in context.store.all_keys() if controller_of(key) == config.name},
        ),
        context.queue.lane(
            config.name, config.concurrency, Backoff(config.retry.initial, config.retry.max)
        ),
        Stop(f"controller {config.name}", stop.limits, parent=stop),
        context,
        approvals,
    )


def spec_reader(ready: LoadedController, critical: Callable[[], float]) -> SpecReader:
    """Reads specs of the controller's kind: checked against their class and the budget's limit."""
    plugin, reconciler = ready.plugin, ready.reconciler

    def read(kind: str, spec: Mapping[str, Any], positions: Positions, path: Steps) -> Any:
        if kind != plugin.kind:
            return None
        typed_spec = plugin.structure_spec(spec, positions, path)
        try:
            budget = reconciler.budget(typed_spec)
            if budget is None or budget <= critical():
                return typed_spec
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # A problem of this manifest alone, not of its source.
            problem = positions.problem(path, f"budget() failed: {text_of(error)}")
            raise Invalid([problem]) from error
        message = (
            f"the critical budget {format_duration(budget)} exceeds stop.critical"
            f" ({format_duration(critical())}): lower the budget, or raise stop.critical"
        )
        raise Invalid([positions.problem(path, message)])

    return read


def build_watchers(
    ready: LoadedController, critical: Callable[[], float], store: Store | None = None
) -> Iterable[Watcher]:
    """The watchers of a controller.

    critical  returns the limit for budgets of manifests, in seconds; a reload may change it
    store     has the identities of the directories at the last start; None: not compared
    """
    parse = Parser(spec_reader(ready, critical)).parse
    for watch in ready.config.watch:
        if isinstance(watch, DirectoryWatch):
            watcher = DirectoryWatcher(watch.path, parse)
            if store is not None:
                remembered = store.source_identity(ready.config.name, watcher.name)
                watcher = DirectoryWatcher(watch.path, parse, remembered)
            yield watcher
        elif isinstance(watch, EveryWatch):
            every = Every(watch.interval, watch.jitter)
            yield EveryWatcher(every, random.Random())  # noqa: S311 - it only spreads load
        else:
            zone = find_zone(watch.zone) if watch.zone else local_zone()
            yield CronWatcher(Cron(watch.expression, zone))
