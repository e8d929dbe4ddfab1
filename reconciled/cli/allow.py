"""``reconciled allow CONTROLLER``: approve exactly the held removals that it shows, once."""

from __future__ import annotations

import argparse
import os

from reconciled.cli.terminal import act_as_owner, print_error, print_line, report_invalid
from reconciled.config.load import find_config, load
from reconciled.core.errors import Invalid
from reconciled.core.exit_codes import FAILED, NOT_FOUND
from reconciled.journal.removal_approvals import PendingApproval, read_pending, write_approval

_SHOWN = 20  # keys; the rest is counted


def execute(arguments: argparse.Namespace) -> int:
    """Write the approval; the exit code: 4 if nothing is held."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
    except Invalid as invalid:
        return report_invalid(invalid)
    controller: str = arguments.controller
    if controller not in config.controllers:
        known = ", ".join(sorted(config.controllers))
        print_error(
            f"reconciled allow: controller {controller} is not configured; configured are: {known}"
        )
        return NOT_FOUND
    try:
        act_as_owner(config.state)
        held = read_pending(config.state, controller)
        if held is None:
            print_line(f"No removals of {controller} are held.")
            return NOT_FOUND
        write_approval(config.state, held)
    except PermissionError as error:
        print_error(
            f"reconciled allow: {error.filename}: permission denied: run as root, or as the"
            " daemon's user"
        )
        return FAILED
    except (OSError, ValueError) as error:
        print_error(f"reconciled allow: {error}")
        return FAILED
    print_line(
        f"Approved, once: the removal of {len(held.keys)} of {held.owned} keys of {controller}."
    )
    print_line(_format_keys(held))
    print_line("A running daemon removes them now, otherwise the next one does at its start.")
    return 0


def _format_keys(held: PendingApproval) -> str:
    lines = [f"  {key}" for key in held.keys[:_SHOWN]]
    if len(held.keys) > _SHOWN:
        lines.append(f"  … and {len(held.keys) - _SHOWN} more")
    return "\n".join(lines)
