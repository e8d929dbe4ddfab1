"""The cost of durable operations: many at once, one alone, and a long history.

Each figure is compared with a baseline: the same records with one commit each through the same
thread (many at once), or one bare commit (one alone).
"""

from __future__ import annotations

import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from table import heading, row

from reconciled.core.resources import Key
from reconciled.journal.operation_journal import HistoryLimits, OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.lifecycle import transaction
from reconciled.journal.sqlite.rows import insert, move_to_past
from reconciled.journal.sqlite.store import Store

TASKS, SECONDS, ROUNDS = 50, 4.0, 300
PINNED = {"spec": {"path": "/etc/motd", "content": "x" * 200}, "kind": "File", "base": "/etc/x"}
# A tenth of a million operations with a tenth of the default history: a million has ten times the
# kept rows, and ten times the space that the files take beyond them.
MANY, KEPT = 100_000, 10_000


@asynccontextmanager
async def journal(
    state: Path, history: HistoryLimits | None = None
) -> AsyncIterator[OperationJournal]:
    """A journal in *state*, with its writer."""
    store = Store.open(state)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        yield OperationJournal.load(store, history=history)
        nursery.cancel_scope.cancel(reason="measured")


async def run_many(operations: OperationJournal, is_last: Callable[[int], bool]) -> float:
    """Durable records per second of TASKS tasks that begin and end, until is_last(operations)."""
    count, began = 0, time.perf_counter()

    async def task(number: int) -> None:
        nonlocal count
        while not is_last(count):
            record = await operations.begin(Key(f"bench/{number}"), "apply", PINNED)
            await operations.end(record.id, Ending.DONE)
            count += 1

    async with trio.open_nursery() as nursery:
        for number in range(TASKS):
            nursery.start_soon(task, number)
    return 2 * count / (time.perf_counter() - began)


async def run_separate_commits(state: Path) -> float:
    """Durable records per second with one commit each, through one thread."""
    limiter = trio.CapacityLimiter(1)
    store = Store.open(state)
    operations = OperationJournal.load(store)
    connection = store.writer.connection
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        record = operations._record(Key("bench/x"), "apply", PINNED, "")  # noqa: SLF001 - the same row
        ended = operations._ended(record, Ending.DONE)  # noqa: SLF001 - as it is closed
        for write, each in ((insert, record), (move_to_past, ended)):

            def one(write: Callable[..., None] = write, each: object = each) -> None:
                with transaction(connection):
                    write(connection, each)

            await trio.to_thread.run_sync(one, limiter=limiter)
            count += 1
    store.close()
    return count / (time.perf_counter() - began)


class BareCommits:
    """Commits of one small row each, through one thread."""

    def __init__(self, directory: Path) -> None:
        self.limiter = trio.CapacityLimiter(1)
        self.connection = sqlite3.connect(
            directory / "bare.sqlite", isolation_level=None, check_same_thread=False
        )
        self.connection.execute("PRAGMA journal_mode=WAL").close()
        self.connection.execute("PRAGMA synchronous=FULL").close()
        self.connection.execute("CREATE TABLE IF NOT EXISTS t (a)").close()

    async def commit(self) -> None:
        """Commit one row."""
        await trio.to_thread.run_sync(self._write, limiter=self.limiter)

    def _write(self) -> None:
        self.connection.execute("INSERT INTO t VALUES (1)").close()


async def run_one(operations: OperationJournal) -> None:
    """One operation with three steps, while nothing else runs."""
    record = await operations.begin(Key("bench/alone"), "apply", PINNED)
    for step in ("prepare", "exchange", "tell"):
        await operations.record_step_started(record.id, step, "idempotent")
        await operations.record_step_done(record.id, step, "idempotent", {"step": step})
    await operations.end(record.id, Ending.DONE)


async def compare_one(place: Path) -> tuple[float, float]:
    """Milliseconds of one operation alone, and of one bare commit.

    Medians of alternating rounds: the duration of a sync varies from second to second.
    """
    bare = BareCommits(place)
    ours, floors = [], []
    async with journal(place) as operations:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _ in range(4):
                await bare.commit()
            between = time.perf_counter()
            await run_one(operations)
            ours.append(time.perf_counter() - between)
            floors.append((between - began) / 4)
    bare.connection.close()
    return statistics.median(ours) * 1000, statistics.median(floors) * 1000


def time_opening(state: Path) -> float:
    """Milliseconds until a store is open and its operations are read."""
    began = time.perf_counter()
    store = Store.open(state)
    OperationJournal.load(store)
    took = (time.perf_counter() - began) * 1000
    store.close()
    return took


def fill_history(state: Path, count: int) -> None:
    """Put *count* finished operations into the history."""
    store = Store.open(state)
    operations = OperationJournal.load(store)
    with transaction(store.writer.connection):
        for number in range(count):
            record = operations._record(Key(f"bench/{number}"), "apply", PINNED, "")  # noqa: SLF001
            ended = operations._ended(record, Ending.DONE)  # noqa: SLF001 - as it is closed
            move_to_past(store.writer.connection, ended)
    store.close()


async def measure(place: Path) -> None:
    """Print every figure; throughput is the best of three rounds, since machines are shared."""
    heading()
    together, one = 0.0, 0.0
    async with journal(place) as operations:
        for _ in range(3):
            until = time.perf_counter() + SECONDS
            rate = await run_many(operations, lambda _, until=until: time.perf_counter() >= until)
            together = max(together, rate)
    (place / "apart").mkdir()
    one = await run_separate_commits(place / "apart")
    row("durable records, 50 tasks, two each", together, one, "1/s", "≥ 5000, ≥ 4 x floor")
    took, floor = await compare_one(place)
    row("operation with three steps, alone", took, floor, "ms", "≤ 6 x a bare commit")
    (place / "empty").mkdir()
    time_opening(place / "empty")
    empty = min(time_opening(place / "empty") for _ in range(3))
    (place / "full").mkdir()
    fill_history(place / "full", 100_000)
    full = min(time_opening(place / "full") for _ in range(3))
    row("opening, 100 k finished in the history", full, empty, "ms", "start ≤ 1 s in all")
    (place / "sized").mkdir()
    async with journal(place / "sized", HistoryLimits(operations=KEPT)) as operations:
        await run_many(operations, lambda count: count >= MANY)
    size = sum(file.stat().st_size for file in (place / "sized" / "store").iterdir()) / 2**20
    row("store after 1 M operations (a tenth, x 10)", 10 * size, None, "MiB", "bounded")


def main() -> None:
    """Measure in the working directory: a file system in memory has no cost of a sync."""
    place = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".bench-journal-"))
    try:
        trio.run(measure, place)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
