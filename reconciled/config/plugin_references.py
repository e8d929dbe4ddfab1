"""What can be checked about a configuration only once its plugins are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from reconciled.config.model import Config
from reconciled.config.watches import DirectoryWatch
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin


def check_references(config: Config, kinds: Mapping[str, str]) -> list[Problem]:
    """A problem for each directory from which two controllers take the same kind.

    *kinds* maps a controller to the kind that it takes, if its plugin could be loaded.
    """
    problems = []
    takers: dict[tuple[Path, str], tuple[str, Origin]] = {}
    for controller in config.controllers.values():
        kind = kinds.get(controller.name)
        if kind is None:
            continue
        for watch in controller.watch:
            if not isinstance(watch, DirectoryWatch):
                continue
            name, origin = takers.setdefault((watch.path, kind), (controller.name, watch.origin))
            if name != controller.name:
                message = (
                    f"controllers {name} ({origin}) and {controller.name} both take {kind} "
                    f"from {watch.path}: give each a directory of its own"
                )
                problems.append(Problem(watch.origin, message))
    return sorted(problems)
