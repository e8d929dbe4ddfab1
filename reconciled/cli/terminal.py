"""Output of verbs, text and JSON, and their access to the state directory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from reconciled.core.errors import Invalid, StoreTooNew, StoreUnusable
from reconciled.core.exit_codes import INVALID
from reconciled.core.resources import Key
from reconciled.journal.sqlite.snapshot import open_snapshot
from reconciled.journal.sqlite.store import Applied, read_all_applied
from reconciled.offline.scan import ControllerScan
from reconciled.runtime.controllers.loading import PreparedConfig


def print_line(text: str = "") -> None:
    """Print one line, or several, on standard output."""
    print(text)  # noqa: T201 - verbs print


def print_error(text: str) -> None:
    """Print one line, or several, on standard error."""
    print(text, file=sys.stderr)  # noqa: T201 - verbs print


def print_json(data: Any) -> None:
    """Print *data* as JSON on standard output; keys keep their order."""
    print_line(json.dumps(data, indent=2, ensure_ascii=False))


def report_invalid(invalid: Invalid) -> int:
    """Print every problem of an invalid configuration; returns the exit code."""
    for problem in invalid.problems:
        print_error(str(problem))
    return INVALID


def report_problems(prepared: PreparedConfig, scans: list[ControllerScan]) -> bool:
    """Print each stalled controller, unreadable source and bad manifest; whether there is any."""
    lines = [f"controller {one.config.name} stalls: {one.reason}" for one in prepared.stalled]
    for each in scans:
        lines += [f"{source} cannot be read: {why}" for source, why in each.unavailable.items()]
        lines += [str(problem) for problem in each.problems]
    for line in lines:
        print_error(line)
    return bool(lines)


def read_applied(state: Path) -> dict[str, dict[Key, Applied]]:
    """What was applied, by controller; empty where there is no store yet.

    Raises StoreTooNew, StoreUnusable.
    """
    with open_snapshot(state) as connection:
        return {} if connection is None else read_all_applied(connection)


def act_as_owner(state: Path) -> None:
    """As root, become the owner of *state*: the daemon has to read what this verb writes."""
    if os.geteuid() != 0 or not state.exists():
        return
    status = state.stat()
    # Not where root is the owner: a sandbox refuses the call even if it changes nothing.
    if status.st_uid:
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)


__all__ = [
    "INVALID",
    "StoreTooNew",
    "StoreUnusable",
    "act_as_owner",
    "print_error",
    "print_json",
    "print_line",
    "read_applied",
    "report_invalid",
    "report_problems",
]
