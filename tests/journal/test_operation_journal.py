"""Operations in the store: what each call makes durable, and in how many commits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from images import HERE

from reconciled.core.errors import (
    NotJournaled,
    OnceStepStarted,
    OperationAlreadyOpen,
    OperationUnknown,
)
from reconciled.core.resources import Fingerprint, Key
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_journal import HistoryLimits, OperationJournal
from reconciled.journal.operation_record import (
    AppliedSpec,
    Ending,
    Hold,
    OperationRecord,
    Resolution,
    StepState,
)
from reconciled.journal.sqlite.rows import read_open, read_past
from reconciled.journal.sqlite.snapshot import open_snapshot
from reconciled.journal.sqlite.store import Store

KEY = Key("site/motd")
OWNED = AppliedSpec("File", {"path": "/etc/motd"}, Fingerprint("f"), "/etc/x")
HOLD = Hold("it was cut", "cut", "observed different", 9.0)


@attrs.define(eq=False)
class Journal:
    """An open store with its operations; on_disk() is what a start would find."""

    store: Store
    operations: OperationJournal
    state: Path

    def on_disk(self, operation: str) -> OperationRecord | None:
        """The open operation as it is in the store."""
        found = {each.id: each for each in self.store.open_operations()}
        return found.get(operation)

    def same(self) -> bool:
        """Whether memory and disk agree."""
        return self.operations.list_open() == self.store.open_operations()


@asynccontextmanager
async def journal(
    state: Path,
    *,
    history: HistoryLimits | None = None,
    machine: HostIdentity = HERE,
    run: bool = True,
) -> AsyncIterator[Journal]:
    """Open, run the writer, and close cleanly."""
    store = Store.open(state)
    operations = OperationJournal.load(store, history=history, identity=machine)
    async with trio.open_nursery() as nursery:
        if run:
            await nursery.start(store.run)
        yield Journal(store, operations, state)
        nursery.cancel_scope.cancel(reason="test")
    store.close()


async def test_three_steps_that_may_be_repeated_are_four_commits(tmp_path: Path) -> None:
    """begin, step 1, step 2, step 3 with the end: each step is durable before the next starts."""
    async with journal(tmp_path) as made:
        operations, store = made.operations, made.store
        record = await operations.begin(KEY, "apply", {"spec": 1}, applied_spec=OWNED)
        assert store.commits == 1
        for number, name in enumerate(("a", "b", "c")):
            await operations.record_step_started(record.id, name, "idempotent")
            assert store.commits == 1 + number
            on_disk = made.on_disk(record.id)
            assert on_disk is not None
            durable = [step.name for step in on_disk.steps if step.state is StepState.DONE]
            assert durable == ["a", "b", "c"][:number]
            kept = await operations.record_step_done(
                record.id, name, "idempotent", {"n": (number,)}
            )
            assert kept == {"n": [number]}
            assert store.commits == 1 + number
        await operations.end(record.id, Ending.DONE)
        assert store.commits == 4
        assert operations.list_open() == []
        (past,) = (await operations.past_operations()).records
    assert [(step.name, step.data) for step in past.steps] == [
        ("a", {"n": [0]}),
        ("b", {"n": [1]}),
        ("c", {"n": [2]}),
    ]
    assert (past.ending, past.pinned) == (Ending.DONE, {"spec": 1})


async def test_a_once_step_is_durable_before_it_starts_and_when_it_is_done(
    tmp_path: Path,
) -> None:
    """A ONCE step costs one commit at each end, which includes the pending changes."""
    async with journal(tmp_path) as made:
        operations = made.operations
        record = await operations.begin(KEY, "apply", {})
        await operations.record_step_started(record.id, "a", "pure")
        await operations.record_step_done(record.id, "a", "pure")
        await operations.record_step_started(record.id, "b", "once")
        assert made.store.commits == 2
        on_disk = made.on_disk(record.id)
        assert on_disk is not None
        assert [(each.name, each.state) for each in on_disk.steps] == [
            ("a", StepState.DONE),
            ("b", StepState.STARTED),
        ]
        await operations.record_step_done(record.id, "b", "once", 7)
        assert made.store.commits == 3
        assert made.same()
        with pytest.raises(
            OnceStepStarted, match="from its first step: step b, which must run only once"
        ):
            await operations.reset_steps(record.id)


async def test_a_key_has_one_open_operation(tmp_path: Path) -> None:
    """A second one is refused while the first is being opened, open, or being closed."""
    async with journal(tmp_path, run=False) as made, trio.open_nursery() as nursery:
        operations = made.operations
        nursery.start_soon(operations.begin, KEY, "apply", {})
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(OperationAlreadyOpen, match="has the open operation apply"):
            await operations.begin(KEY, "apply", {})
        await nursery.start(made.store.run)
        await trio.testing.wait_all_tasks_blocked()
        while not operations.list_open():  # noqa: ASYNC110 - a thread brings it
            await trio.lowlevel.checkpoint()
        (record,) = operations.list_open()
        with pytest.raises(OperationAlreadyOpen):
            await operations.begin(KEY, "apply", {})
        await operations.end(record.id, Ending.FAILED)
        await operations.begin(KEY, "apply", {})
        nursery.cancel_scope.cancel(reason="test")


async def test_the_applied_spec_is_written_with_the_intent(tmp_path: Path) -> None:
    """One commit contains both, or neither."""
    async with journal(tmp_path) as made:
        await made.operations.begin(KEY, "apply", {}, applied_spec=OWNED)
        assert made.store.commits == 1
        assert made.store.incomplete_fingerprint(KEY) == "f"
        applied = await made.store.find_applied(KEY)
        assert applied is not None
        assert (applied.spec, applied.base, applied.complete) == (OWNED.spec, "/etc/x", False)


async def test_c02_a_recovery_is_counted_durably_and_reset_by_an_outcome(tmp_path: Path) -> None:
    """count_recovery() is durable when it returns; record_own_outcome() resets the count."""
    async with journal(tmp_path) as made:
        record = await made.operations.begin(KEY, "apply", {})
    elsewhere = HostIdentity("other boot", "other machine")
    async with journal(tmp_path, machine=elsewhere) as made:
        operations = made.operations
        found = operations.find_by_key(KEY)
        assert found == record
        assert (found.attempt, found.epoch, found.machine_id) == (1, 1, "machine")
        for recoveries in (1, 2):
            counted = await operations.count_recovery(record.id)
            assert made.on_disk(record.id) == counted
            assert (counted.attempt, counted.recoveries) == (1 + recoveries, recoveries)
        assert (counted.epoch, counted.boot_id) == (2, "other boot")
        await operations.record_own_outcome(record.id)
        assert (operations.list_open()[0].recoveries, operations.list_open()[0].attempt) == (0, 3)
        assert made.same()


async def test_a_hold_survives_restarts_until_it_is_resolved(tmp_path: Path) -> None:
    """A hold keeps its reason and evidence; a decision lifts it in one commit."""
    async with journal(tmp_path) as made:
        record = await made.operations.begin(KEY, "apply", {})
        await made.operations.hold(record.id, HOLD)
    async with journal(tmp_path) as made:
        operations = made.operations
        assert operations.list_open()[0].hold == HOLD
        before = made.store.commits
        await operations.resolve(record.id, Resolution.FORWARD, "root", "looked at it")
        assert made.store.commits == before + 1
        (found,) = operations.list_open()
        assert found.hold is None
        (note,) = found.notes
        assert (note.who, note.what, note.why) == ("root", "forward", "looked at it")
        assert made.same()


@pytest.mark.parametrize(
    ("decision", "ending"),
    [(Resolution.COMPLETE, Ending.COMPLETED), (Resolution.ABANDON, Ending.ABANDONED)],
)
async def test_complete_and_abandon_close_the_operation(
    tmp_path: Path, decision: Resolution, ending: Ending
) -> None:
    """Complete and abandon record the decision, close, and free the key in one commit."""
    async with journal(tmp_path) as made:
        operations = made.operations
        record = await operations.begin(KEY, "apply", {})
        await operations.hold(record.id, HOLD)
        before = made.store.commits
        await operations.resolve(record.id, decision, "root", "gone")
        assert made.store.commits == before + 1
        assert operations.find_by_key(KEY) is None
        (past,) = (await operations.past_operations(prefix=record.id[:12])).records
        assert (past.ending, past.hold, past.notes[0].why) == (ending, None, "gone")


async def test_a_compensation_closes_what_it_undoes_in_one_commit(tmp_path: Path) -> None:
    """Each names the other, and the key has one open operation at any time."""
    async with journal(tmp_path) as made:
        operations = made.operations
        first = await operations.begin(KEY, "apply", {"spec": 1})
        await operations.record_step_started(first.id, "a", "idempotent")
        await operations.record_step_done(first.id, "a", "idempotent")
        before = made.store.commits
        second = await operations.begin(KEY, "undo apply", {"spec": 1}, undoes=first.id)
        assert made.store.commits == before + 1
        assert operations.list_open() == [second]
        assert operations.find_by_key(KEY) == second
        (past,) = (await operations.past_operations()).records
        assert (past.ending, past.undone_by) == (Ending.ROLLED_BACK, second.id)
        assert second.undoes == first.id
        assert past.steps[0].name == "a"
        with pytest.raises(OperationUnknown):
            await operations.begin(KEY, "undo apply", {}, undoes=first.id)
        with pytest.raises(ValueError, match="is an operation of site/motd"):
            await operations.begin(Key("site/other"), "undo", {}, undoes=second.id)


async def test_reset_steps_deletes_the_steps(tmp_path: Path) -> None:
    """Without a ONCE step, the operation starts over, also on the disk."""
    async with journal(tmp_path) as made:
        record = await made.operations.begin(KEY, "apply", {})
        for name in ("a", "b"):
            await made.operations.record_step_started(record.id, name, "idempotent")
            await made.operations.record_step_done(record.id, name, "idempotent")
        await made.operations.reset_steps(record.id)
        assert made.operations.list_open()[0].steps == ()
        assert made.same()


async def test_a_cancelled_begin_leaves_nothing_open(tmp_path: Path) -> None:
    """An intent that was written all the same is closed as abandoned, and its key is free."""
    async with journal(tmp_path, run=False) as made, trio.open_nursery() as nursery:
        with trio.move_on_after(0):
            await made.operations.begin(KEY, "apply", {})
        assert made.operations.find_by_key(KEY) is not None
        await nursery.start(made.store.run)
        while made.operations.find_by_key(KEY) is not None:  # noqa: ASYNC110 - a thread brings it
            await trio.lowlevel.checkpoint()
        (past,) = (await made.operations.past_operations()).records
        assert past.ending is Ending.ABANDONED
        assert made.same()
        nursery.cancel_scope.cancel(reason="test")


async def test_a_cancelled_end_is_pending_until_it_is_durable(tmp_path: Path) -> None:
    """The key is blocked meanwhile, and no other call accepts the operation."""
    async with journal(tmp_path) as made:
        record = await made.operations.begin(KEY, "apply", {})
        with trio.move_on_after(0):
            await made.operations.end(record.id, Ending.DONE)
        assert made.operations.pending == (record,)
        with pytest.raises(OperationAlreadyOpen):
            await made.operations.begin(KEY, "apply", {})
        with pytest.raises(OperationUnknown):
            await made.operations.hold(record.id, HOLD)
        while made.operations.pending:  # noqa: ASYNC110 - a thread brings it
            await trio.lowlevel.checkpoint()
        assert made.on_disk(record.id) is None


async def test_a_closed_store_refuses_an_intent(tmp_path: Path) -> None:
    """An intent after the end of the writer is refused, and its key is not blocked."""
    async with journal(tmp_path) as made:
        pass
    with pytest.raises(NotJournaled, match="closed"):
        await made.operations.begin(KEY, "apply", {})
    assert made.operations.find_by_key(KEY) is None


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
async def test_a_value_that_json_cannot_express_is_refused(tmp_path: Path, value: Any) -> None:
    """It is refused before anything is written, and the key is not blocked."""
    async with journal(tmp_path) as made:
        with pytest.raises(TypeError):
            await made.operations.begin(KEY, "apply", value)
        record = await made.operations.begin(KEY, "apply", {})
        await made.operations.record_step_started(record.id, "a", "once")
        with pytest.raises(TypeError):
            await made.operations.record_step_done(record.id, "a", "once", value)
        assert made.same()


async def test_the_history_is_pruned_without_extra_commits(tmp_path: Path) -> None:
    """The commit that ends an operation deletes the oldest past ones beyond the limit."""
    async with journal(tmp_path, history=HistoryLimits(operations=10)) as made:
        ids = []
        for _ in range(30):
            record = await made.operations.begin(KEY, "apply", {})
            await made.operations.end(record.id, Ending.DONE)
            ids.append(record.id)
        assert made.store.commits == 60
        kept = await made.operations.past_operations(limit=1000)
        assert [each.id for each in kept.records] == ids[:-11:-1]


async def test_old_past_operations_are_deleted(tmp_path: Path) -> None:
    """The limit by age deletes PRUNE_BATCH operations with each that ends."""
    store = Store.open(tmp_path)
    time = 0.0
    operations = OperationJournal.load(
        store, history=HistoryLimits(age=100.0), identity=HERE, now=lambda: time
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for _ in range(20):
            record = await operations.begin(KEY, "apply", {})
            await operations.end(record.id, Ending.DONE)
        time = 101.0
        record = await operations.begin(KEY, "apply", {})
        await operations.end(record.id, Ending.DONE)
        assert len((await operations.past_operations()).records) == 17
        for _ in range(6):
            record = await operations.begin(KEY, "apply", {})
            await operations.end(record.id, Ending.DONE)
        past = (await operations.past_operations()).records
        assert [each.ended for each in past] == [101.0] * 7
        nursery.cancel_scope.cancel(reason="test")


async def test_a_damaged_past_row_is_left_out_and_counted(tmp_path: Path) -> None:
    """A damaged row of the history is neither used nor an error: no decision depends on it."""
    async with journal(tmp_path) as made:
        for _ in range(2):
            record = await made.operations.begin(KEY, "apply", {})
            await made.operations.end(record.id, Ending.DONE)
        await made.store.writer.read(
            lambda connection: connection.execute("UPDATE past SET ended = 0 WHERE seq = 1").close()
        )
        past = await made.operations.past_operations()
        assert ([each.id for each in past.records], past.damaged) == ([record.id], 1)


async def test_a_snapshot_contains_open_and_past_operations(tmp_path: Path) -> None:
    """Readers beside the daemon see steps, holds and past operations."""
    async with journal(tmp_path) as made:
        operations = made.operations
        over = await operations.begin(KEY, "apply", {})
        await operations.end(over.id, Ending.FAILED, "no such user")
        held = await operations.begin(KEY, "apply", {})
        await operations.record_step_started(held.id, "a", "once")
        await operations.hold(held.id, HOLD)
        with open_snapshot(tmp_path) as connection:
            assert connection is not None
            assert read_open(connection) == operations.list_open()
            (past,) = read_past(connection, 10).records
            assert read_past(connection, 10, over.id[:20]).records == (past,)
            assert read_past(connection, 10, "zz").records == ()
        assert (past.id, past.ending) == (over.id, Ending.FAILED)
        assert [note.why for note in past.notes] == ["no such user"]


async def test_a_critical_part_is_recorded_with_the_next_write(tmp_path: Path) -> None:
    """It costs no extra commit."""
    async with journal(tmp_path) as made:
        record = await made.operations.begin(KEY, "apply", {})
        made.operations.mark_critical(record.id)
        assert made.store.commits == 1
        await made.operations.record_step_started(record.id, "a", "once")
        found = made.on_disk(record.id)
        assert found is not None
        assert found.critical


async def test_the_history_keeps_no_long_inputs(tmp_path: Path) -> None:
    """The history keeps the short parts of a pinned spec, not the content of a file."""
    pinned = {"spec": {"content": "x" * 100_000}, "kind": "File", "fingerprint": "f"}
    async with journal(tmp_path) as made:
        record = await made.operations.begin(KEY, "apply", pinned)
        await made.operations.record_step_started(record.id, "a", "once")
        await made.operations.record_step_done(record.id, "a", "once", ["y" * 100_000])
        assert made.same()
        await made.operations.end(record.id, Ending.DONE)
        (past,) = (await made.operations.past_operations()).records
    assert past.pinned == {"kind": "File", "fingerprint": "f"}
    assert past.steps[0].data is None
