"""``reconciled run``: the daemon, in the foreground."""

from __future__ import annotations

import argparse
from typing import NoReturn

from reconciled.signal_handlers import SignalHandlers


def execute(arguments: argparse.Namespace) -> NoReturn:
    """Be the daemon until it has stopped; leaves the process with its exit code."""
    # Before the imports below, which take most of the start.
    signals = SignalHandlers()
    signals.install()

    import gc
    import os

    # Imports make what stays, not garbage: to look for it takes a tenth of the start. Frozen, it
    # is never looked at again, which keeps full collections short, above all those of a stop.
    gc.disable()
    from reconciled.config.load import find_config
    from reconciled.runtime.daemon.manager_integration import ManagerIntegration
    from reconciled.runtime.daemon.startup import run_daemon

    gc.freeze()
    gc.enable()
    # Out of the environment before anything could be spawned that would inherit it.
    outside = ManagerIntegration.from_environ(os.environ)
    path = find_config(arguments.config, os.environ)
    once, strict = arguments.once, arguments.strict
    code = run_daemon(path, dict(os.environ), signals, outside, once=once, strict=strict)
    # Everything is written and released. Rejected: returning, for the interpreter's own end costs
    # ten times the CPU of the stop before it, and waits for threads that plugins have started.
    os._exit(code)
