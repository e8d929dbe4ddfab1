"""Stores as crashes leave them: made once, copied, damaged, and opened again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.core.resources import Fingerprint, Key
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import AppliedSpec, Ending, Hold, OperationRecord
from reconciled.journal.sqlite.schema import FILE
from reconciled.journal.sqlite.store import Store, read_all_applied

HERE = HostIdentity("boot", "machine")
LOG = f"{FILE}-wal"


@attrs.frozen
class Content:
    """What the decisions of a start depend on."""

    operations: tuple[OperationRecord, ...]
    applied: dict[str, Any]
    identity: str
    epoch: int


def content_of(store: Store) -> Content:
    """The content of *store*."""
    return Content(
        tuple(store.open_operations()),
        read_all_applied(store.writer.connection).get("a", {}),
        store.source_identity("a", "directory /x"),
        store.epoch,
    )


def fill(state: Path, image: Path, *, rounds: int, killed: bool = True) -> list[Content]:
    """Work in *state*, copy it to *image*, and give the content after each commit.

    As a kill leaves it, or else as a clean end does.
    """
    state.mkdir(exist_ok=True)
    return trio.run(_fill, state, image, rounds, killed)


async def _fill(state: Path, image: Path, rounds: int, killed: bool) -> list[Content]:  # noqa: FBT001
    seen: list[Content] = []
    store = Store.open(state, now=lambda: 12.5)
    operations = OperationJournal.load(store, identity=HERE, now=lambda: 12.5)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for number in range(rounds):
            work = _work(store, operations, 100 * store.epoch + number)
            seen.extend([content_of(store) async for _ in work])
        if killed:
            shutil.copytree(state / "store", image / "store")
        nursery.cancel_scope.cancel(reason="test")
    if not killed:
        shutil.copytree(state / "store", image / "store")
    return seen


async def _work(store: Store, operations: OperationJournal, number: int) -> Any:
    """One operation that fails, one that succeeds, and what they own; a commit at each yield."""
    key = Key(f"a/x{number}")
    owned = AppliedSpec("File", {"path": "/etc/x" * 20}, Fingerprint(f"{number:032x}"), "/etc")
    record = await operations.begin(key, "apply", {"spec": "s" * 300}, applied_spec=owned)
    yield
    await operations.record_step_started(record.id, "one", "idempotent")
    await operations.record_step_done(record.id, "one", "idempotent", {"n": number})
    await operations.record_step_started(record.id, "two", "once")
    yield
    await operations.count_recovery(record.id)
    yield
    await operations.hold(record.id, Hold("it was cut", "cut", "observed different", 12.5))
    yield
    other = await operations.begin(Key(f"a/y{number}"), "apply", {"spec": "s" * 300})
    yield
    await store.set_source_identity("a", "directory /x", f"1:{number}")
    yield
    await operations.end(other.id, Ending.DONE)  # the last one: it writes the most pages
    yield


def copied(image: Path, to: Path) -> Path:
    """A new copy of *image*, to be damaged. Keeps the reserve, which takes longest to make."""
    to.mkdir(exist_ok=True)
    for each in to.glob("store*"):
        shutil.rmtree(each)
    (to / "epoch").unlink(missing_ok=True)  # of the copy before
    shutil.copytree(image / "store", to / "store")
    return to
