"""``reconciled run``: the daemon, in the foreground."""

from __future__ import annotations

import argparse

from reconciled.instant import Signals


def execute(arguments: argparse.Namespace) -> int:
    """Be the daemon until it has stopped."""
    # Before the imports below, which take most of the start.
    signals = Signals()
    signals.install()

    import os

    from reconciled.config.load import find_config
    from reconciled.runtime.start import run_daemon

    path = find_config(arguments.config, os.environ)
    return run_daemon(path, dict(os.environ), signals, once=arguments.once)
