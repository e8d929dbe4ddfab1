"""A process at work on a store, for kills and for injected errors; speaks in lines.

``worker.py STATE MODE``: each line on standard output says what has become durable.
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


def say(*words: object) -> None:
    """Write one whole line before anything else happens."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def count_then_die(operations: OperationJournal) -> None:
    """A recovery that kills its process: it has to be counted before it runs (C02)."""
    for record in operations.list_open():
        counted = await operations.count_recovery(record.id)
        say("counted", counted.attempt, counted.recoveries)
        os.kill(os.getpid(), signal.SIGKILL)
    await operations.begin(Key("a/poison"), "apply", {})
    os.kill(os.getpid(), signal.SIGKILL)


async def work(store: Store, operations: OperationJournal, rounds: int) -> None:
    """Begin, step and end; whatever happens to the store, go on until every round is over."""
    number = 0
    while number < rounds:
        try:
            record = await operations.begin(Key(f"a/{number}"), "apply", {"n": "x" * 500})
        except NotJournaled as error:
            say("refused", error)
            await trio.sleep(0.02)
            continue
        except OperationAlreadyOpen as error:  # from a start before
            (record,) = [each for each in operations.list_open() if each.id == error.operation]
        say("begun", record.id)
        if record.step("s") is None:
            await operations.record_step_started(record.id, "s", "once")
            say("started", record.id)
            await operations.record_step_done(record.id, "s", "once", number)
            say("done", record.id)
        await operations.end(record.id, Ending.DONE)
        say("ended", record.id)
        number += 1
    say("all", store.epoch)


async def main(state: Path, mode: str) -> None:
    """Run *mode*."""
    try:
        store = Store.open(state)
    except StoreUnusable as error:
        say("unusable", error)
        raise SystemExit(1) from error
    store.writer.on_writable_change = lambda trouble: say("state", trouble or "writable")
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        try:
            if mode == "poison":
                await count_then_die(operations)
            else:
                await work(store, operations, int(mode))
        except StoreClosed as error:
            say("closed", error)
        nursery.cancel_scope.cancel(reason="over")
    say("pending", len(operations.pending))


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2])
