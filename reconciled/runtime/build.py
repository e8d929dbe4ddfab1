"""From a configuration to controllers that could run: what start, reload and check share.

prepare() finds and loads every reconciler without any effect. A name that is not found makes
the configuration invalid; one that cannot be loaded stalls its own controller alone
(invariant 12).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from reconciled.api import Reconciler
from reconciled.config.manifests import Parser, Validate
from reconciled.config.model import Config, ControllerConfig
from reconciled.config.positions import Path as Steps
from reconciled.config.positions import Positions
from reconciled.config.references import references
from reconciled.config.watches import DirectoryWatch, EveryWatch
from reconciled.core.backoff import Backoff
from reconciled.core.desired import Desired
from reconciled.core.durations import format_duration
from reconciled.core.problems import Invalid, Problem
from reconciled.core.removals import RemovalGuard
from reconciled.core.resources import controller_of
from reconciled.core.schedule import Cron, Every
from reconciled.core.sources import Watcher
from reconciled.journal.store import Store
from reconciled.plugins import Broken, NotFound, Plugin, find
from reconciled.runtime.controller import Controller
from reconciled.runtime.host import Host
from reconciled.runtime.outcomes import failure_of, text_of
from reconciled.runtime.permits import Permits
from reconciled.stop import Stop
from reconciled.watchers.directory import DirectoryWatcher
from reconciled.watchers.timers import CronWatcher, EveryWatcher, local_zone, zone_named


@attrs.frozen(eq=False)
class Ready:
    """A controller that can run."""

    config: ControllerConfig
    plugin: Plugin
    reconciler: Reconciler[Any]


@attrs.frozen(eq=False)
class Stalled:
    """A controller whose reconciler is there and cannot be used."""

    config: ControllerConfig
    reason: str


@attrs.frozen(eq=False)
class Prepared:
    """Everything that a configuration asks for, loaded. problems make it invalid."""

    config: Config
    ready: tuple[Ready, ...]
    stalled: tuple[Stalled, ...]
    problems: tuple[Problem, ...]


def prepare(config: Config) -> Prepared:
    """Load what *config* names; runs plugins' module code, so only in the main thread."""
    ready: list[Ready] = []
    stalled: list[Stalled] = []
    problems: list[Problem] = []
    for controller in config.controllers.values():
        try:
            ready.append(_ready(config, controller))
        except NotFound as error:
            problems.append(
                controller.positions.problem((*controller.path, "reconciler"), str(error))
            )
        except Invalid as error:
            problems += error.problems
        except Broken as error:
            stalled.append(Stalled(controller, str(error)))
    problems += references(config, {each.config.name: each.plugin.kind for each in ready})
    return Prepared(config, tuple(ready), tuple(stalled), tuple(sorted(problems)))


def prepared_whole(config: Config) -> Prepared:
    """As prepare(), for who takes nothing less. Raises Invalid."""
    prepared = prepare(config)
    if prepared.problems:
        raise Invalid(list(prepared.problems))
    return prepared


def _ready(config: Config, controller: ControllerConfig) -> Ready:
    plugin = find(controller.reconciler, config.plugins.directories).load()
    options = plugin.options(controller)
    try:
        reconciler = plugin.cls(options)
    except BaseException as error:
        # A constructor is plugin code: what it raises, SystemExit included, stalls it alone.
        failure = failure_of(error)
        if failure is None:
            raise
        raise Broken(plugin.name, failure.result.reason, controller.origin) from error  # noqa: ASYNC104 - no cancellation: see failure_of()
    return Ready(controller, plugin, reconciler)


def build(ready: Ready, host: Host, stop: Stop, permits: Permits) -> Controller:
    """A controller of the running daemon, under *stop*; in the loop, without waiting."""
    config = ready.config
    watchers = tuple(watchers_of(ready, lambda: stop.limits.critical, host.store))
    removals = config.removals
    return Controller(
        config,
        ready.plugin,
        ready.reconciler,
        watchers,
        Desired(
            config.name,
            ready.plugin.kind,
            [watcher.name for watcher in watchers if watcher.declares],
            RemovalGuard(removals.share, removals.above),
            {key for key in host.store.all_keys() if controller_of(key) == config.name},
        ),
        host.queue.lane(
            config.name, config.concurrency, Backoff(config.retry.initial, config.retry.max)
        ),
        Stop(f"controller {config.name}", stop.limits, parent=stop),
        host,
        permits,
    )


def validator(ready: Ready, critical: Callable[[], float]) -> Validate:
    """Checks specs of the controller's kind: against their class, and their budget's limit."""
    plugin, reconciler = ready.plugin, ready.reconciler

    def validate(
        kind: str, spec: Mapping[str, Any], positions: Positions, path: Steps
    ) -> list[Problem]:
        if kind != plugin.kind:
            return []
        try:
            budget = reconciler.budget(plugin.read(spec, positions, path))
            if budget is None or budget <= critical():
                return []
        except Invalid as invalid:
            return invalid.problems
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - plugin code
            # A problem of this manifest, not of its source.
            return [positions.problem(path, f"budget() failed: {text_of(error)}")]
        message = (
            f"an operation of it may take {format_duration(budget)}, longer than stop.critical"
            f" ({format_duration(critical())}): lower the budget, or raise stop.critical"
        )
        return [positions.problem(path, message)]

    return validate


def watchers_of(
    ready: Ready, critical: Callable[[], float], store: Store | None = None
) -> Iterable[Watcher]:
    """The watchers of a controller; *store* knows what its directories were before.

    critical gives the limit that the manifests' budgets have to keep; a reload may change it.
    """
    parse = Parser(validator(ready, critical)).parse
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
            zone = zone_named(watch.zone) if watch.zone else local_zone()
            yield CronWatcher(Cron(watch.expression, zone))
