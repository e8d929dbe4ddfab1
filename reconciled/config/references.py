"""What can be said about a configuration only with its plugins or with this version in view."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from reconciled.config.model import Config
from reconciled.config.watches import DirectoryWatch
from reconciled.config.yaml.positions import dotted
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin

# Names of which this version does not do all that they stand for, and what is missing.
NOT_BUILT: Mapping[str, str] = {
    "http": "serves /livez and /readyz in this version, and no metrics yet",
}


def check_references(config: Config, kinds: Mapping[str, str]) -> list[Problem]:
    """Directories from which two controllers would take one kind, which neither would own.

    *kinds* gives the kind that each controller takes, for those whose plugin could be loaded.
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


def not_built_lines(config: Config, names: Mapping[str, str] = NOT_BUILT) -> list[str]:
    """A line for each of *names* that a person wrote: what this version does not do of it."""
    lines = []
    for path, origin in config.origins:
        for pattern, effect in names.items():
            if fnmatchcase(dotted(path), pattern):
                lines.append(f"{origin}: {dotted(path)} {effect}")
    return lines
