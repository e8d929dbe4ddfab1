"""Processor time of a real daemon with 10,000 keys, one directory and nothing due.

Run: ``python bench/idle.py`` (two minutes). The minute holds one full listing of the directory.
The floor, the least program that is a daemon, is measured in the same minute.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from process import daemon, floor, site
from table import heading, row

KEYS = 10_000
SECONDS = 60.0
CALM = 10.0


def main() -> None:
    """Print the row."""
    heading()
    with tempfile.TemporaryDirectory() as root:
        ours = daemon(site(Path(root), KEYS))
        ours.wait_for("daemon.ready", "bench.all_ran")
        beside = floor()
        beside.wait_for("daemon.ready")
        time.sleep(CALM)
        before = ours.cpu(), beside.cpu()
        began = time.perf_counter()
        time.sleep(SECONDS)
        took = time.perf_counter() - began
        after = ours.cpu(), beside.cpu()
        for process in (ours, beside):
            process.stop()
    share, least = (1000 * (end - start) / took for start, end in zip(before, after, strict=True))
    row("idle with 10,000 keys", share, least, "‰ core", "<= 2 ‰")


if __name__ == "__main__":
    main()
