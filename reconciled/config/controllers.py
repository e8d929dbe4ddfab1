"""Reads one controller of the configuration: checked, with its defaults filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs

from reconciled.config.model import ControllerConfig, InterruptedPolicy, RemovalsConfig, RetryConfig
from reconciled.config.structuring.field_types import at_least, positive
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.watches import DirectoryWatch, Watch, read_watch
from reconciled.config.yaml.positions import Path as Steps
from reconciled.config.yaml.positions import Positions
from reconciled.core.durations import Seconds
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem

# A controller's name is the first part of every key, and a field of logs and metrics.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@attrs.frozen
class _RawController:
    reconciler: str
    watch: tuple[Any, ...]
    concurrency: int = attrs.field(default=4, validator=at_least(1))
    timeout: Seconds = attrs.field(default=Seconds(120.0), validator=positive)
    retry: RetryConfig = attrs.Factory(RetryConfig)
    interrupted: InterruptedPolicy = "roll-forward"
    max_recoveries: int = attrs.field(default=3, validator=at_least(0))
    removals: RemovalsConfig = attrs.Factory(RemovalsConfig)
    options: dict[str, Any] = attrs.Factory(dict)


def read_controller(
    structurer: Structurer, name: str, data: Any, positions: Positions, base: Path
) -> ControllerConfig:
    """The controller *name* that *data* describes. Raises Invalid with all of its problems."""
    path: Steps = ("controllers", name)
    problems: list[Problem] = []
    if not _NAME.fullmatch(name):
        message = f"{name!r} is not a controller name: use a-z, 0-9 and -, at most 63 characters"
        problems.append(positions.problem_at_key(path, message))
    entries = data.get("watch") if isinstance(data, dict) else None
    watches, bad = _read_watches(structurer, entries, positions, (*path, "watch"), base)
    problems += bad
    try:
        written = structurer.structure(_RawController, data, positions, path)
    except Invalid as exc:
        raise Invalid([*problems, *exc.problems]) from exc
    if problems:
        raise Invalid(problems)
    return ControllerConfig(
        name=name,
        watch=watches,
        origin=positions.key_origin(path),
        positions=positions,
        path=path,
        **{
            field.name: getattr(written, field.name)
            for field in attrs.fields(_RawController)
            if field.name != "watch"
        },
    )


def _read_watches(
    structurer: Structurer,
    entries: Any,
    positions: Positions,
    path: Steps,
    base: Path,
) -> tuple[tuple[Watch, ...], list[Problem]]:
    """The watches, and the problems in them. Structuring reports *entries* that are not a list."""
    if not isinstance(entries, list):
        return (), []
    if not entries:
        message = "is empty, so the controller would never run: add a directory, every or cron"
        return (), [positions.problem(path, message)]
    watches: list[Watch] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        try:
            watch = read_watch(structurer, entry, positions, (*path, index), base)
        except Invalid as exc:
            problems += exc.problems
            continue
        if isinstance(watch, DirectoryWatch) and watch in watches:
            message = f"the directory {watch.path} is watched twice: remove one"
            problems.append(positions.problem((*path, index), message))
        watches.append(watch)
    return tuple(watches), problems
