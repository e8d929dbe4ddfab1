"""The store: what was applied, in SQLite, with one writer that commits for many at once.

1. Exactly one process opens it, the holder of the state lock: SQLite can corrupt a write-ahead
   log that two connections write.
2. A write that returned is durable (WAL with synchronous=FULL).
3. Every write goes through the one task ``run()``: all that wait are one transaction, one
   thread hop and one sync. A caller's error undoes that caller's part alone (a savepoint); an
   error of the commit fails all of them.
4. The mirror in memory changes after the commit, in the trio thread, and never without it.
5. A schema newer than this program is refused before anything is written.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.core.resources import Fingerprint, Key, controller_of
from reconciled.journal import schema

MOST_AT_ONCE = 500  # writes a transaction: bounds what one failed commit takes with it

_APPLIED = "SELECT key, kind, fingerprint, base, at, complete, spec FROM applied"

Write = Callable[[sqlite3.Connection], Any]


class StoreClosed(Exception):
    """The store takes no more writes: the daemon is at its end."""


class WriteFailed(Exception):
    """A transaction could not be committed; nothing of it is there. str() says why."""


@attrs.frozen
class Applied:
    """What the store knows about one key.

    fingerprint  of the spec below
    complete     False from before the first effect of that spec until it was done: some of it
                 may have been applied
    base         the directory of the manifest
    at           wall time of the last change of this row, in seconds, for people
    """

    key: Key
    kind: str
    fingerprint: Fingerprint
    base: str
    at: float
    complete: bool
    _spec: str

    @property
    def spec(self) -> dict[str, Any]:
        """The last spec, as plain data. Parsed at each call: most are never looked at."""
        spec: dict[str, Any] = json.loads(self._spec)
        return spec


def read_applied(connection: sqlite3.Connection, controller: str) -> dict[Key, Applied]:
    """Everything that a store remembers of *controller*, by key and in order of keys."""
    rows = connection.execute(
        f"{_APPLIED} WHERE key > ? AND key < ? ORDER BY key",
        (f"{controller}/", f"{controller}0"),  # "0" is the character after "/"
    )
    return {row[0]: _applied(row) for row in rows}


def read_all_applied(connection: sqlite3.Connection) -> dict[str, dict[Key, Applied]]:
    """Everything that a store remembers, by controller and key."""
    found: dict[str, dict[Key, Applied]] = {}
    for row in connection.execute(f"{_APPLIED} ORDER BY key"):
        found.setdefault(controller_of(row[0]), {})[row[0]] = _applied(row)
    return found


def _applied(row: Sequence[Any]) -> Applied:
    key, kind, fingerprint, base, at, complete, spec = row
    return Applied(key, kind, fingerprint, base, at, bool(complete), spec)


@attrs.define(eq=False)
class _Waiting:
    """One write on its way. failure and value are valid once settled is set."""

    function: Write
    committed: Callable[[], None]
    settled: trio.Event = attrs.field(factory=trio.Event)
    value: Any = None
    failure: Exception | None = None


@attrs.define(eq=False)
class Store:
    """The open store; made by open().

    epoch      rises by one with every open, durably
    commits    transactions committed since then
    """

    _connection: sqlite3.Connection
    epoch: int
    _now: Callable[[], float]
    commits: int = 0
    # The mirror: what is remembered, so that a run with nothing to do writes nothing.
    _complete: dict[Key, Fingerprint] = attrs.field(factory=dict)
    _begun: dict[Key, Fingerprint] = attrs.field(factory=dict)
    _identities: dict[tuple[str, str], str] = attrs.field(factory=dict)
    # In order of arrival; a write leaves it only when it is settled.
    _waiting: list[_Waiting] = attrs.field(factory=list)
    _arrival: trio.Event = attrs.field(factory=trio.Event)
    _closed: bool = False

    @classmethod
    def open(cls, state: Path, *, now: Callable[[], float] = time.time) -> Store:
        """Open or make ``STATE/store/``, bring its schema up, and begin the next epoch.

        Synchronous, and only for the holder of the state lock. Raises schema.StoreTooNew or
        schema.StoreUnusable.
        """
        connection = schema.open_store(state / "store")
        try:
            return cls._read(connection, now)
        except sqlite3.Error as exc:
            connection.close()
            raise schema.StoreUnusable(state / "store", str(exc)) from exc

    @classmethod
    def _read(cls, connection: sqlite3.Connection, now: Callable[[], float]) -> Store:
        connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'epoch'").close()
        (epoch,) = connection.execute("SELECT value FROM meta WHERE name = 'epoch'").fetchone()
        store = cls(connection, epoch, now)
        for key, fingerprint, complete in connection.execute(
            "SELECT key, fingerprint, complete FROM applied"
        ):
            mirror = store._complete if complete else store._begun
            mirror[key] = fingerprint
        for controller, source, identity in connection.execute(
            "SELECT controller, source, identity FROM sources"
        ):
            store._identities[controller, source] = identity
        return store

    def fingerprint(self, key: Key) -> Fingerprint | None:
        """The fingerprint of the spec that was last done; None while another one is begun."""
        return self._complete.get(key)

    def begun(self, key: Key) -> Fingerprint | None:
        """The fingerprint of the spec that was begun and not yet done."""
        return self._begun.get(key)

    def all_keys(self) -> set[Key]:
        """Every key that is remembered."""
        return self._complete.keys() | self._begun.keys()

    def applied(self, controller: str) -> dict[Key, Applied]:
        """Everything remembered of *controller*, from the disk. Synchronous: for the start."""
        return read_applied(self._connection, controller)

    async def recall(self, key: Key) -> Applied | None:
        """What is remembered of *key*; read by the writer, whose connection it is."""

        def read(connection: sqlite3.Connection) -> Applied | None:
            row = connection.execute(f"{_APPLIED} WHERE key = ?", (key,)).fetchone()
            return None if row is None else _applied(row)

        remembered: Applied | None = await self.write(read)
        return remembered

    def source_identity(self, controller: str, source: str) -> str:
        """The identity that *source* last had; empty if it never had one."""
        return self._identities.get((controller, source), "")

    async def remember(  # noqa: PLR0913 - one argument a column
        self,
        key: Key,
        kind: str,
        spec: Mapping[str, Any],
        fingerprint: Fingerprint,
        *,
        base: str,
        complete: bool,
    ) -> None:
        """Note that *spec* is begun (before its first effect) or complete.

        Returns when it is durable. Cancelled while it waits, it is written all the same. Raises
        TypeError for a spec that JSON cannot express, WriteFailed, StoreClosed.
        """
        row = (key, kind, json.dumps(dict(spec)), fingerprint, base, self._now(), complete)

        def committed() -> None:
            mirror, other = self._complete, self._begun
            if not complete:
                mirror, other = other, mirror
            mirror[key] = fingerprint
            other.pop(key, None)

        await self._write(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO applied (key, kind, spec, fingerprint, base, at, complete)"
                " VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            ).close(),
            committed,
        )

    async def forget(self, key: Key) -> None:
        """Forget *key* wholly (invariant 14). Cancellation and errors as in remember()."""

        def committed() -> None:
            self._complete.pop(key, None)
            self._begun.pop(key, None)

        await self._write(
            lambda connection: connection.execute(
                "DELETE FROM applied WHERE key = ?", (key,)
            ).close(),
            committed,
        )

    async def set_source_identity(self, controller: str, source: str, identity: str) -> None:
        """Note the place that *source* was last read from; the same one again costs nothing.

        Cancellation and errors as in remember().
        """
        if self._identities.get((controller, source)) == identity:
            await trio.lowlevel.checkpoint()
            return
        await self._write(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO sources (controller, source, identity) VALUES (?, ?, ?)",
                (controller, source, identity),
            ).close(),
            lambda: self._identities.__setitem__((controller, source), identity),
        )

    async def write(self, function: Write) -> Any:
        """Run *function* on the connection, as a part of the next transaction.

        It runs in the writer's thread, must neither commit nor roll back, and its value is
        given back once it is durable. Its own exception is raised here and undoes its part
        alone. Cancellation and other errors as in remember().
        """
        return await self._write(function, lambda: None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The writer. Cancelled, it commits what still waits, closes the store and ends."""
        limiter = trio.CapacityLimiter(1)
        task_status.started()
        try:
            while True:
                await self._arrival.wait()
                batch = self._waiting[:MOST_AT_ONCE]
                await trio.to_thread.run_sync(self._transact, batch, limiter=limiter)
                self._settle(batch)
        finally:
            # Inline, since nothing may be awaited here without a shield: one short transaction.
            # A thread cannot be at work: it is not abandoned, and a cancellation comes before.
            self._closed = True
            while batch := self._waiting[:MOST_AT_ONCE]:
                self._transact(batch)
                self._settle(batch)
            self.close()

    def close(self) -> None:
        """Close the connection. For who opened the store and never ran it; harmless twice."""
        self._closed = True
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    async def _write(self, function: Write, committed: Callable[[], None]) -> Any:
        if self._closed:
            raise StoreClosed("the store is closed")
        entry = _Waiting(function, committed)
        self._waiting.append(entry)
        self._arrival.set()
        await entry.settled.wait()
        if entry.failure is not None:
            raise entry.failure
        return entry.value

    def _settle(self, batch: list[_Waiting]) -> None:
        """Bring the mirror up to the commit and wake the callers; in the trio thread."""
        del self._waiting[: len(batch)]
        if not self._waiting:
            self._arrival = trio.Event()
        for entry in batch:
            if entry.failure is None:
                entry.committed()
            entry.settled.set()

    def _transact(self, batch: list[_Waiting]) -> None:
        """Run and commit *batch*. Never raises: what failed stands in its entries."""
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            for entry in batch:
                self._part(entry)
            connection.execute("COMMIT")
            self.commits += 1
        except Exception as exc:  # noqa: BLE001 - the writer outlives any write
            with contextlib.suppress(sqlite3.Error):
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            for entry in batch:
                failure = WriteFailed(f"the store could not be written: {exc}")
                failure.__cause__ = exc
                entry.failure = failure

    def _part(self, entry: _Waiting) -> None:
        """One caller's part. Raises only what undid the whole transaction, as a full disk does."""
        connection = self._connection
        connection.execute("SAVEPOINT part")
        try:
            entry.value = entry.function(connection)
        except Exception as exc:
            if not connection.in_transaction:
                raise
            connection.execute("ROLLBACK TO part")
            entry.failure = exc
        connection.execute("RELEASE part")
