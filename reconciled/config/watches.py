"""The entries of a controller's ``watch``: directories of manifests, intervals, cron times."""

from __future__ import annotations

import datetime as dt
import os
import zoneinfo
from pathlib import Path
from typing import Any

import attrs
import cronsim

from reconciled.config.structuring.faults import describe, unknown_message
from reconciled.config.structuring.field_types import Share, positive
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.yaml.positions import Path as Steps
from reconciled.config.yaml.positions import Positions
from reconciled.core.durations import Seconds
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin


@attrs.frozen
class DirectoryWatch:
    """The manifests in the directory *path*, which is absolute."""

    path: Path
    origin: Origin = attrs.field(eq=False)


@attrs.frozen
class EveryWatch:
    """All keys are due every *interval* seconds, spread over the share *jitter* of it."""

    interval: Seconds
    jitter: Share
    origin: Origin = attrs.field(eq=False)


@attrs.frozen
class CronWatch:
    """All keys are due when *expression* matches in *zone*; None: the time zone of the machine."""

    expression: str
    zone: str | None
    origin: Origin = attrs.field(eq=False)


Watch = DirectoryWatch | EveryWatch | CronWatch


@attrs.frozen
class _Directory:
    directory: Path


@attrs.frozen
class _Interval:
    interval: Seconds = attrs.field(validator=positive)
    jitter: Share = attrs.field(default=Share(0.1))


@attrs.frozen
class _Every:
    every: _Interval


@attrs.frozen
class _EveryShort:
    every: Seconds = attrs.field(validator=positive)


def _is_cron(_: Any, attribute: Any, value: str) -> None:
    try:
        cronsim.CronSim(value, dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
    except cronsim.CronSimError as exc:
        message = f'{exc}: takes minute, hour, day, month, weekday, as in "0 4 * * *"'
        raise ValueError(message, attribute) from exc


def _is_zone(_: Any, attribute: Any, value: str | None) -> None:
    if value is None:
        return
    try:
        zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as exc:
        names = zoneinfo.available_timezones()
        message = unknown_message("time zone", value, names)
        if "did you mean" not in message:
            message = f"unknown time zone {value}: write a name like Europe/Berlin"
        raise ValueError(message, attribute) from exc


@attrs.frozen
class _Cron:
    cron: str = attrs.field(validator=_is_cron)
    zone: str | None = attrs.field(default=None, validator=_is_zone)


_KINDS = ("directory", "every", "cron")


def read_watch(
    structurer: Structurer, data: Any, positions: Positions, path: Steps, base: Path
) -> Watch:
    """The watch that *data* describes; a relative directory starts at *base*. Raises Invalid."""
    origin = positions.value_origin(path)
    if not isinstance(data, dict):
        message = f"takes one of {', '.join(_KINDS)}, as in every: 10m, got {describe(data)}"
        raise Invalid([positions.problem(path, message)])
    kinds = [key for key in data if key in _KINDS]
    if not kinds:
        raise Invalid([_missing_kind_problem(data, positions, path)])
    if len(kinds) > 1:
        message = f"{' and '.join(kinds)} in one watch: write one list entry (-) for each"
        raise Invalid([positions.problem_at_key((*path, kinds[1]), message)])
    if "directory" in data:
        directory = structurer.structure(_Directory, data, positions, path)
        return DirectoryWatch(absolute(base, directory.directory), origin)
    if "cron" in data:
        cron = structurer.structure(_Cron, data, positions, path)
        return CronWatch(cron.cron, cron.zone, origin)
    if isinstance(data["every"], dict):
        every = structurer.structure(_Every, data, positions, path).every
    else:
        short = structurer.structure(_EveryShort, data, positions, path)
        every = _Interval(short.every)
    return EveryWatch(every.interval, every.jitter, origin)


def absolute(base: Path, path: Path) -> Path:
    """*path* from *base*, without ``..``. Symbolic links are kept: a mount may replace them."""
    return Path(os.path.normpath(base / path))


def _missing_kind_problem(data: dict[str, Any], positions: Positions, path: Steps) -> Problem:
    for key in data:
        if key != "zone":
            return positions.problem_at_key((*path, key), unknown_message("watch", key, _KINDS))
    return positions.problem(path, f"names no source: write one of {', '.join(_KINDS)}")
