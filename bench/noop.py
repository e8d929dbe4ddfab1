"""No-op reconciles: through queue, dispatcher, task, result and status, at log level info.

Run: ``python bench/noop.py``. The floor is what trio itself takes for the same number of tasks:
start_soon and finish, as many at a time as ours may run. The second floor is the same task with
the one thing that each run must have: a scope of its own with a deadline. Rounds
alternate, and count time on the processor: nothing here waits, and what else the machine does is
not measured.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
import trio.testing
from one_controller import KIND, Nothing, run_one_controller
from table import heading, row

from reconciled.api import Reconciler, Request, Result, done
from reconciled.core.queue.states import Priority
from reconciled.core.resources import Key

KEYS = 1000
ROUNDS = 9
PASSES = 10
CONCURRENCY = 64
TARGET = ">= 25 k/s and >= 1/4 of the floor"


class NothingReconciler(Reconciler[Nothing]):
    """Always as desired."""

    kind = KIND

    async def reconcile(self, request: Request[Nothing]) -> Result:  # noqa: ARG002
        """Nothing to do."""
        return done()


async def ours(state: Path) -> float:
    """Reconciles a second."""
    left = KEYS * PASSES
    finished = trio.Event()
    names = [f"k{number}" for number in range(KEYS)]
    async with run_one_controller(state, NothingReconciler(), concurrency=CONCURRENCY) as runtime:
        lane = runtime.controller.lane

        def outcome(key: Key, result: Result, failures: int) -> None:  # noqa: ARG001
            nonlocal left
            left -= 1
            if left == 0:
                finished.set()
            elif left >= KEYS:
                lane.add(key, trio.current_time(), "again", Priority.CHANGED)

        await runtime.record_applied(names)
        runtime.declare(names)
        runtime.context.on_outcome = outcome
        began = time.process_time()
        runtime.context.services.start_soon(runtime.dispatcher.run)
        await finished.wait()
        took = time.process_time() - began
    return KEYS * PASSES / took


async def nothing() -> None:
    """The least task."""


async def scoped() -> None:
    """The least task that can be cancelled alone and times out."""
    with trio.CancelScope(deadline=trio.current_time() + 120):  # noqa: ASYNC100 - its cost
        pass


async def floor(task: Callable[[], Awaitable[None]]) -> float:
    """Tasks a second."""
    began = time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(KEYS * PASSES // CONCURRENCY):
            for _ in range(CONCURRENCY):
                nursery.start_soon(task)
            await trio.testing.wait_all_tasks_blocked()
    return KEYS * PASSES / (time.process_time() - began)


def main() -> None:
    """All, in turn."""
    heading()
    rates, floors, scopes = [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as state:
            rates.append(trio.run(ours, Path(state)))
        floors.append(trio.run(floor, nothing))
        scopes.append(trio.run(floor, scoped))
    median = statistics.median(rates) / 1000
    row("no-op reconciles", median, statistics.median(floors) / 1000, "k/s", TARGET)
    row(
        "no-op reconciles, beside tasks with a scope",
        median,
        statistics.median(scopes) / 1000,
        "k/s",
        "",
    )


if __name__ == "__main__":
    main()
