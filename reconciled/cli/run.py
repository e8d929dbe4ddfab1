"""``reconciled run``: the daemon, in the foreground."""

from __future__ import annotations

import argparse
from typing import NoReturn

from reconciled.signal_handlers import SignalHandlers


def execute(arguments: argparse.Namespace) -> NoReturn:
    """Run the daemon until it has stopped; ends the process with its exit code."""
    # Before the imports below, which take most of the start.
    signals = SignalHandlers()
    signals.install()

    import gc
    import os

    # Objects made by imports are permanent: collecting during imports takes a tenth of the start.
    # Frozen, they are left out of later collections, which stay short, also during a stop.
    gc.disable()
    from reconciled.config.load import find_config
    from reconciled.runtime.daemon.manager_integration import ManagerIntegration
    from reconciled.runtime.daemon.startup import run_daemon

    gc.freeze()
    gc.enable()
    # Removed from the environment before anything is spawned that would inherit it.
    integration = ManagerIntegration.from_environ(os.environ)
    path = find_config(arguments.config, os.environ)
    once, strict = arguments.once, arguments.strict
    code = run_daemon(path, dict(os.environ), signals, integration, once=once, strict=strict)
    # Everything is written and released. Rejected: returning, because the interpreter's shutdown
    # costs ten times the CPU of the stop, and waits for threads that plugins have started.
    os._exit(code)
