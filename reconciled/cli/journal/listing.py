"""``reconciled journal list``: the open operations, then the last past ones."""

from __future__ import annotations

import argparse
from pathlib import Path

from reconciled.cli.journal.operation_format import as_data, format_list
from reconciled.cli.journal.target import JournalTarget, read_journal
from reconciled.cli.terminal import print_error, print_json, print_line
from reconciled.journal.resolutions import ResolutionRequest, read_pending


def execute(arguments: argparse.Namespace, target: JournalTarget) -> int:
    """Print the list; its exit code. Raises StoreTooNew, StoreUnusable."""
    snapshot = read_journal(target.state, arguments.limit)
    if not target.state.exists():
        print_error(f"{target.state} does not exist: no daemon has used it yet")
    pending = {each.id: pending_resolution(target.state, each.id) for each in snapshot.open}
    if arguments.json:
        everything = (*snapshot.open, *snapshot.past)
        print_json([as_data(each, pending.get(each.id)) for each in everything])
    else:
        print_line(format_list(snapshot.open, snapshot.past, pending))
    if snapshot.degraded:
        print_error(
            f"The store was damaged: {snapshot.degraded}. Keys that are not as desired are held"
            ' until reconciled journal resolve --all --abandon --why "…"'
        )
    if snapshot.damaged:
        print_error(f"{snapshot.damaged} past operations have damaged rows and are left out")
    return 0


def pending_resolution(state: Path, operation: str) -> ResolutionRequest | None:
    """The decision about *operation* that the daemon has not carried out, if it can be read."""
    try:
        return read_pending(state, operation)
    except (OSError, ValueError) as error:
        print_error(f"cannot read the decision about {operation}: {error}")
        return None
