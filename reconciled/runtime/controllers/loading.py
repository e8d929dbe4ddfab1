"""From a configuration to controllers that could run: what start, reload and check share.

prepare() finds and loads every reconciler without any effect. A name that is not found makes
the configuration invalid; one that cannot be loaded stalls its own controller alone
(invariant 12).
"""

from __future__ import annotations

from typing import Any

import attrs

from reconciled.api import Reconciler
from reconciled.config.model import Config, ControllerConfig
from reconciled.config.references import references
from reconciled.core.problems import Invalid, Problem
from reconciled.plugins.discovery import NotFound, find
from reconciled.plugins.loading import Broken, Plugin, load
from reconciled.runtime.plugin_errors import failure_of


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
    plugin = load(find(controller.reconciler, config.plugins.directories))
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
