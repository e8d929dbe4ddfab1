"""The cost of a log line, beside the standard logging module writing the same fields."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from table import heading, row

from reconciled.observe.logs import configure

ROUNDS = 20_000
BEST_OF = 5


def microseconds(call: Callable[[int], object]) -> float:
    """Microseconds per call, in the best of some rounds."""
    best = float("inf")
    for attempt in range(BEST_OF):
        start = time.perf_counter()
        for number in range(ROUNDS):
            call(attempt * ROUNDS + number)
        best = min(best, time.perf_counter() - start)
    return best / ROUNDS * 1e6


def main() -> None:
    """Print the table."""
    heading()
    with tempfile.TemporaryDirectory() as directory:
        standard = logging.getLogger("bench")
        standard.propagate = False
        standard.setLevel(logging.INFO)
        handler = logging.FileHandler(Path(directory, "standard"))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        standard.addHandler(handler)
        descriptor = os.open(Path(directory, "ours"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        logs = configure("json", descriptor=descriptor, environment={})
        log = logs.log.bind(key="site/a", run=7)

        def stdlib(number: int) -> None:
            standard.info("run.done key=%s run=%d outcome=%s n=%d", "site/a", 7, "done", number)

        baseline = microseconds(stdlib)
        row(
            "info line, JSON, to a file",
            microseconds(lambda number: log.info("run.done", outcome="done", n=number)),
            baseline,
            "µs",
            "<= 25 µs",
        )
        row(
            "error line that is folded",
            microseconds(lambda number: log.error("run.failed", reason="exit 1", n_s=number)),
            baseline,
            "µs",
            "<= 20 µs",
        )
        row(
            "debug line at level info",
            microseconds(lambda number: log.debug("run.done", outcome="done", n=number)),
            microseconds(lambda number: standard.debug("run.done %d", number)),
            "µs",
            "< 1 µs",
        )
        logs.close()
        os.close(descriptor)


if __name__ == "__main__":
    main()
