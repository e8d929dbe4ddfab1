"""``reconciled plan [KEY…]``: what would be done, without effects; takes no lock."""

from __future__ import annotations

import argparse
import os
from functools import partial

import trio

from reconciled.cli.check import leaving
from reconciled.cli.terminal import (
    StoreTooNew,
    StoreUnusable,
    applied_below,
    complain,
    refuse,
    say,
    say_json,
    tell_trouble,
)
from reconciled.config.load import find_config, load
from reconciled.core.problems import Invalid
from reconciled.core.resources import Key
from reconciled.observe.logs import configure
from reconciled.offline.plan import Planned, plan
from reconciled.offline.scan import Surveyed, survey
from reconciled.programs.children import current_children
from reconciled.runtime.controllers.loading import prepared_whole
from reconciled.runtime.controllers.secrets import hide

NOTHING, CHANGES, ERROR = 0, 1, 70


def execute(arguments: argparse.Namespace) -> int:
    """Print what would be done."""
    try:
        path = find_config(arguments.config, os.environ)
        prepared = prepared_whole(load(path, os.environ).config)
    except Invalid as invalid:
        return refuse(invalid)
    config = prepared.config
    try:
        applied = applied_below(config.state)
    except (StoreTooNew, StoreUnusable) as error:
        complain(f"reconciled plan: {error}")
        return ERROR
    for line in leaving(config, applied):
        complain(f"{line} (warning)")
    logs = configure(config.log.format, "error", environment=os.environ)

    hide(logs.redactor)

    async def look() -> tuple[list[Surveyed], list[Planned]]:
        current_children().redact = logs.redactor.redact
        surveyed = await survey(prepared, applied)
        wanted = [Key(key) for key in arguments.keys]
        ask = partial(plan, surveyed, wanted, logs.log, config.stop.critical, config.state)
        return surveyed, await ask()

    surveyed, planned = trio.run(look)
    logs.close()
    unread = tell_trouble(prepared, surveyed)
    missing = sorted(set(arguments.keys) - {each.key for each in planned})
    for key in missing:
        complain(f"{key}: is neither declared nor applied")
    if arguments.json:
        say_json([_as_data(each) for each in planned])
    else:
        _print(planned)
    if unread or missing or any(each.error for each in planned):
        return ERROR
    return CHANGES if any(each.changes for each in planned) else NOTHING


def _print(planned: list[Planned]) -> None:
    quiet = 0
    for each in planned:
        if each.error:
            say(f"? {each.key}: {each.error}")
        elif each.unknown:
            say(f"? {each.key}: unknown: its reconciler has no plan")
        for change in each.changes:
            held = " (held until `reconciled allow`)" if each.held else ""
            say(f"~ {each.key}: {change.action} {change.what}{held}")
            for line in change.detail.splitlines():
                say(f"    {line}")
        quiet += not (each.changes or each.error or each.unknown)
    changing = sum(bool(each.changes) for each in planned)
    say(f"{changing} to change, {quiet} as desired, of {len(planned)}.")


def _as_data(each: Planned) -> dict[str, object]:
    return {
        "key": each.key,
        "changes": [
            {"action": change.action, "what": change.what, "detail": change.detail}
            for change in each.changes
        ],
        "unknown": each.unknown,
        "held": each.held,
        "error": each.error or None,
    }
