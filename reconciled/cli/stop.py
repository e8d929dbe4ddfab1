"""``reconciled stop [--now]``: begin a stop, or take it one stage on; back when it has begun.

Exit codes: 0 it has begun, or was under way · 1 it cannot be asked · 69 no daemon answers.
A service manager may start the daemon again: to it, this is an end like any other.
"""

from __future__ import annotations

import argparse

from reconciled.cli.ask_daemon import ask_daemon
from reconciled.control.protocol import ControlRequest


def execute(arguments: argparse.Namespace) -> int:
    """Ask for a stop."""
    return ask_daemon(arguments, ControlRequest("stop", {"now": arguments.now}))
