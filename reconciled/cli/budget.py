"""``reconciled budget``: how long a stop may take, and what asks for how much of it."""

from __future__ import annotations

import argparse
import math
import os
from functools import partial

import attrs
import trio

from reconciled.cli.terminal import complain, refuse, say, say_json, tell_trouble
from reconciled.config.load import find_config, load
from reconciled.core.durations import format_duration
from reconciled.core.problems import Invalid
from reconciled.core.resources import Key
from reconciled.core.stages import LAST_RESORT, StopLimits
from reconciled.runtime.build import prepared_whole
from reconciled.runtime.survey import Surveyed, survey

DOES_NOT_FIT = 1
SHOWN = 10


@attrs.frozen(order=True)
class Declared:
    """What one key's operations may take, at the longest."""

    seconds: float
    key: Key


def execute(arguments: argparse.Namespace) -> int:
    """Print the stages and the declared budgets."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
        prepared = prepared_whole(config)
    except Invalid as invalid:
        return refuse(invalid)
    # Also those that do not fit: to name them is what this is for.
    surveyed = trio.run(partial(survey, prepared, {}, critical=math.inf))
    tell_trouble(prepared, surveyed)
    declared = declared_budgets(surveyed)
    too_long = [each for each in declared if each.seconds > config.stop.critical]
    if arguments.json:
        say_json(_as_data(config.stop, declared))
    else:
        _print(config.stop, declared)
    for each in too_long:
        complain(f"{each.key} asks for {format_duration(each.seconds)}: longer than stop.critical")
    return DOES_NOT_FIT if too_long else 0


def declared_budgets(surveyed: list[Surveyed]) -> list[Declared]:
    """The budgets that the declared keys ask for, the longest first."""
    declared = []
    for each in surveyed:
        for key, manifest in each.desired.manifests.items():
            seconds = each.ready.reconciler.budget(each.ready.plugin.spec(manifest))
            if seconds is not None:
                declared.append(Declared(seconds, key))
    return sorted(declared, key=lambda each: (-each.seconds, each.key))


def _as_data(limits: StopLimits, declared: list[Declared]) -> dict[str, object]:
    return {
        "drain_s": limits.drain,
        "critical_s": limits.critical,
        "cleanup_s": limits.cleanup,
        "last_resort_s": LAST_RESORT,
        "budget_s": limits.budget,
        "declared": [{"key": each.key, "budget_s": each.seconds} for each in declared],
        "measured": None,
        "unit": None,
    }


def _print(limits: StopLimits, declared: list[Declared]) -> None:
    rows = [
        ("drain", limits.drain, "ordinary work may finish; counts from the signal"),
        ("critical", limits.critical, "hard limit of critical operations; counts from the signal"),
        ("cleanup", limits.cleanup, "what one task gets after its cancellation"),
        ("last resort", LAST_RESORT, "then the process is ended from outside its loop"),
        ("budget", limits.budget, "critical + cleanup + last resort: the longest stop"),
    ]
    for name, seconds, meaning in rows:
        say(f"{name:<12} {format_duration(seconds):>8}  {meaning}")
    say()
    if declared:
        say("Declared by manifests, the longest first:")
        for each in declared[:SHOWN]:
            say(f"  {format_duration(each.seconds):>8}  {each.key}")
        if len(declared) > SHOWN:
            say(f"  … and {len(declared) - SHOWN} more")
        needed = min(declared[0].seconds, limits.critical) + limits.cleanup + LAST_RESORT
        say(f"With these, a stop needs at most {format_duration(needed)}.")
    else:
        say("No manifest declares a critical budget.")
    say("Measured durations and the service manager's limit are not looked at in this version.")
