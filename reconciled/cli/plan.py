"""``reconciled plan [KEY…]``: what would be done, without effects; takes no lock."""

from __future__ import annotations

import argparse
import os
from functools import partial

import trio

from reconciled.cli.check import unconfigured_controllers
from reconciled.cli.terminal import (
    StoreTooNew,
    StoreUnusable,
    print_error,
    print_json,
    print_line,
    read_applied,
    report_invalid,
    report_problems,
)
from reconciled.config.load import find_config, load
from reconciled.core.errors import Invalid
from reconciled.core.exit_codes import CHANGES, DONE, INTERNAL
from reconciled.core.resources import Key
from reconciled.observe.logs import configure
from reconciled.offline.plan import KeyPlan, plan
from reconciled.offline.scan import ControllerScan, scan_sources
from reconciled.programs.children import current_children
from reconciled.runtime.controllers.loading import prepared_whole
from reconciled.runtime.controllers.secrets import redact_credentials


def execute(arguments: argparse.Namespace) -> int:
    """Print what would be done."""
    try:
        path = find_config(arguments.config, os.environ)
        prepared = prepared_whole(load(path, os.environ).config)
    except Invalid as invalid:
        return report_invalid(invalid)
    config = prepared.config
    try:
        applied = read_applied(config.state)
    except (StoreTooNew, StoreUnusable) as error:
        print_error(f"reconciled plan: {error}")
        return INTERNAL
    for line in unconfigured_controllers(config, applied):
        print_error(f"{line} (warning)")
    logs = configure(config.log.format, "error", environment=os.environ)

    redact_credentials(logs.redactor)

    async def look() -> tuple[list[ControllerScan], list[KeyPlan]]:
        current_children().redact = logs.redactor.redact
        surveyed = await scan_sources(prepared, applied)
        wanted = [Key(key) for key in arguments.keys]
        ask = partial(plan, surveyed, wanted, logs.log, config.stop.critical, config.state)
        return surveyed, await ask()

    surveyed, planned = trio.run(look)
    logs.close()
    unread = report_problems(prepared, surveyed)
    missing = sorted(set(arguments.keys) - {each.key for each in planned})
    for key in missing:
        print_error(f"{key}: is neither declared nor applied")
    if arguments.json:
        print_json([_as_data(each) for each in planned])
    else:
        _print(planned)
    if unread or missing or any(each.error for each in planned):
        return INTERNAL
    return CHANGES if any(each.changes for each in planned) else DONE


def _print(planned: list[KeyPlan]) -> None:
    quiet = 0
    for each in planned:
        if each.error:
            print_line(f"? {each.key}: {each.error}")
        elif each.unknown:
            print_line(f"? {each.key}: unknown: its reconciler has no plan")
        for change in each.changes:
            held = " (held until `reconciled allow`)" if each.held else ""
            print_line(f"~ {each.key}: {change.action} {change.what}{held}")
            for line in change.detail.splitlines():
                print_line(f"    {line}")
        quiet += not (each.changes or each.error or each.unknown)
    changing = sum(bool(each.changes) for each in planned)
    print_line(f"{changing} to change, {quiet} as desired, of {len(planned)}.")


def _as_data(each: KeyPlan) -> dict[str, object]:
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
