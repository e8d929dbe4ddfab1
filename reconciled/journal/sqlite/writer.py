"""The store's one writer: it commits for many at once, and gets through trouble.

1. Every write goes through the one task ``run()``: all that wait are one transaction, one
   thread hop and one sync. A caller's error undoes that caller's part alone (a savepoint).
2. What a commit means in memory happens after it, in the trio thread, and never without it.
3. A write that *insists* (the outcome of something that has happened) is tried until it is
   durable, whatever becomes of its caller; any other fails with the transaction.
4. From a failed commit on, whatever does not insist is refused at once, until a commit has
   succeeded, the reserve is there, and after a failed sync the store lies in new files.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.core.errors import NoThread, StoreClosed, WriteFailed
from reconciled.journal.sqlite.lifecycle import close_directory, exchange, reopen
from reconciled.journal.sqlite.reserve import Reserve
from reconciled.journal.sqlite.schema import Meta
from reconciled.threads import in_thread

MAX_BATCH = 500  # writes a transaction: bounds what one failed commit takes with it
MIN_BACKOFF, MAX_BACKOFF = 0.1, 5.0  # seconds between two attempts during trouble
_ENVIRONMENT_ERRORS = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}
)

Write = Callable[[sqlite3.Connection], Any]


def noop(*_: object) -> None:
    """What a write does, or means in memory, if it does or means nothing there."""


@attrs.define(eq=False)
class PendingWrite:
    """One write on its way. failure and value are valid once settled is set.

    committed  called in the trio thread after the commit, before the caller is woken
    refused    called there where it is known that it will not be committed by this process
    """

    function: Write
    on_commit: Callable[[], None] = noop
    on_refused: Callable[[], None] = noop
    must_commit: bool = False
    finished: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    failure: Exception | None = None

    async def wait(self) -> Any:
        """Wait until it is settled; its value, or its failure is raised."""
        await self.finished.wait()
        if self.failure is not None:
            raise self.failure
        return self.value


@attrs.define(eq=False)
class Writer:
    """Owns the connection. trouble: why only what insists is taken; empty: all is well.

    commits   transactions that changed something
    on_state  called in the trio thread with each new *trouble*
    """

    connection: sqlite3.Connection
    directory: Path
    meta: Meta
    reserve: Reserve
    unwritable_reason: str = ""
    commits: int = 0
    on_writable_change: Callable[[str], None] = noop
    # In order of arrival; a write leaves it only when it is settled.
    waiting: list[PendingWrite] = attrs.field(factory=list)
    _arrival: trio.Event = attrs.field(factory=trio.Event)
    _limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    # Whoever uses the connection: threads, one at a time, and the end of run() beside them.
    _connection_lock: threading.Lock = attrs.field(factory=threading.Lock)
    _last_error_code: int = 0  # SQLite's, of the last failure
    _sync_failed: bool = False  # a sync failed, and the store is still in the same files
    _connection_closed: bool = False  # the connection was closed on the way to new files
    closed: bool = False

    def put(self, entry: PendingWrite) -> None:
        """Queue *entry*; it is committed whatever becomes of the caller. Raises StoreClosed.

        Raises WriteFailed during trouble, unless it insists.
        """
        if self.closed:
            raise StoreClosed("the store is closed")
        if self.unwritable_reason and not entry.must_commit:
            raise WriteFailed(self.unwritable_reason)
        self.waiting.append(entry)
        self._arrival.set()

    async def write(self, entry: PendingWrite) -> Any:
        """Queue *entry* and wait until it is settled; its value, or its failure is raised."""
        try:
            self.put(entry)
        except (StoreClosed, WriteFailed):
            entry.on_refused()
            raise
        return await entry.wait()

    async def read(self, function: Write) -> Any:
        """Run *function* on the connection, between two transactions. Works during trouble.

        Not cancellable while it reads. Raises its exception, or StoreClosed.
        """
        return await in_thread(partial(self._read, function), limiter=self._limiter)

    def _read(self, function: Write) -> Any:
        with self._connection_lock:
            if self.closed:
                raise StoreClosed("the store is closed")
            return function(self.connection)

    async def run(self) -> None:
        """Write until cancelled; then commit what still waits, close the store and end."""
        try:
            while True:
                if self.unwritable_reason:
                    await self._retry_until_writable()
                await self._arrival.wait()
                await self._commit_batch()
        finally:
            # Inline, since nothing may be awaited here without a shield: one short transaction.
            # No transaction is at work: its thread is not abandoned. A read may be: it is short.
            self.close()

    def close(self) -> None:
        """Commit what waits and close; harmless twice. What could not be written is refused."""
        if self.closed:
            return
        while self.waiting:
            batch = self.waiting[:MAX_BATCH]
            failure = self._transact(batch)
            if failure is not None:
                self._repair()
                failure = self._transact(batch)
            self._finish(batch, failure, last=True)
        self.closed = True
        with self._connection_lock, contextlib.suppress(sqlite3.Error, OSError):
            if not self._connection_closed:
                close_directory(self.connection, self.directory, self.meta)

    async def _commit_batch(self) -> bool:
        """One transaction of what waits; whether it was committed."""
        batch = self.waiting[:MAX_BATCH]
        try:
            transact = partial(self._transact, batch)
            failure = await in_thread(transact, limiter=self._limiter)
        except NoThread as error:
            failure = self._record_failure(error)
        self._finish(batch, failure)
        return failure is None

    async def _retry_until_writable(self) -> None:
        """Get through trouble: mend, try, rest, until everything can be taken again."""
        self.on_writable_change(self.unwritable_reason)
        rest = MIN_BACKOFF
        while True:
            try:
                whole = await in_thread(self._repair, limiter=self._limiter)
            except NoThread:
                whole = False
            written = await self._commit_batch()
            if written and whole and not self.waiting:
                break
            if written:  # what insists is not kept waiting: only the reserve is missing
                with trio.move_on_after(rest):
                    await self._arrival.wait()
            else:
                await trio.sleep(rest)
            rest = min(2 * rest, MAX_BACKOFF)
        self.unwritable_reason = ""
        self.on_writable_change("")

    def _finish(
        self, batch: list[PendingWrite], failure: Exception | None, *, last: bool = False
    ) -> None:
        """Tell the callers; in the trio thread. After a failure what insists stays, in order."""
        if failure is None:
            del self.waiting[: len(batch)]
            done = batch
        else:
            self.unwritable_reason = self.unwritable_reason or str(failure)
            done = [entry for entry in self.waiting if last or not entry.must_commit]
            self.waiting = [entry for entry in self.waiting if entry.must_commit and not last]
            for entry in done:
                entry.failure = failure
        if not self.waiting:
            self._arrival = trio.Event()
        for entry in done:
            if entry.failure is None:
                entry.on_commit()
            else:
                entry.on_refused()
            entry.finished.set()

    def _transact(self, batch: list[PendingWrite]) -> Exception | None:
        """Run and commit *batch*; why that failed. Never raises, and of a failure nothing stays."""
        with self._connection_lock:
            connection = self.connection
            try:
                connection.execute("BEGIN IMMEDIATE").close()
                before = connection.total_changes
                for entry in batch:
                    self._run_in_savepoint(connection, entry)
                if self.unwritable_reason:
                    _probe(connection)
                connection.execute("COMMIT").close()
                self.commits += connection.total_changes != before
            except Exception as exc:  # noqa: BLE001 - the writer outlives any write
                with contextlib.suppress(sqlite3.Error):
                    if connection.in_transaction:
                        connection.execute("ROLLBACK").close()
                return self._record_failure(exc)
        return None

    def _run_in_savepoint(self, connection: sqlite3.Connection, entry: PendingWrite) -> None:
        """One caller's part. Raises only what concerns the whole transaction, as a full disk."""
        connection.execute("SAVEPOINT part").close()
        entry.failure = None
        try:
            entry.value = entry.function(connection)
        except Exception as exc:
            if not connection.in_transaction or _error_code(exc) in _ENVIRONMENT_ERRORS:
                raise
            connection.execute("ROLLBACK TO part").close()
            entry.failure = exc
        connection.execute("RELEASE part").close()

    def _record_failure(self, exc: Exception) -> WriteFailed:
        self._last_error_code = _error_code(exc)
        self._sync_failed |= self._last_error_code == sqlite3.SQLITE_IOERR
        failure = WriteFailed(f"the store could not be written: {exc}")
        failure.__cause__ = exc
        return failure

    def _repair(self) -> bool:
        """Do what helps against the last failure; whether nothing is left to be done."""
        try:
            with self._connection_lock:
                if self._sync_failed:
                    self._exchange()
                if self._last_error_code == sqlite3.SQLITE_FULL:
                    self.reserve.release()
                    self._last_error_code = 0
                    return False  # the next attempt shows whether there is room for it again
                self.reserve.make()
        except (sqlite3.Error, OSError):
            return False
        return True

    def _exchange(self) -> None:
        """Go on with new files. Nothing is taken back: the old ones have the same content."""
        if self._connection_closed:
            opened = reopen(self.directory)
        else:
            self._connection_closed = True
            try:
                opened = exchange(self.connection, self.directory, self.meta)
            except (sqlite3.Error, OSError):
                self._connection_closed = not _usable(self.connection)
                raise
        self.connection, self.meta = opened.connection, opened.meta
        self._connection_closed = self._sync_failed = False


def _probe(connection: sqlite3.Connection) -> None:
    """Write something, so that a commit says whether it can be written and synced."""
    connection.execute("UPDATE meta SET sum = sum").close()


def _usable(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT 1").close()
    except sqlite3.ProgrammingError:  # it is closed
        return False
    return True


def _error_code(exc: BaseException) -> int:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF
