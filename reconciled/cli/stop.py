"""``reconciled stop [--now]``: begin a stop, or move it one stage on; returns when it has begun.

Exit codes: 0 it has begun, or was in progress · 1 refused · 69 no daemon answers. A service manager
may start the daemon again: to it, this is an end like any other.
"""

from __future__ import annotations

import argparse

from reconciled.cli.ask_daemon import ask_daemon
from reconciled.control.protocol import ControlRequest


def execute(arguments: argparse.Namespace) -> int:
    """Request a stop."""
    return ask_daemon(arguments, ControlRequest("stop", {"now": arguments.now}))
