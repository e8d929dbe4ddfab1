"""``reconciled reload``: have the daemon read its configuration again; back at the swap.

Exit codes: 0 it is in force · 1 not now, a stop is under way · 69 no daemon answers · 78 it is
invalid: each problem is on standard error, and the old one runs on.
"""

from __future__ import annotations

import argparse

from reconciled.cli.ask_daemon import ask_daemon
from reconciled.control.protocol import ControlRequest


def execute(arguments: argparse.Namespace) -> int:
    """Ask for a reload, and wait for its end."""
    return ask_daemon(arguments, ControlRequest("reload"))
