"""The cost of a log line in a real journal: native entries beside JSON on standard error.

The parent boots a container of the tests, which needs root; inside, a transient service writes
both ways alternately. A burst is what one run may log; between bursts, the journal catches up.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trio
from table import heading, row

from reconciled.observe.logs import Logs, configure

BURST, BURSTS = 25, 80
PAUSE = 0.03  # seconds in which the journal catches up
SUSTAINED = 30_000
TURN = 0.001  # seconds the ticker sleeps


def bursts(log: Callable[[int], object], first: int) -> float:
    """Microseconds per line, the median over the bursts.

    Each line has a different number, from *first* on: equal ones would be folded, and cost less.
    """
    taken = []
    for burst in range(BURSTS):
        time.sleep(PAUSE)
        start = time.perf_counter()
        for line in range(BURST):
            log(first + burst * BURST + line)
        taken.append((time.perf_counter() - start) / BURST * 1e6)
    return statistics.median(taken)


async def sustained(logs: Logs) -> tuple[float, float]:
    """The longest halt of the loop in milliseconds, and the fraction of lines dropped."""
    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        while True:
            start = time.perf_counter()
            await trio.sleep(TURN)
            worst = max(worst, time.perf_counter() - start - TURN)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(logs.serve)
        nursery.start_soon(tick)
        for number in range(SUSTAINED):
            logs.log.info("run.done", key="site/b", run=7, outcome="done", n=number)
            if number % BURST == 0:
                await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel(reason="measured")
    return worst * 1e3, logs.sink.statistics().dropped / SUSTAINED


def inside(result: Path) -> None:
    """Run in the service: measure, and write the figures to *result*."""
    native = configure("auto", environment=os.environ)
    assert native.sink.datagrams, "standard error does not lead to the journal"
    plain = configure("json", environment=os.environ)
    ways = {}
    for name, logs in (("native", native), ("json", plain)):
        log = logs.log.bind(key="site/a", run=7)
        ways[name] = lambda number, log=log: log.info("run.done", outcome="done", n=number)
    best = {name: float("inf") for name in ways}
    for turn in range(3):
        for name, way in ways.items():
            best[name] = min(best[name], bursts(way, turn * BURST * BURSTS))
    worst, dropped = trio.run(sustained, native)
    result.write_text(json.dumps({**best, "worst": worst, "dropped": dropped}))
    native.close()
    plain.close()


def main() -> None:
    """Print the table."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/systemd"))
    import program
    from container import Missing, booted

    heading()
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            booted(Path(directory), *program.binds()) as container,
        ):
            python, script = "/opt/reconciled/bin/python3", "/opt/checkout/bench/journald.py"
            run = ("systemd-run", "--quiet", "--wait", "--collect", "--unit=bench")
            container.run(*run, python, script, "/run/result")
            figures = json.loads(container.read("/run/result"))
    except Missing as missing:
        print(f"not measured: {missing}")
        return
    row(
        "line to the journal, bursts of 25: native, JSON",
        figures["native"],
        figures["json"],
        "µs",
        "<= 1.5 x JSON on stderr",
    )
    row("30,000 lines at once: longest halt of the loop", figures["worst"], None, "ms", "<= 50 ms")
    row("- of them dropped and counted", figures["dropped"] * 100, None, "%", "counted")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        inside(Path(sys.argv[1]))
    else:
        main()
