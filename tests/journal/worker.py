"""A process that works on a store, for kills and injected errors.

``worker.py STATE MODE``: each line on standard output reports what has become durable.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import trio

from reconciled.core.errors import NotJournaled, OperationAlreadyOpen, StoreClosed, StoreUnusable
from reconciled.core.resources import Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.store import Store


def report(*words: object) -> None:
    """Write one whole line before anything else happens."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def count_then_die(operations: OperationJournal) -> None:
    """A recovery that kills its process: it has to be counted before it runs (C02)."""
    for record in operations.list_open():
        counted = await operations.count_recovery(record.id)
        report("counted", counted.attempt, counted.recoveries)
        os.kill(os.getpid(), signal.SIGKILL)
    await operations.begin(Key("a/poison"), "apply", {})
    os.kill(os.getpid(), signal.SIGKILL)


async def work(store: Store, operations: OperationJournal, rounds: int) -> None:
    """Begin, step and end, and continue after errors until every round has ended."""
    number = 0
    while number < rounds:
        try:
            record = await operations.begin(Key(f"a/{number}"), "apply", {"n": "x" * 500})
        except NotJournaled as error:
            report("refused", error)
            await trio.sleep(0.02)
            continue
        except OperationAlreadyOpen as error:  # from an earlier start
            (record,) = [each for each in operations.list_open() if each.id == error.operation]
        report("begun", record.id)
        if record.step("s") is None:
            await operations.record_step_started(record.id, "s", "once")
            report("started", record.id)
            await operations.record_step_done(record.id, "s", "once", number)
            report("done", record.id)
        await operations.end(record.id, Ending.DONE)
        report("ended", record.id)
        number += 1
    report("all", store.epoch)


async def main(state: Path, mode: str) -> None:
    """Run *mode*."""
    try:
        store = Store.open(state)
    except StoreUnusable as error:
        report("unusable", error)
        raise SystemExit(1) from error
    store.writer.on_writable_change = lambda trouble: report("state", trouble or "writable")
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        try:
            if mode == "poison":
                await count_then_die(operations)
            else:
                await work(store, operations, int(mode))
        except StoreClosed as error:
            report("closed", error)
        nursery.cancel_scope.cancel(reason="over")
    report("pending", len(operations.pending))


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2])
