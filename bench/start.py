"""The command line and the life of an idle daemon, in real processes.

Run: ``python bench/start.py``. ``--help`` beside an interpreter that does nothing; start to ready
with 100 manifests (lock held, sources listed, dispatcher running), and the stop while nothing
runs, beside the least program that is a daemon: it imports trio, attrs, cattrs and yaml, and
waits for SIGTERM in its loop. Rounds alternate.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from process import RECONCILED, Process, daemon, floor, site
from table import heading, row

KEYS = 100
ROUNDS = 15


def ended(*arguments: str) -> float:
    """Seconds that a command takes."""
    began = time.perf_counter()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def measure(process: Process, *events: str) -> tuple[float, float, float]:
    """Seconds to the event daemon.ready, of the stop, and of the stop on the processor.

    The stop begins when *events* have come as well.
    """
    return process.wait_for("daemon.ready", *events), *process.stop()


def print_row(name: str, ours: Sequence[float], floors: Sequence[float], target: str) -> None:
    """One row, in milliseconds."""
    row(name, statistics.median(ours) * 1000, statistics.median(floors) * 1000, "ms", target)


def main() -> None:
    """Print every row."""
    heading()
    helps = [
        (ended(RECONCILED, "--help"), ended(sys.executable, "-c", "pass")) for _ in range(ROUNDS)
    ]
    helped, passed = zip(*helps, strict=True)
    print_row("reconciled --help", helped, passed, "<= 150 ms")
    rounds, floors, again = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as root:
            config = site(Path(root), KEYS)
            rounds.append(measure(daemon(config), "bench.all_ran"))
            again.append(measure(daemon(config)))
            floors.append(measure(floor()))
    ready, _, _ = zip(*rounds, strict=True)
    known, stopped, used = zip(*again, strict=True)
    floor_ready, floor_stopped, floor_used = zip(*floors, strict=True)
    print_row("start to ready, 100 new keys", ready, floor_ready, "<= 500 ms")
    print_row("start to ready, 100 known keys", known, floor_ready, "<= 500 ms")
    print_row("stop while idle", stopped, floor_stopped, "<= 100 ms")
    print_row("stop while idle, on the processor", used, floor_used, "<= 20 ms")


if __name__ == "__main__":
    main()
