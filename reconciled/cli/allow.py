"""``reconciled allow CONTROLLER``: permit exactly the removals that are held and shown, once."""

from __future__ import annotations

import argparse
import os

from reconciled.cli.terminal import act_as_owner, print_error, print_line, report_invalid
from reconciled.config.load import find_config, load
from reconciled.core.errors import Invalid
from reconciled.runtime.decisions.removals import describe, read_pending, write_approval

NOTHING_HELD = 4


def execute(arguments: argparse.Namespace) -> int:
    """Permit, or say that nothing is held."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
    except Invalid as invalid:
        return report_invalid(invalid)
    controller: str = arguments.controller
    if controller not in config.controllers:
        known = ", ".join(sorted(config.controllers))
        print_error(f"reconciled allow: there is no controller {controller}; there are: {known}")
        return NOTHING_HELD
    try:
        act_as_owner(config.state)
        held = read_pending(config.state, controller)
        if held is None:
            print_line(f"No removals of {controller} are held.")
            return NOTHING_HELD
        write_approval(config.state, held)
    except (OSError, ValueError) as error:
        print_error(f"reconciled allow: {error}")
        return 1
    print_line(
        f"Permitted, once: the removal of {len(held.keys)} of {held.owned} keys of {controller}."
    )
    print_line(describe(held))
    print_line("A running daemon acts on it now, otherwise the next one does at its start.")
    return 0
