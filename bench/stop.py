"""A stop of a thousand ordinary and a hundred critical runs, none of which ends without it.

Run: ``python bench/stop.py``. Two figures: how long after the instant the last ordinary run has
ended, and how long after their deadline the last critical one has: each cancelled, finished and
logged. The floors: a nursery of as many bare sleepers that is cancelled, and as many bare shields
that time out. Rounds alternate. Each figure is given twice: by the clock, and as processor time,
which is the clock of an otherwise idle machine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
import trio.testing
from one_controller import KIND, Nothing, run_one_controller
from table import heading, row

from reconciled.api import Reconciler, Request, Result
from reconciled.core.resources import Key

ORDINARY = 1000
CRITICAL = 100
ROUNDS = 9
# Seconds left until the hard limit: enough for the ordinary runs to end before.
HARD = 0.5
CRITICAL_LIMIT = 10.0
LIMITS = "{drain: 0ms, critical: 10s, cleanup: 1s}"


class Sleeper(Reconciler[Nothing]):
    """Sleeps for ever: shielded where its name is critical-N."""

    kind = KIND

    def __init__(self) -> None:
        super().__init__()
        self.asleep = 0
        self.all_asleep = trio.Event()

    async def reconcile(self, request: Request[Nothing]) -> Result:
        """Never returns."""
        if request.name.startswith("critical"):
            async with (
                request.operation("sleep") as operation,
                operation.critical(budget=CRITICAL_LIMIT),
            ):
                await self._sleep()
        return await self._sleep()

    async def _sleep(self) -> Result:
        self.asleep += 1
        if self.asleep == ORDINARY + CRITICAL:
            self.all_asleep.set()
        await trio.sleep_forever()
        raise AssertionError


Times = tuple[float, float, float, float]


async def ours(state: Path) -> Times:
    """Seconds until ordinary work has ended, and critical work after its deadline; twice."""
    ended: dict[str, float] = {}
    spent: dict[str, float] = {}
    over = trio.Event()
    names = [f"ordinary-{number}" for number in range(ORDINARY)]
    names += [f"critical-{number}" for number in range(CRITICAL)]
    sleeper = Sleeper()
    async with run_one_controller(state, sleeper, concurrency=len(names), stop=LIMITS) as runtime:
        host = runtime.context

        def outcome(key: Key, result: Result, failures: int) -> None:  # noqa: ARG001
            sort = key.partition("/")[2].partition("-")[0]
            ended[sort], spent[sort] = trio.current_time(), time.process_time()
            if not any(host.stop.all_works()):
                over.set()

        await runtime.record_applied(names)
        host.on_outcome = outcome
        runtime.declare(names)
        host.services.start_soon(host.stop.run_stages, lambda _: None)
        host.services.start_soon(runtime.dispatcher.run)
        await sleeper.all_asleep.wait()
        began, spent_before = trio.current_time(), time.process_time()
        host.stop.begin("bench", at=began - (CRITICAL_LIMIT - HARD))
        await over.wait()
    return (
        ended["ordinary"] - began,
        ended["critical"] - began - HARD,
        spent["ordinary"] - spent_before,
        spent["critical"] - spent["ordinary"],
    )


async def floor() -> Times:
    """The same for tasks that have nothing to finish."""
    ended: dict[bool, float] = {}
    spent: dict[bool, float] = {}
    deadline = trio.current_time() + HARD

    async def sleep(*, critical: bool) -> None:
        try:
            with trio.CancelScope(deadline=deadline if critical else float("inf"), shield=critical):
                await trio.sleep_forever()
        finally:
            ended[critical], spent[critical] = trio.current_time(), time.process_time()

    async with trio.open_nursery() as nursery:
        for number in range(ORDINARY + CRITICAL):
            nursery.start_soon(partial(sleep, critical=number >= ORDINARY))
        await trio.testing.wait_all_tasks_blocked()
        began, spent_before = trio.current_time(), time.process_time()
        nursery.cancel_scope.cancel(reason="bench")
    return (
        ended[False] - began,
        ended[True] - deadline,
        spent[False] - spent_before,
        spent[True] - spent[False],
    )


def main() -> None:
    """Print both, in alternating rounds."""
    heading()
    rounds, floors = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as state:
            rounds.append(trio.run(ours, Path(state)))
        floors.append(trio.run(floor))
    for part, name, target in (
        (0, "stop: 1,000 ordinary runs out", "<= 100 ms"),
        (1, "stop: 100 critical past their deadline", "<= 50 ms"),
        (2, "the first on the processor", "<= 100 ms"),
        (3, "the second on the processor", "<= 50 ms"),
    ):
        median = statistics.median(measured[part] for measured in rounds)
        beside = statistics.median(measured[part] for measured in floors)
        row(name, median * 1000, beside * 1000, "ms", target)


if __name__ == "__main__":
    main()
