"""``reconciled journal list | show | resolve``: operations, open, held and past.

List and show read a copy of the store: they take no lock, write nothing, and work with the daemon
up or down. Exit codes: 0 · 4 there is no such operation · 70 the store cannot be read · 78 the
configuration is invalid, and no ``--state`` was given. ``resolve`` has more of its own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from reconciled.cli.journal.target import JournalTarget
from reconciled.cli.journal.undo_check import UndoCheck
from reconciled.cli.terminal import act_as_owner, print_error, report_invalid
from reconciled.config.load import find_config, load
from reconciled.core.errors import Invalid, StateLocked, StoreTooNew, StoreUnusable
from reconciled.core.exit_codes import INTERNAL
from reconciled.journal.state_lock import probe


def execute(arguments: argparse.Namespace) -> int:
    """Carry out ``journal``; its exit code."""
    try:
        target = _target(arguments)
    except Invalid as invalid:
        print_error("without a valid configuration, name the state: --state DIRECTORY")
        return report_invalid(invalid)
    try:
        act_as_owner(target.state)
        code = _execute_action(arguments, target)
    except (StoreTooNew, StoreUnusable) as error:
        print_error(f"reconciled journal: {error}")
        return INTERNAL
    if arguments.action != "resolve":
        _report_running(target.state)
    return code


def _execute_action(arguments: argparse.Namespace, target: JournalTarget) -> int:
    """Import only what the action needs."""
    if arguments.action == "list":
        from reconciled.cli.journal import listing

        return listing.execute(arguments, target)
    if arguments.action == "show":
        from reconciled.cli.journal import show

        return show.execute(arguments, target)
    from reconciled.cli.journal import resolve

    return resolve.execute(arguments, target)


def _report_running(state: Path) -> None:
    try:
        probe(state)
    except StateLocked as held:
        pid = "" if held.pid is None else f" (pid {held.pid})"
        print_error(f"a daemon{pid} is running on {state}: this is its current state")


def _target(arguments: argparse.Namespace) -> JournalTarget:
    """Raises Invalid if the state is only given by a configuration, and that is invalid."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
    except Invalid as invalid:
        if not arguments.state:
            raise
        check = UndoCheck(None, str(invalid.problems[0]))
        return JournalTarget(Path(arguments.state).absolute(), check)
    state = Path(arguments.state).absolute() if arguments.state else config.state
    return JournalTarget(state, UndoCheck(config))
