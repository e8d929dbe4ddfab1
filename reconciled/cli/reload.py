"""``reconciled reload``: make the daemon read its configuration again; returns at the swap.

Exit codes: 0 in force · 1 refused: stop in progress · 69 no daemon answers · 78 invalid: each
problem is on standard error, and the old configuration stays in force.
"""

from __future__ import annotations

import argparse

from reconciled.cli.ask_daemon import ask_daemon
from reconciled.control.protocol import ControlRequest


def execute(arguments: argparse.Namespace) -> int:
    """Request a reload, and wait for its end."""
    return ask_daemon(arguments, ControlRequest("reload"))
