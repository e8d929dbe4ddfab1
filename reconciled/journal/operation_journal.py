"""Operations in the store: the intent comes first, and a change is durable when its call returns.

1. A key has at most one open operation.
2. begin() either makes the intent durable or raises; the caller takes effect afterwards
   (invariant 3). It is the only call that fails while the store cannot be written.
3. Every other call waits until its write is durable; the write is done even if the caller is
   cancelled meanwhile. No effect may begin before the call that has to precede it returns.
4. A step that may be repeated is committed with the operation's next write: it is durable
   before the next step starts. Three such steps in a row are four commits.
5. The mirror in memory is at or ahead of the disk, never behind: an operation that it showed as
   open or held is open or held on the disk, unless the write was not complete.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

import attrs
import trio

from reconciled.core.errors import NotJournaled, OnceStepStarted, StoreClosed, WriteFailed
from reconciled.core.resources import Key
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.open_operations import OpenEntry, OpenOperations
from reconciled.journal.operation_ids import OperationIds
from reconciled.journal.operation_record import (
    ONCE,
    OWN_REQUEST,
    PURE,
    RETRIED,
    AppliedSpec,
    Ending,
    Hold,
    Note,
    OperationRecord,
    Resolution,
    StepRecord,
    StepState,
)
from reconciled.journal.sqlite import rows
from reconciled.journal.sqlite.rows import PastOperations
from reconciled.journal.sqlite.store import Store
from reconciled.journal.sqlite.writer import PendingWrite, Write, noop

PRUNE_BATCH = 4  # past operations removed with each that ends: more than are added
_ENDING_OF = {Resolution.COMPLETE: Ending.COMPLETED, Resolution.ABANDON: Ending.ABANDONED}


@attrs.frozen
class HistoryLimits:
    """How many past operations are kept, and for how many seconds after their end."""

    operations: int = 100_000
    age: float = 90 * 86400.0


@attrs.define(eq=False)
class OperationJournal:
    """The operations of one store; made by load(). Methods take ids of open operations."""

    _store: Store
    _identity: HostIdentity
    _history: HistoryLimits
    _now: Callable[[], float]
    _ids: OperationIds
    _mirror: OpenOperations = attrs.field(factory=OpenOperations)

    @classmethod
    def load(
        cls,
        store: Store,
        *,
        history: HistoryLimits | None = None,
        identity: HostIdentity | None = None,
        now: Callable[[], float] = time.time,
    ) -> OperationJournal:
        """The journal in *store*; reads the open operations. Blocks: only for the start."""
        journal = cls(
            store,
            identity or HostIdentity.current(),
            history or HistoryLimits(),
            now,
            OperationIds(now),
        )
        for record in store.open_operations():
            journal._mirror.add(record)
        return journal

    @property
    def epoch(self) -> int:
        """The number of this start."""
        return self._store.epoch

    @property
    def pending(self) -> tuple[OperationRecord, ...]:
        """Operations that have ended while their outcome is not durable: their keys are blocked.

        Those that are left after the store was closed have lost their outcome: the next start
        finds them interrupted.
        """
        return self._mirror.pending()

    def list_open(self) -> list[OperationRecord]:
        """The open operations, oldest first. No I/O."""
        return self._mirror.list_open()

    def find(self, operation: str) -> OperationRecord | None:
        """The open operation of that id; None: none. No I/O."""
        return self._mirror.find(operation)

    def is_closing(self, operation: str) -> bool:
        """Whether it has ended, and its outcome is not durable yet. No I/O."""
        return any(record.id == operation for record in self._mirror.pending())

    def find_by_key(self, key: Key) -> OperationRecord | None:
        """The open operation of *key*, also one whose intent is being written. No I/O."""
        return self._mirror.find_by_key(key)

    async def past_operations(self, limit: int = 100, prefix: str = "") -> PastOperations:
        """The last *limit* past operations whose id begins with *prefix*, newest first."""
        found: PastOperations = await self._store.writer.read(
            lambda connection: rows.read_past(connection, limit, prefix)
        )
        return found

    async def begin(
        self,
        key: Key,
        name: str,
        pinned: Any,
        *,
        undoes: str = "",
        applied_spec: AppliedSpec | None = None,
    ) -> OperationRecord:
        """Open an operation, and record what its key owns from now on, in one commit.

        With *undoes*, the same commit closes that operation as rolled back. Raises
        OperationAlreadyOpen, OperationUnknown or ValueError for *undoes*, NotJournaled, and
        TypeError for *pinned* that JSON cannot express. Cancelled before its intent is written,
        the operation is closed as abandoned after the write, since nothing has taken effect.
        """
        undone = self._get_open(undoes) if undoes else None
        if undone is not None and undone.record.key != key:
            raise ValueError(f"{undoes} is an operation of {undone.record.key}, not of {key}")
        record = self._record(key, name, pinned, undoes)
        intent = IntentWrite(record, undone, self._mirror, self._move_to_past, self._close)
        if undone is not None:
            intent.closed_record = self._ended(
                attrs.evolve(undone.record, undone_by=record.id), Ending.ROLLED_BACK
            )
        if applied_spec is not None:
            intent.applied_write, intent.on_applied = self._store.prepare_applied(
                key, applied_spec, complete=False
            )
        self._mirror.reserve_key(record)
        pending_write = intent.pending_write()
        try:
            await self._store.writer.write(pending_write)
        except (WriteFailed, StoreClosed) as exc:
            raise NotJournaled(str(exc)) from exc
        except trio.Cancelled:
            intent.abandon()
            raise
        return record

    async def restore(self, record: OperationRecord) -> None:
        """Open *record*, which an earlier store contained, with its id and its hold.

        Raises OperationAlreadyOpen, WriteFailed, StoreClosed.
        """
        self._mirror.reserve_key(record)

        def write(connection: sqlite3.Connection) -> None:
            rows.insert(connection, record)
            rows.write_state(connection, record)

        await self._store.writer.write(
            PendingWrite(
                write,
                lambda: self._mirror.add(record),
                lambda: self._mirror.release_key(record, None),
            )
        )

    def _record(self, key: Key, name: str, pinned: Any, undoes: str) -> OperationRecord:
        return OperationRecord(
            self._ids.new(),
            key,
            name,
            attempt=1,
            epoch=self._store.epoch,
            pinned=rows.normalize_json(pinned),
            begun=self._now(),
            undoes=undoes,
            boot_id=self._identity.boot_id,
            machine_id=self._identity.machine_id,
        )

    async def record_step_started(
        self, operation: str, step: str, kind: str, *, undoable: bool = False
    ) -> None:
        """Record that *step* starts, once every earlier step is durable.

        The record itself is durable for a ONCE step, and for an *undoable* step with effects:
        without it, the step would not be undone. Any other started step may be repeated.
        Raises OperationUnknown, StoreClosed. Cancelled, the record may or may not be written.
        """
        entry = self._get_open(operation)
        pending = bool(entry.unwritten_steps)
        self._record_step(
            entry, StepRecord(step, kind, StepState.STARTED, attempt=entry.record.attempt)
        )
        if pending or kind == ONCE or (undoable and kind != PURE):
            entry.unwritten_steps.add(step)
            await self._flush(entry)
        else:
            await trio.lowlevel.checkpoint()

    async def record_step_done(self, operation: str, step: str, kind: str, data: Any = None) -> Any:
        """Record that *step* is done; returns *data* as JSON restores it.

        Durable at once for a ONCE step, otherwise with the operation's next write. Raises
        TypeError for data that JSON cannot express, OperationUnknown, StoreClosed.
        """
        entry = self._get_open(operation)
        kept = rows.normalize_json(data)
        self._record_step(entry, StepRecord(step, kind, StepState.DONE, kept, entry.record.attempt))
        entry.unwritten_steps.add(step)
        if kind == ONCE:
            await self._flush(entry)
        else:
            await trio.lowlevel.checkpoint()
        return kept

    def mark_critical(self, operation: str) -> None:
        """Record that one of its parts is critical; durable with its next write."""
        entry = self._get_open(operation)
        if not entry.record.critical:
            entry.record = attrs.evolve(entry.record, critical=True)
            entry.changed = True

    async def end(self, operation: str, ending: Ending, note: str = "") -> None:
        """Close an operation, in one commit with its pending changes; *note* is the reason.

        Cancelled, the write is done all the same, and the operation is in ``pending`` until then.
        Raises OperationUnknown, StoreClosed.
        """
        if note:
            entry = self._get_open(operation)
            added = Note(self._now(), "", ending.value, note)
            entry.record = attrs.evolve(entry.record, notes=(*entry.record.notes, added))
        await self._close(operation, ending).wait()

    async def flush(self, operation: str) -> None:
        """Make the pending changes of an operation durable, when no attempt continues it."""
        entry = self._get_open(operation)
        if entry.unwritten_steps or entry.changed:
            await self._flush(entry)
        else:
            await trio.lowlevel.checkpoint()

    async def note_own_request(self, operation: str, verb: str) -> None:
        """Note that a program of the operation requested *verb* of the daemon, once an attempt.

        Does nothing where the operation has ended meanwhile.
        """
        record = self.find(operation)
        if record is None or self.is_closing(operation) or record.own_request:
            return
        entry = self._get_open(operation)
        note = Note(self._now(), "", OWN_REQUEST, f"{verb} in attempt {record.attempt}")
        self._change(entry, notes=(*entry.record.notes, note))
        await self._flush(entry)

    async def count_recovery(self, operation: str, *, progressed: bool = False) -> OperationRecord:
        """Count a recovery, durably, before any of its code runs: one more attempt, in this epoch.

        *progressed*: the last attempt does not count, since it did a new step or was not
        interrupted. This uses up a person's decision, which is for one attempt.
        """
        entry = self._get_open(operation)
        record = entry.record
        notes = record.notes
        if record.pending_resolution:
            notes = (
                *notes,
                Note(self._now(), "", f"attempt {record.attempt + 1}", record.pending_resolution),
            )
        self._change(
            entry,
            notes=notes,
            attempt=record.attempt + 1,
            recoveries=1 if progressed else record.recoveries + 1,
            epoch=self._store.epoch,
            boot_id=self._identity.boot_id,
            machine_id=self._identity.machine_id,
        )
        await self._flush(entry)
        return entry.record

    async def record_own_outcome(self, operation: str) -> None:
        """Reset the count of recoveries: an attempt completed, even with an error."""
        entry = self._get_open(operation)
        if entry.record.recoveries:
            self._change(entry, recoveries=0)
            await self._flush(entry)
        else:
            await trio.lowlevel.checkpoint()

    async def reset_steps(self, operation: str) -> None:
        """Delete all its steps. Raises OnceStepStarted if one of them is a ONCE step."""
        entry = self._get_open(operation)
        if entry.record.started_once_step:
            record = entry.record
            raise OnceStepStarted(record.name, record.id, record.started_once_step)
        if not entry.record.retried:
            note = Note(self._now(), "", RETRIED, "its steps run again")
            self._change(entry, notes=(*entry.record.notes, note))
        entry.record = attrs.evolve(entry.record, steps=())
        entry.unwritten_steps.clear()
        await self._flush(entry, first=lambda c: rows.delete_steps(c, operation))

    async def hold(self, operation: str, hold: Hold) -> None:
        """Hold it for a person's decision."""
        entry = self._get_open(operation)
        self._change(entry, hold=hold)
        await self._flush(entry)

    async def unhold(self, operation: str, *, keep_count: bool = False) -> None:
        """Lift the hold, and reset the count of recoveries unless *keep_count*."""
        entry = self._get_open(operation)
        recoveries = entry.record.recoveries if keep_count else 0
        self._change(entry, hold=None, recoveries=recoveries)
        await self._flush(entry)

    async def resolve(self, operation: str, resolution: Resolution, who: str, why: str) -> None:
        """Record a person's decision, lift the hold and close it if that is decided; one commit."""
        entry = self._get_open(operation)
        note = Note(self._now(), who, resolution.value, why)
        self._change(entry, hold=None, recoveries=0, notes=(*entry.record.notes, note))
        if resolution in _ENDING_OF:
            await self.end(operation, _ENDING_OF[resolution])
        else:
            await self._flush(entry)

    def _prune_past(self, connection: sqlite3.Connection) -> None:
        ended_before = self._now() - self._history.age
        rows.prune(connection, self._history.operations, ended_before, PRUNE_BATCH)

    def _get_open(self, operation: str) -> OpenEntry:
        return self._mirror.get(operation)

    def _record_step(self, entry: OpenEntry, step: StepRecord) -> None:
        entry.record = entry.record.with_step(step)

    def _change(self, entry: OpenEntry, **changes: Any) -> None:
        entry.record = attrs.evolve(entry.record, **changes)
        entry.changed = True

    async def _flush(self, entry: OpenEntry, first: Write | None = None) -> None:
        """Make all pending changes of *entry* durable, *first* before them, in one commit."""
        record, steps, changed = entry.record, sorted(entry.unwritten_steps), entry.changed
        entry.unwritten_steps.clear()
        entry.changed = False

        def write(connection: sqlite3.Connection) -> None:
            if first is not None:
                first(connection)
            for step in steps:
                rows.write_step(connection, record, step)
            if changed:
                rows.write_state(connection, record)

        pending_write = PendingWrite(write, must_commit=True)
        self._store.writer.put(pending_write)
        await pending_write.wait()

    def _close(self, operation: str, ending: Ending) -> PendingWrite:
        entry = self._get_open(operation)
        ended = self._ended(entry.record, ending)
        pending_write = PendingWrite(
            lambda connection: self._move_to_past(connection, ended),
            lambda: self._mirror.remove(operation),
            must_commit=True,
        )
        entry.ending = ending
        self._store.writer.put(pending_write)
        return pending_write

    def _ended(self, record: OperationRecord, ending: Ending) -> OperationRecord:
        return attrs.evolve(record, ending=ending, ended=self._now())

    def _move_to_past(self, connection: sqlite3.Connection, ended: OperationRecord) -> None:
        rows.move_to_past(connection, ended)
        self._prune_past(connection)


@attrs.define(eq=False)
class IntentWrite:
    """The intent of an operation while it is being written, and what the same commit writes.

    undone         the operation that it undoes, which the commit closes
    closed_record  that operation as it is closed
    applied_write  writes what the key owns from now on
    on_applied     applies that to the mirror of the store
    """

    record: OperationRecord
    undone: OpenEntry | None
    _mirror: OpenOperations
    _move: Callable[[sqlite3.Connection, OperationRecord], None]
    _close: Callable[[str, Ending], Any]
    closed_record: OperationRecord | None = None
    applied_write: Write = noop
    on_applied: Callable[[], None] = noop
    _abandoned: bool = False

    def pending_write(self) -> PendingWrite:
        """The write. From here on the undone operation is closing."""
        if self.undone is not None:
            self.undone.ending = Ending.ROLLED_BACK
        return PendingWrite(self._write, self._on_commit, self._on_refused)

    def abandon(self) -> None:
        """The caller was cancelled: close the operation as soon as it is open."""
        self._abandoned = True
        if self._mirror.find(self.record.id) is not None:
            self._close(self.record.id, Ending.ABANDONED)

    def _write(self, connection: sqlite3.Connection) -> None:
        if self.closed_record is not None:
            self._move(connection, self.closed_record)
        rows.insert(connection, self.record)
        self.applied_write(connection)

    def _on_commit(self) -> None:
        self.on_applied()
        self._mirror.add(self.record)
        if self.closed_record is not None:
            self._mirror.remove(self.closed_record.id)
        if self._abandoned:
            self._close(self.record.id, Ending.ABANDONED)

    def _on_refused(self) -> None:
        self._mirror.release_key(self.record, self.undone)
        if self.undone is not None:
            self.undone.ending = None
