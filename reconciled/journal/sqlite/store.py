"""The store: applied specs, sources and operations across starts, in SQLite, with one writer.

1. Exactly one process opens it, the holder of the state lock: SQLite can corrupt a write-ahead
   log that two connections write.
2. A write that returned is durable (WAL with synchronous=FULL).
3. The mirror in memory changes after the commit, in the trio thread, and never without it.
4. A schema newer than this program is refused before anything is written.
5. Damage is never repaired by a guess, and never silently: see integrity.py.
"""

from __future__ import annotations

import errno
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.core.errors import StoreClosed, StoreUnusable, WriteFailed
from reconciled.core.resources import Fingerprint, Key
from reconciled.journal.operation_record import AppliedSpec, OperationRecord
from reconciled.journal.sqlite.applied import (
    Applied,
    read_all_applied,
    read_applied_key,
    read_fingerprints,
    write_applied,
)
from reconciled.journal.sqlite.disk_reserve import Reserve
from reconciled.journal.sqlite.integrity import IntegrityReport
from reconciled.journal.sqlite.lifecycle import OpenedStore, open_directory
from reconciled.journal.sqlite.rows import checksum, read_open
from reconciled.journal.sqlite.schema import write_meta
from reconciled.journal.sqlite.writer import PendingWrite, Write, Writer

__all__ = [
    "Applied",
    "Store",
    "StoreClosed",
    "WriteFailed",
    "read_all_applied",
]


@attrs.define(eq=False)
class Store:
    """The open store; made by open(). integrity: the condition that was found."""

    writer: Writer
    integrity: IntegrityReport
    _now: Callable[[], float]
    # The mirror of the applied fingerprints: a run with nothing to do reads no disk.
    _complete: dict[Key, Fingerprint] = attrs.field(factory=dict)
    _incomplete: dict[Key, Fingerprint] = attrs.field(factory=dict)
    _identities: dict[tuple[str, str], str] = attrs.field(factory=dict)

    @classmethod
    def open(cls, state: Path, *, now: Callable[[], float] = time.time) -> Store:
        """Open or make ``STATE/store/``, migrate its schema, and begin the next epoch.

        Blocks, and is only for the holder of the state lock. A damaged store is set aside: see
        ``integrity``. On a full disk the reserve is released for it. Raises StoreTooNew or
        StoreUnusable.
        """
        directory = state / "store"
        reserve = Reserve(state / "reserve")
        opened, unwritable = _open_with_reserve(directory, reserve)
        try:
            writer = Writer(opened.connection, directory, opened.meta, reserve, unwritable)
            store = cls(writer, opened.integrity, now)
            store._read(opened.connection)
        except sqlite3.Error as exc:
            opened.connection.close()
            raise StoreUnusable(directory, str(exc)) from exc
        return store

    def _read(self, connection: sqlite3.Connection) -> None:
        for key, fingerprint, complete in read_fingerprints(connection):
            mirror = self._complete if complete else self._incomplete
            mirror[key] = fingerprint
        for controller, source, identity in connection.execute(
            "SELECT controller, source, identity FROM sources"
        ):
            self._identities[controller, source] = identity

    @property
    def epoch(self) -> int:
        """The number of this start; rises durably by one with each open()."""
        return self.writer.meta.epoch

    @property
    def commits(self) -> int:
        """Transactions that changed something since the start."""
        return self.writer.commits

    @property
    def unwritable_reason(self) -> str:
        """Why new intents are refused now; empty: the store can be written."""
        return self.writer.unwritable_reason

    @property
    def degraded(self) -> bool:
        """Whether it lacks some of what was done: from a set-aside until clear_degraded()."""
        return bool(self.writer.meta.degraded)

    @property
    def degraded_reason(self) -> str:
        """Why it is degraded, for people; empty: it is not."""
        return self.writer.meta.degraded

    async def clear_degraded(self, who: str, why: str) -> None:
        """Trust it again, by a person's decision; durable when this returns.

        Cancellation as in record_applied(). Raises StoreClosed.
        """
        settled = f"{self._now():.0f} {who}: {why}"

        def write(connection: sqlite3.Connection) -> None:
            write_meta(connection, meta())

        def meta() -> Any:
            return attrs.evolve(self.writer.meta, degraded="", settled=settled)

        def committed() -> None:
            self.writer.meta = meta()

        await self.writer.write(PendingWrite(write, committed, must_commit=True))

    def open_operations(self) -> list[OperationRecord]:
        """The open operations, oldest first, from the disk. Blocks: only for the start."""
        return read_open(self.writer.connection)

    def fingerprint(self, key: Key) -> Fingerprint | None:
        """The fingerprint of the spec that is applied; None while another one is begun."""
        return self._complete.get(key)

    def incomplete_fingerprint(self, key: Key) -> Fingerprint | None:
        """The fingerprint of the spec that was begun and is not complete; None: none."""
        return self._incomplete.get(key)

    def all_keys(self) -> set[Key]:
        """Every key with an applied spec, complete or not."""
        return self._complete.keys() | self._incomplete.keys()

    async def find_applied(self, key: Key) -> Applied | None:
        """The applied spec of *key*, read as by Writer.read(). Raises rows.RowDamaged."""
        applied: Applied | None = await self.writer.read(
            lambda connection: read_applied_key(connection, key)
        )
        return applied

    def source_identity(self, controller: str, source: str) -> str:
        """The last recorded identity of *source*; empty: none."""
        return self._identities.get((controller, source), "")

    def prepare_applied(
        self, key: Key, applied_spec: AppliedSpec, *, complete: bool
    ) -> tuple[Write, Callable[[], None]]:
        """A write that records *applied_spec* in a transaction, and what to call after the commit.

        Raises TypeError for a spec that JSON cannot express.
        """
        applied = Applied(
            key,
            applied_spec.kind,
            applied_spec.fingerprint,
            applied_spec.base,
            self._now(),
            complete,
            json.dumps(dict(applied_spec.spec)),
        )

        def committed() -> None:
            mirror, other = self._complete, self._incomplete
            if not complete:
                mirror, other = other, mirror
            mirror[key] = applied_spec.fingerprint
            other.pop(key, None)

        return lambda connection: write_applied(connection, applied), committed

    async def record_applied(  # noqa: PLR0913 - one argument for each column
        self,
        key: Key,
        kind: str,
        spec: Mapping[str, Any],
        fingerprint: Fingerprint,
        *,
        base: str,
        complete: bool,
    ) -> None:
        """Record that *spec* is begun (before its first effect) or complete.

        Returns when the record is durable. Cancelled, the write is done all the same. Raises
        TypeError for a spec that JSON cannot express, WriteFailed, StoreClosed.
        """
        applied = AppliedSpec(kind, dict(spec), fingerprint, base)
        write, on_commit = self.prepare_applied(key, applied, complete=complete)
        await self.writer.write(PendingWrite(write, on_commit))

    async def forget(self, key: Key) -> None:
        """Delete all that is recorded of *key* (invariant 14). Otherwise as record_applied()."""

        def committed() -> None:
            self._complete.pop(key, None)
            self._incomplete.pop(key, None)

        await self.writer.write(
            PendingWrite(
                lambda connection: connection.execute(
                    "DELETE FROM applied WHERE key = ?", (key,)
                ).close(),
                committed,
            )
        )

    async def set_source_identity(self, controller: str, source: str, identity: str) -> None:
        """Record the identity of the directory that *source* read; an unchanged one costs nothing.

        Cancellation and errors as in record_applied().
        """
        if self._identities.get((controller, source)) == identity:
            await trio.lowlevel.checkpoint()
            return
        columns = (controller, source, identity)
        await self.writer.write(
            PendingWrite(
                lambda connection: connection.execute(
                    "INSERT OR REPLACE INTO sources VALUES (?, ?, ?, ?)",
                    (*columns, checksum("sources", *columns)),
                ).close(),
                lambda: self._identities.__setitem__((controller, source), identity),
            )
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the writer. Cancelled, it commits the waiting writes and closes the store."""
        task_status.started()
        await self.writer.run()

    def close(self) -> None:
        """Close the store, if run() was never called; harmless twice."""
        self.writer.close()


def _open_with_reserve(directory: Path, reserve: Reserve) -> tuple[OpenedStore, str]:
    """Open the store, if necessary in the space of the reserve; and why intents are refused."""
    try:
        opened = open_directory(directory)
    except StoreUnusable as exc:
        if not _is_full(exc.__cause__) or not reserve.file.exists():
            raise
        reserve.release()
        opened = open_directory(directory)
    try:
        reserve.make()
    except OSError as exc:
        return opened, f"no disk space can be reserved to close open operations: {exc.strerror}"
    return opened, ""


def _is_full(cause: BaseException | None) -> bool:
    if isinstance(cause, sqlite3.Error):
        return getattr(cause, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
