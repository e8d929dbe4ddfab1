"""Loading of the reconcilers that a configuration names, for start, reload and verbs.

1. prepare() has no effect other than running the plugins' module code and constructors.
2. A name that is not found makes the configuration invalid.
3. A reconciler that cannot be loaded stalls its own controller alone (invariant 12).
"""

from __future__ import annotations

from typing import Any

import attrs

from reconciled.api import Reconciler
from reconciled.config.model import Config, ControllerConfig
from reconciled.config.plugin_references import check_references
from reconciled.core.errors import Invalid, PluginBroken, PluginNotFound
from reconciled.core.problems import Problem
from reconciled.plugins.discovery import find_reconciler
from reconciled.plugins.loading import Plugin, load
from reconciled.runtime.plugin_errors import failure_of


@attrs.frozen(eq=False)
class LoadedController:
    """A controller that can run."""

    config: ControllerConfig
    plugin: Plugin
    reconciler: Reconciler[Any]


@attrs.frozen(eq=False)
class StalledController:
    """A controller whose reconciler exists and cannot be used."""

    config: ControllerConfig
    reason: str


@attrs.frozen(eq=False)
class PreparedConfig:
    """A configuration with its loaded controllers; any of *problems* makes it invalid."""

    config: Config
    ready: tuple[LoadedController, ...]
    stalled: tuple[StalledController, ...]
    problems: tuple[Problem, ...]


def prepare(config: Config) -> PreparedConfig:
    """Load the reconcilers of *config*. Runs plugins' code, so only in the main thread."""
    ready: list[LoadedController] = []
    stalled: list[StalledController] = []
    problems: list[Problem] = []
    for controller in config.controllers.values():
        try:
            ready.append(_ready(config, controller))
        except PluginNotFound as error:
            problems.append(
                controller.positions.problem((*controller.path, "reconciler"), str(error))
            )
        except Invalid as error:
            problems += error.problems
        except PluginBroken as error:
            stalled.append(StalledController(controller, str(error)))
    problems += check_references(config, {each.config.name: each.plugin.kind for each in ready})
    return PreparedConfig(config, tuple(ready), tuple(stalled), tuple(sorted(problems)))


def prepare_valid(config: Config) -> PreparedConfig:
    """As prepare(); raises Invalid if there is any problem. Controllers may be stalled."""
    prepared = prepare(config)
    if prepared.problems:
        raise Invalid(list(prepared.problems))
    return prepared


def _ready(config: Config, controller: ControllerConfig) -> LoadedController:
    plugin = load(find_reconciler(controller.reconciler, config.plugins.directories))
    options = plugin.options(controller)
    try:
        reconciler = plugin.cls(options)
    except BaseException as error:
        # A constructor is plugin code: any exception, even SystemExit, stalls its controller.
        failure = failure_of(error)
        if failure is None:
            raise
        raise PluginBroken(plugin.name, failure.result.reason, controller.origin) from error  # noqa: ASYNC104 - no cancellation: see failure_of()
    return LoadedController(controller, plugin, reconciler)
