"""``reconciled allow CONTROLLER``: permit exactly the removals that are held and shown, once."""

from __future__ import annotations

import argparse
import os

from reconciled.cli.terminal import act_as_owner, complain, refuse, say
from reconciled.config.load import find_config, load
from reconciled.core.problems import Invalid
from reconciled.runtime.decisions.removals import describe, read_held, write_permit

NOTHING_HELD = 4


def execute(arguments: argparse.Namespace) -> int:
    """Permit, or say that nothing is held."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
    except Invalid as invalid:
        return refuse(invalid)
    controller: str = arguments.controller
    if controller not in config.controllers:
        known = ", ".join(sorted(config.controllers))
        complain(f"reconciled allow: there is no controller {controller}; there are: {known}")
        return NOTHING_HELD
    try:
        act_as_owner(config.state)
        held = read_held(config.state, controller)
        if held is None:
            say(f"No removals of {controller} are held.")
            return NOTHING_HELD
        write_permit(config.state, held)
    except (OSError, ValueError) as error:
        complain(f"reconciled allow: {error}")
        return 1
    say(f"Permitted, once: the removal of {len(held.keys)} of {held.owned} keys of {controller}.")
    say(describe(held))
    say("A running daemon acts on it now, otherwise the next one does at its start.")
    return 0
