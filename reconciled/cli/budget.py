"""``reconciled budget``: how long a stop may take, declared and measured, against its limit.

Exit codes: 0 · 1 a declared budget is longer than stop.critical, or the stop budget does not fit
the unit · 78 the configuration is invalid.
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.cli.terminal import (
    StoreTooNew,
    StoreUnusable,
    print_error,
    print_json,
    print_line,
    report_invalid,
    report_problems,
)
from reconciled.cli.unit_report import check_unit, remedy_shell, shell_commands, unit_data
from reconciled.config.load import find_config, load
from reconciled.core.durations import format_duration
from reconciled.core.errors import Invalid
from reconciled.core.resources import Key
from reconciled.core.stages import LAST_RESORT, StopLimits
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.rows import read_past
from reconciled.journal.sqlite.snapshot import open_snapshot
from reconciled.offline.scan import ControllerScan, scan_sources
from reconciled.runtime.controllers.loading import prepare_valid
from reconciled.service.unit.findings import Severity, UnitComparison, format_timespan

DOES_NOT_FIT = 1
SHOWN = 10
HISTORY_LIMIT = 10_000  # the newest past operations that are read


@attrs.frozen(order=True)
class KeyDuration:
    """The longest time of one key's critical operations, declared or measured."""

    seconds: float
    key: Key


@attrs.frozen
class Measured:
    """Durations of critical operations: how many were read, and the longest of each key."""

    operations: int = 0
    longest: tuple[KeyDuration, ...] = ()


def execute(arguments: argparse.Namespace) -> int:
    """Print stages, declared budgets, measured durations and the unit's limit; the exit code."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
        prepared = prepare_valid(config)
    except Invalid as invalid:
        return report_invalid(invalid)
    # Without a limit, so that manifests beyond stop.critical are listed as well.
    scans = trio.run(partial(scan_sources, prepared, {}, critical=math.inf))
    report_problems(prepared, scans)
    limits, declared = config.stop, declared_budgets(scans)
    too_long = [each for each in declared if each.seconds > limits.critical]
    measured = _measured(config.state)
    unit = check_unit(arguments.unit, config)
    if arguments.json:
        print_json(_as_data(limits, declared, measured, unit))
    else:
        _print_stages(limits, unit)
        _print_work(limits, declared, measured)
    for each in too_long:
        print_error(
            f"{each.key} declares {format_duration(each.seconds)}: longer than stop.critical"
            f" ({format_duration(limits.critical)})"
        )
    missing = arguments.unit is not None and unit.facts is None
    if missing:
        print_error(f"--unit {arguments.unit}: {unit.reason}")
    faults = [each for each in unit.findings if each.severity is Severity.FAULT]
    for fault in faults:
        print_error(f"{unit.name}: {fault.message}")
    return DOES_NOT_FIT if too_long or missing or faults else 0


def declared_budgets(scans: list[ControllerScan]) -> list[KeyDuration]:
    """The critical budgets of the declared keys, the longest first."""
    declared = []
    for each in scans:
        for key, manifest in each.desired.manifests.items():
            seconds = each.ready.reconciler.budget(each.ready.plugin.spec_of(manifest))
            if seconds is not None:
                declared.append(KeyDuration(seconds, key))
    return sorted(declared, key=lambda each: (-each.seconds, each.key))


def _measured(state: Path) -> Measured:
    """Durations from the history below *state*; empty, with an error, if it cannot be read.

    An operation is measured as a whole, most of which is its critical part. Operations of more
    than one attempt are left out: their time contains that in which no daemon ran.
    """
    try:
        with open_snapshot(state) as connection:
            past = () if connection is None else read_past(connection, HISTORY_LIMIT).records
    except (StoreTooNew, StoreUnusable, OSError) as error:
        print_error(f"measured durations cannot be read: {error}")
        return Measured()
    known = [
        each for each in past if each.critical and each.attempt == 1 and each.ending is Ending.DONE
    ]
    longest: dict[Key, float] = {}
    for each in known:
        # Wall times: where the clock was set back, the duration counts as 0.
        longest[each.key] = max(longest.get(each.key, 0.0), each.ended - each.begun)
    rows = (KeyDuration(round(seconds, 3), key) for key, seconds in longest.items())
    return Measured(len(known), tuple(sorted(rows, key=lambda each: (-each.seconds, each.key))))


def _as_data(
    limits: StopLimits, declared: list[KeyDuration], measured: Measured, unit: UnitComparison
) -> dict[str, Any]:
    return {
        "drain_s": limits.drain,
        "critical_s": limits.critical,
        "cleanup_s": limits.cleanup,
        "last_resort_s": LAST_RESORT,
        "budget_s": limits.budget,
        "declared": [{"key": each.key, "budget_s": each.seconds} for each in declared],
        "measured": {
            "operations": measured.operations,
            "longest": [{"key": each.key, "duration_s": each.seconds} for each in measured.longest],
        },
        "unit": unit_data(unit),
    }


def _print_stages(limits: StopLimits, unit: UnitComparison) -> None:
    rows = [
        ("drain", limits.drain, "ordinary work may finish; from the signal on"),
        ("critical", limits.critical, "hard limit of critical operations; from the signal on"),
        ("cleanup", limits.cleanup, "each task's time after its cancellation"),
        ("last resort", LAST_RESORT, "then the process is ended from outside its event loop"),
        ("budget", limits.budget, "critical + cleanup + last resort: the longest stop"),
    ]
    for name, seconds, meaning in rows:
        print_line(f"{name:<12} {format_duration(seconds):>8}  {meaning}")
    limit = unit.facts.timeout_stop if unit.facts else None
    if limit is not None:
        word = "fits" if unit.fits else "does not fit"
        print_line(
            f"{'unit':<12} {format_timespan(limit):>8}  TimeoutStopSec= of {unit.name}:"
            f" the budget {word}"
        )
    else:
        print_line(f"{'unit':<12} {'?':>8}  {unit.reason}")
    if not unit.fits:
        print_line()
        print_line(f"# Commands that fix the unit, for {remedy_shell(unit)}:")
        # The worst comes first. Not indented: a shell would miss the end of a here-document.
        for line in shell_commands(unit.remedies[:1]):
            print_line(line)


def _print_work(limits: StopLimits, declared: list[KeyDuration], measured: Measured) -> None:
    print_line()
    if declared:
        print_line("Declared by manifests, the longest first:")
        _print_longest(declared)
        needed = min(declared[0].seconds, limits.critical) + limits.cleanup + LAST_RESORT
        print_line(f"With these budgets a stop needs at most {format_duration(needed)}.")
    else:
        print_line("No manifest declares a critical budget.")
    if measured.longest:
        print_line(
            f"Measured, the longest of each key ({measured.operations} critical operations):"
        )
        _print_longest(measured.longest)
    else:
        print_line("The journal has no finished critical operation.")


def _print_longest(rows: list[KeyDuration] | tuple[KeyDuration, ...]) -> None:
    for each in rows[:SHOWN]:
        print_line(f"  {format_duration(each.seconds):>8}  {each.key}")
    if len(rows) > SHOWN:
        print_line(f"  … and {len(rows) - SHOWN} more")
