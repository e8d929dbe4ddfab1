"""The single writer of the store: batches writes into commits, and recovers from failed ones.

1. Every write goes through the one task ``run()``: all waiting writes are one transaction, one
   thread call and one sync. A caller's error reverts that caller's part only (a savepoint).
2. Changes in memory follow their commit, in the trio thread, and never happen without it.
3. A write that *must commit* (the outcome of something that has happened) is retried until it is
   durable, even if its caller is cancelled; any other write fails with its transaction.
4. While the store is unwritable, from a failed commit on, writes that need not commit are refused
   at once. That ends when a commit has succeeded, the reserve is allocated, and, after a failed
   sync, the store is in new files.
5. If the state directory is lost, another daemon may own what is at the path: nothing is changed by
   path any more, and the store is closed as a kill would leave it.
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
from reconciled.journal.sqlite.disk_reserve import Reserve
from reconciled.journal.sqlite.lifecycle import close_directory, exchange, reopen
from reconciled.journal.sqlite.schema import Meta
from reconciled.threads import in_thread

MAX_BATCH = 500  # writes in one transaction: limits how many fail with one commit
MIN_BACKOFF, MAX_BACKOFF = 0.1, 5.0  # seconds between two attempts while unwritable
_ENVIRONMENT_ERRORS = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}
)

Write = Callable[[sqlite3.Connection], Any]


def noop(*_: object) -> None:
    """The default of a callback: does nothing."""


@attrs.define(eq=False)
class PendingWrite:
    """One write that is not finished. failure and value are valid once finished is set.

    on_commit    called in the trio thread after the commit, before the caller is woken
    on_refused   called in the trio thread when this process will not commit it
    must_commit  retry until it is durable: its caller cannot take back what has happened
    """

    function: Write
    on_commit: Callable[[], None] = noop
    on_refused: Callable[[], None] = noop
    must_commit: bool = False
    finished: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    failure: Exception | None = None

    async def wait(self) -> Any:
        """Wait until it is finished; returns its value, or raises its failure."""
        await self.finished.wait()
        if self.failure is not None:
            raise self.failure
        return self.value


@attrs.define(eq=False)
class Writer:
    """Owns the connection.

    unwritable_reason   why only writes that must commit are accepted; empty: the store is writable
    commits             transactions that changed something
    on_writable_change  called in the trio thread with each new unwritable_reason
    state_lost          why the state directory is not this process's any more; empty: it is
    """

    connection: sqlite3.Connection
    directory: Path
    meta: Meta
    reserve: Reserve
    unwritable_reason: str = ""
    commits: int = 0
    on_writable_change: Callable[[str], None] = noop
    state_lost: Callable[[], str] = str
    # In order of arrival; a write is removed when it is finished.
    waiting: list[PendingWrite] = attrs.field(factory=list)
    _arrival: trio.Event = attrs.field(factory=trio.Event)
    _limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    # Guards the connection: between threads, and against close() at the end of run().
    _connection_lock: threading.Lock = attrs.field(factory=threading.Lock)
    _last_error_code: int = 0  # SQLite's primary code of the last failure
    _sync_failed: bool = False  # a sync failed, and the store is still in the old files
    _connection_closed: bool = False  # closed during an exchange that did not complete
    closed: bool = False

    def put(self, entry: PendingWrite) -> None:
        """Queue *entry*; it is committed even if the caller is cancelled. Raises StoreClosed.

        Raises WriteFailed while the store is unwritable, unless *entry* must commit.
        """
        if self.closed:
            raise StoreClosed("the store is closed")
        if self.unwritable_reason and not entry.must_commit:
            raise WriteFailed(self.unwritable_reason)
        self.waiting.append(entry)
        self._arrival.set()

    async def write(self, entry: PendingWrite) -> Any:
        """Queue *entry* and wait until it is finished; returns its value, or raises its failure."""
        try:
            self.put(entry)
        except (StoreClosed, WriteFailed):
            entry.on_refused()
            raise
        return await entry.wait()

    async def read(self, function: Write) -> Any:
        """Run *function* on the connection, in a thread between two transactions; its value.

        Works while the store is unwritable. Not cancellable while it runs. Raises the exception
        of *function*, StoreClosed, or NoThread.
        """
        return await in_thread(partial(self._read, function), limiter=self._limiter)

    def _read(self, function: Write) -> Any:
        with self._connection_lock:
            if self.closed:
                raise StoreClosed("the store is closed")
            return function(self.connection)

    async def run(self) -> None:
        """Write until cancelled; then commit the waiting writes and close the store."""
        try:
            while True:
                if self.unwritable_reason:
                    await self._retry_until_writable()
                await self._arrival.wait()
                await self._commit_batch()
        finally:
            # In this thread, since awaiting another one would need a shield: one short transaction.
            # No other transaction runs, since its thread is never abandoned. A short read may.
            self.close()

    def close(self) -> None:
        """Commit the waiting writes, refuse those that fail, and close; harmless twice. Blocks."""
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
            if self._connection_closed:
                return
            if self.state_lost():
                self.connection.close()  # its files are not at the path: SQLite removes none
            else:
                close_directory(self.connection, self.directory, self.meta)

    async def _commit_batch(self) -> bool:
        """Write the waiting writes in one transaction; whether it was committed."""
        batch = self.waiting[:MAX_BATCH]
        try:
            transact = partial(self._transact, batch)
            failure = await in_thread(transact, limiter=self._limiter)
        except NoThread as error:
            failure = self._record_failure(error)
        self._finish(batch, failure)
        return failure is None

    async def _retry_until_writable(self) -> None:
        """Repair and retry, with a growing delay, until the store is writable again."""
        self.on_writable_change(self.unwritable_reason)
        backoff = MIN_BACKOFF
        while True:
            try:
                whole = await in_thread(self._repair, limiter=self._limiter)
            except NoThread:
                whole = False
            written = await self._commit_batch()
            if written and whole and not self.waiting:
                break
            if written:  # only the reserve is missing: new writes that must commit do not wait
                with trio.move_on_after(backoff):
                    await self._arrival.wait()
            else:
                await trio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF)
        self.unwritable_reason = ""
        self.on_writable_change("")

    def _finish(
        self, batch: list[PendingWrite], failure: Exception | None, *, last: bool = False
    ) -> None:
        """Finish writes, in the trio thread. After a failure those that must commit stay queued."""
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
        """Run and commit *batch*; why that failed, after a rollback. Never raises."""
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
        """Run one caller's part. Raises only errors of the whole transaction, as a full disk."""
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
        failure = WriteFailed(f"the store cannot be written: {exc}")
        failure.__cause__ = exc
        return failure

    def _repair(self) -> bool:
        """Do what helps against the last failure; whether the repair is complete."""
        try:
            if self.state_lost():
                return False
            with self._connection_lock:
                if self._sync_failed:
                    self._exchange()
                if self._last_error_code == sqlite3.SQLITE_FULL:
                    self.reserve.release()
                    self._last_error_code = 0
                    return False  # made again by the next attempt, if there is space for it
                self.reserve.make()
        except (sqlite3.Error, OSError):
            return False
        return True

    def _exchange(self) -> None:
        """Replace the files by a copy, with the same content."""
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
    """Write something, so that the commit tests writing and syncing."""
    connection.execute("UPDATE meta SET sum = sum").close()


def _usable(connection: sqlite3.Connection) -> bool:
    try:
        connection.execute("SELECT 1").close()
    except sqlite3.ProgrammingError:  # it is closed
        return False
    return True


def _error_code(exc: BaseException) -> int:
    return getattr(exc, "sqlite_errorcode", 0) & 0xFF
