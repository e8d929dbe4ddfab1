"""Operations as the store keeps them: intent first, each change durable when its call returns.

1. One open operation a key.
2. begin() has either made the intent durable or raised: the caller takes effect afterwards
   (invariant 3). It is the only call that can fail for want of a writable store.
3. Everything else insists: it waits until it is durable, and is written even if its caller is
   cancelled meanwhile. No effect may begin before the call that has to precede it returns.
4. A step that may be repeated is committed with the operation's next write: it is durable
   before the next step starts. Three such steps in a row are four commits.
5. The mirror in memory is at or ahead of the disk, never behind: what it shows as open or as
   held was open or held when its process ended, unless the write was still on its way.
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
    PURE,
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

PRUNE_BATCH = 4  # past operations that may go with each that ends: more than come
_ENDING_OF = {Resolution.COMPLETE: Ending.COMPLETED, Resolution.ABANDON: Ending.ABANDONED}


@attrs.frozen
class HistoryLimits:
    """How much of what is over is kept: so many operations, none that ended *age* seconds ago."""

    operations: int = 100_000
    age: float = 90 * 86400.0


@attrs.define(eq=False)
class OperationJournal:
    """The operations of one store; made by over(). All ids are those of open operations."""

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
        """The operations in *store*, the open ones read. Synchronous: for the start."""
        made = cls(
            store,
            identity or HostIdentity.current(),
            history or HistoryLimits(),
            now,
            OperationIds(now),
        )
        for record in store.open_operations():
            made._mirror.add(record)
        return made

    @property
    def epoch(self) -> int:
        """The number of this start."""
        return self._store.epoch

    @property
    def pending(self) -> tuple[OperationRecord, ...]:
        """Operations that are over while their outcome is not durable: their keys stay blocked.

        Not empty after the store has closed: those outcomes are lost, and will be found as
        interrupted by the next start.
        """
        return self._mirror.pending()

    def list_open(self) -> list[OperationRecord]:
        """The open operations, oldest first. No I/O."""
        return self._mirror.list_open()

    def find(self, operation: str) -> OperationRecord | None:
        """The open operation of that id. No I/O."""
        return self._mirror.find(operation)

    def is_closing(self, operation: str) -> bool:
        """Whether it is over, and its outcome not durable yet. No I/O."""
        return any(record.id == operation for record in self._mirror.pending())

    def find_by_key(self, key: Key) -> OperationRecord | None:
        """The open operation of *key*, one whose intent is on its way included. No I/O."""
        return self._mirror.find_by_key(key)

    async def past_operations(self, limit: int = 100, prefix: str = "") -> PastOperations:
        """The last *limit* operations that ended, of those whose id begins with *prefix*."""
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
        """Open an operation, and note what its key owns from now on; one commit.

        With *undoes* the same commit closes that operation as rolled back. Raises OperationOpen,
        OperationUnknown or ValueError for *undoes*, NotJournaled, TypeError for what JSON cannot
        express.
        Cancelled while it waits: if it is written all the same, its operation is closed again as
        abandoned, for nobody took effect.
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
        entry = intent.entry()
        try:
            await self._store.writer.write(entry)
        except (WriteFailed, StoreClosed) as exc:
            raise NotJournaled(str(exc)) from exc
        except trio.Cancelled:
            intent.abandon()
            raise
        return record

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
        """Note that *step* starts, after what is pending of the steps before it is durable.

        Durable itself for a ONCE step, and for one with effects that is *undoable*: what was
        not noted would not be taken back. Any other that was started may simply run again.
        Raises OperationUnknown, StoreClosed. Cancelled, it may have been noted or not.
        """
        live = self._get_open(operation)
        pending = bool(live.unwritten_steps)
        self._record_step(
            live, StepRecord(step, kind, StepState.STARTED, attempt=live.record.attempt)
        )
        if pending or kind == ONCE or (undoable and kind != PURE):
            live.unwritten_steps.add(step)
            await self._flush(live)
        else:
            await trio.lowlevel.checkpoint()

    async def record_step_done(self, operation: str, step: str, kind: str, data: Any = None) -> Any:
        """Note that *step* is done; *data* is given back as JSON keeps it.

        Durable at once for a ONCE step, for others with the operation's next write. Raises
        TypeError for what JSON cannot express, OperationUnknown, StoreClosed.
        """
        live = self._get_open(operation)
        kept = rows.normalize_json(data)
        self._record_step(live, StepRecord(step, kind, StepState.DONE, kept, live.record.attempt))
        live.unwritten_steps.add(step)
        if kind == ONCE:
            await self._flush(live)
        else:
            await trio.lowlevel.checkpoint()
        return kept

    def mark_critical(self, operation: str) -> None:
        """Note that one of its parts is critical; durable with its next write."""
        live = self._get_open(operation)
        if not live.record.critical:
            live.record = attrs.evolve(live.record, critical=True)
            live.changed = True

    async def end(self, operation: str, ending: Ending, note: str = "") -> None:
        """Close an operation, in one commit with what is pending of it; *note* says why.

        Cancelled, it is written all the same, and is in ``pending`` until then. Raises
        OperationUnknown, StoreClosed.
        """
        if note:
            live = self._get_open(operation)
            added = Note(self._now(), "", ending.value, note)
            live.record = attrs.evolve(live.record, notes=(*live.record.notes, added))
        await self._close(operation, ending).wait()

    async def flush(self, operation: str) -> None:
        """Make durable what is pending of an operation that nobody goes on with for now."""
        live = self._get_open(operation)
        if live.unwritten_steps or live.changed:
            await self._flush(live)
        else:
            await trio.lowlevel.checkpoint()

    async def count_recovery(self, operation: str) -> OperationRecord:
        """Count a recovery before any of its code runs: a further attempt, of this start.

        A person's word is used up by that: it is for one attempt.
        """
        live = self._get_open(operation)
        record = live.record
        notes = record.notes
        if record.pending_resolution:
            notes = (
                *notes,
                Note(self._now(), "", f"attempt {record.attempt + 1}", record.pending_resolution),
            )
        self._change(
            live,
            notes=notes,
            attempt=record.attempt + 1,
            recoveries=record.recoveries + 1,
            epoch=self._store.epoch,
            boot_id=self._identity.boot_id,
            machine_id=self._identity.machine_id,
        )
        await self._flush(live)
        return live.record

    async def record_own_outcome(self, operation: str) -> None:
        """An attempt ended by a word of its own, even an error: the count starts again."""
        live = self._get_open(operation)
        if live.record.recoveries:
            self._change(live, recoveries=0)
            await self._flush(live)
        else:
            await trio.lowlevel.checkpoint()

    async def reset_steps(self, operation: str) -> None:
        """Forget all its steps. Raises OnceBegan if one of them must run once only."""
        live = self._get_open(operation)
        if live.record.started_once_step:
            record = live.record
            raise OnceStepStarted(record.name, record.id, record.started_once_step)
        live.record = attrs.evolve(live.record, steps=())
        live.unwritten_steps.clear()
        await self._flush(live, first=lambda c: rows.delete_steps(c, operation))

    async def hold(self, operation: str, hold: Hold) -> None:
        """Leave it to a person."""
        live = self._get_open(operation)
        self._change(live, hold=hold)
        await self._flush(live)

    async def unhold(self, operation: str) -> None:
        """Lift the hold, and begin to count anew."""
        live = self._get_open(operation)
        self._change(live, hold=None, recoveries=0)
        await self._flush(live)

    async def resolve(self, operation: str, resolution: Resolution, who: str, why: str) -> None:
        """Note a person's decision, lift the hold and, where it says so, close; one commit."""
        live = self._get_open(operation)
        note = Note(self._now(), who, resolution.value, why)
        self._change(live, hold=None, recoveries=0, notes=(*live.record.notes, note))
        if resolution in _ENDING_OF:
            await self.end(operation, _ENDING_OF[resolution])
        else:
            await self._flush(live)

    def _prune_past(self, connection: sqlite3.Connection, most: int) -> int:
        older = self._now() - self._history.age
        return rows.prune(connection, self._history.operations, older, most)

    def _get_open(self, operation: str) -> OpenEntry:
        return self._mirror.get(operation)

    def _record_step(self, live: OpenEntry, step: StepRecord) -> None:
        live.record = live.record.with_step(step)

    def _change(self, live: OpenEntry, **changes: Any) -> None:
        live.record = attrs.evolve(live.record, **changes)
        live.changed = True

    async def _flush(self, live: OpenEntry, first: Write | None = None) -> None:
        """Make everything of *live* durable, *first* before it, in one commit."""
        record, steps, changed = live.record, sorted(live.unwritten_steps), live.changed
        live.unwritten_steps.clear()
        live.changed = False

        def write(connection: sqlite3.Connection) -> None:
            if first is not None:
                first(connection)
            for step in steps:
                rows.write_step(connection, record, step)
            if changed:
                rows.write_state(connection, record)

        entry = PendingWrite(write, must_commit=True)
        self._store.writer.put(entry)
        await entry.wait()

    def _close(self, operation: str, ending: Ending) -> PendingWrite:
        live = self._get_open(operation)
        ended = self._ended(live.record, ending)
        entry = PendingWrite(
            lambda connection: self._move_to_past(connection, ended),
            lambda: self._mirror.remove(operation),
            must_commit=True,
        )
        live.ending = ending
        self._store.writer.put(entry)
        return entry

    def _ended(self, record: OperationRecord, ending: Ending) -> OperationRecord:
        return attrs.evolve(record, ending=ending, ended=self._now())

    def _move_to_past(self, connection: sqlite3.Connection, ended: OperationRecord) -> None:
        rows.move_to_past(connection, ended)
        self._prune_past(connection, PRUNE_BATCH)


# -- The intent of an operation on its way to the disk, with what goes there in the same commit.


@attrs.define(eq=False)
class IntentWrite:
    """One operation that is being opened.

    undone      the one that it takes back, which the same commit closes
    closed      that one as it is closed
    own         what else the commit writes: what the key owns from now on
    remembered  what that means in memory
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

    def entry(self) -> PendingWrite:
        """Its write. From here on the undone one is closing."""
        if self.undone is not None:
            self.undone.ending = Ending.ROLLED_BACK
        return PendingWrite(self._write, self._on_commit, self._on_refused)

    def abandon(self) -> None:
        """Nobody waits for it any more: it is closed as soon as it is open."""
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
