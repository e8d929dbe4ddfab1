"""Memory of a real daemon, idle with 100 keys and with 100,000, after each has run once.

Run: ``python bench/memory.py`` (some minutes: the manifests are parsed, and each key's first run
is remembered on disk). The floor is the least program that is a daemon. Pss counts pages that are
shared with other processes by shares; Rss counts them whole.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from process import Process, daemon, floor, site
from table import heading, row

FEW, MANY = 100, 100_000
ROUNDS = 3
MEBIBYTE, KIBIBYTE = 2**20, 2**10
# So long nothing has happened before memory is read.
CALM = 3.0


def resting(keys: int) -> dict[str, int]:
    """Memory with *keys* keys at rest."""
    with tempfile.TemporaryDirectory() as root:
        process = daemon(site(Path(root), keys))
        process.wait_for("daemon.ready", "bench.all_ran")
        memory = settled(process)
        process.stop()
    return memory


def settled(process: Process) -> dict[str, int]:
    """Memory once the processor is idle."""
    before = -1.0
    while (now := process.cpu()) - before > CALM / 100:
        before = now
        time.sleep(CALM)
    return process.memory()


def bare() -> dict[str, int]:
    """Memory of the floor."""
    process = floor()
    process.wait_for("daemon.ready")
    memory = process.memory()
    process.stop()
    return memory


def main() -> None:
    """Print every row."""
    heading()
    rounds = [(resting(FEW), bare(), resting(MANY)) for _ in range(ROUNDS)]
    for kind in ("Rss", "Pss"):
        few = statistics.median(ours[kind] for ours, _, _ in rounds)
        beside = statistics.median(floors[kind] for _, floors, _ in rounds)
        many = statistics.median(full[kind] for _, _, full in rounds)
        row(f"{kind}, 100 keys", few / MEBIBYTE, beside / MEBIBYTE, "MiB", "<= 60 MiB")
        each = (many - few) / (MANY - FEW)
        row(f"{kind}, each further key", each / KIBIBYTE, None, "KiB", "<= 3 KiB")


if __name__ == "__main__":
    main()
