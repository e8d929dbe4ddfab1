"""Opening the directory of the store after checks, closing it, and replacing it by a copy.

1. Nothing is written before the store was checked: files, numbers, structure, and each row that
   a decision may depend on.
2. A damaged store is set aside whole, and the new store is marked as degraded from its first
   commit on.
3. The epoch is the higher one of the store and of ``STATE/epoch``, plus one: it never goes back.
4. An exchange is two renames of directories. Between them the copy is complete: an opening that
   finds no store completes the exchange.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from reconciled.core.errors import StoreDamaged, StoreUnusable
from reconciled.durability import sync
from reconciled.journal.epoch_file import read_epoch, write_epoch
from reconciled.journal.sqlite import integrity, schema
from reconciled.journal.sqlite.applied import verify_applied
from reconciled.journal.sqlite.integrity import IntegrityReport, Marker, WalState
from reconciled.journal.sqlite.rows import RowDamaged, read_open
from reconciled.journal.sqlite.schema import (
    FILE,
    MIGRATIONS,
    Meta,
    Migration,
    read_meta,
    write_meta,
)

# SQLite's codes for an environment that prevents access: the content is not damaged.
_ENVIRONMENT_ERRORS = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_AUTH,
        sqlite3.SQLITE_NOLFS,
    }
)
# Without the history: no decision depends on it, and its rows are verified when they are read.
_VERIFIED = ("meta", "applied", "sources", "operations", "states", "steps")


@attrs.frozen
class OpenedStore:
    """An open store: its connection, its numbers, and the condition that was found."""

    connection: sqlite3.Connection
    meta: Meta
    integrity: IntegrityReport


def open_directory(directory: Path, migrations: Sequence[Migration] = MIGRATIONS) -> OpenedStore:
    """Open or make the store in *directory*, with the newest schema, and begin an epoch.

    Only for the holder of the state lock. A damaged store is set aside and a new one made, which
    the integrity report says. Raises StoreTooNew, or StoreUnusable if the files are inaccessible.
    """
    try:
        _finish_exchange(directory)
        try:
            return _open(directory, migrations, epochs=1)
        except _SetAside as damage:
            found = damage.integrity
        return attrs.evolve(_open(directory, migrations, epochs=1), integrity=found)
    except (sqlite3.Error, OSError, _SetAside) as exc:
        raise StoreUnusable(directory, str(exc)) from exc


class _SetAside(Exception):
    """The store was damaged and has been set aside."""

    def __init__(self, condition: IntegrityReport) -> None:
        super().__init__(condition.damage)
        self.integrity = condition


def _open(directory: Path, migrations: Sequence[Migration], *, epochs: int) -> OpenedStore:
    connection = None
    try:
        schema.make_directory(directory)
        marker = integrity.read_marker(directory)
        wal_state = integrity.check_files(directory, marker)
        if marker is None:
            schema.make_file(directory)
        with _classify_errors():
            schema.refuse_newer(directory, len(migrations))
            integrity.truncate_tail(directory, wal_state)
            connection = schema.connect(directory / FILE)
            schema.configure(connection)
            _check_numbers(connection, marker, wal_state, len(migrations))
            schema.migrate(connection, directory, migrations)
            _verify(connection, migrations)
        meta = _begin(connection, directory, read_meta(connection), epochs)
        if epochs:
            write_epoch(directory.parent, meta.epoch)
        integrity.write_marker(directory, Marker(meta.opened, closed=False))
    except StoreDamaged as damage:
        aside = integrity.set_aside(directory, str(damage))
        if connection is not None:
            connection.close()  # its file was moved: it does not change the damaged files
        raise _SetAside(IntegrityReport(damage=str(damage), set_aside_path=aside)) from damage
    except BaseException:
        if connection is not None:
            _close_keeping_wal(connection, directory)
        raise
    return OpenedStore(connection, meta, IntegrityReport(wal_state.warning))


def _check_numbers(
    connection: sqlite3.Connection, marker: Marker | None, wal_state: WalState, newest: int
) -> None:
    version = _version(connection)
    if version or marker is not None:
        meta = read_meta(connection)
        integrity.check_numbers(marker, meta.opened, meta.closed, lost=wal_state.lost)
        if version < newest:
            _close_before_migration(connection, meta)


def _close_keeping_wal(connection: sqlite3.Connection, directory: Path) -> None:
    """Close the connection without a checkpoint of the log.

    SQLite writes the log back and removes it when the last connection closes, which beside an open
    marker would look like a loss. It does not if the file was moved. (From Python 3.12 on there is
    a setting for it, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE.)
    """
    away = _sibling(directory, "old")
    try:
        directory.rename(away)
    except OSError:
        connection.close()
        return
    connection.close()
    away.rename(directory)


def _begin(connection: sqlite3.Connection, directory: Path, meta: Meta, epochs: int) -> Meta:
    """The first commit of a generation; in a new store the first commit at all."""
    degraded = meta.degraded
    if not meta.opened and integrity.has_set_aside_store(directory):
        degraded = f"a damaged store was set aside as {directory.name}{integrity.ASIDE_SUFFIX}…"
    epoch = max(meta.epoch, read_epoch(directory.parent)) + epochs if epochs else meta.epoch
    meta = attrs.evolve(meta, epoch=epoch, opened=meta.opened + 1, degraded=degraded)
    with transaction(connection):
        write_meta(connection, meta)
    return meta


def _version(connection: sqlite3.Connection) -> int:
    """The version of the schema; 0 in a new database. Raises StoreDamaged."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0 and schema.layout(connection):
        raise StoreDamaged("it has tables but no schema version")
    return version


def _close_before_migration(connection: sqlite3.Connection, meta: Meta) -> None:
    """Record the generation as closed: a migration empties the log without a loss."""
    with transaction(connection):
        write_meta(connection, attrs.evolve(meta, closed=meta.opened))


def _verify(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Read all that a decision may depend on. Raises StoreDamaged, sqlite3.Error."""
    if schema.layout(connection) != schema.expected_layout(migrations):
        raise StoreDamaged("its tables differ from those of its schema version")
    for table in _VERIFIED:
        (found,) = connection.execute(f"PRAGMA quick_check('{table}')").fetchone()
        if found != "ok":
            _raise_environment_error(found)
            raise StoreDamaged(f"table {table}: {' '.join(found.split())}")
    read_meta(connection)
    verify_applied(connection)
    read_open(connection)


def _raise_environment_error(found: str) -> None:
    """Raise OSError for an unreadable page, which quick_check reports like damage."""
    code = re.search(r"error code=(\d+)", found)
    if code is not None and int(code[1]) & 0xFF in _ENVIRONMENT_ERRORS:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def _classify_errors() -> Iterator[None]:
    """Raise StoreDamaged for errors about the content, and others unchanged."""
    try:
        yield
    except (RowDamaged, UnicodeError) as exc:
        raise StoreDamaged(str(exc)) from exc
    except sqlite3.Error as exc:
        code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
        if code in _ENVIRONMENT_ERRORS:
            raise
        raise StoreDamaged(str(exc)) from exc


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit everything that the body writes, or nothing after an exception."""
    connection.execute("BEGIN IMMEDIATE").close()
    try:
        yield
        connection.execute("COMMIT").close()
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK").close()
        raise


def close_directory(connection: sqlite3.Connection, directory: Path, meta: Meta) -> None:
    """Write the log back, close the connection, and mark the store as closed.

    Raises sqlite3.Error or OSError if that fails: nothing is lost, since the next opening reads
    the log. The connection is closed in any case.
    """
    try:
        with transaction(connection):
            write_meta(connection, attrs.evolve(meta, closed=meta.opened))
    except BaseException:
        _close_keeping_wal(connection, directory)
        raise
    try:
        (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.close()
    if not busy:
        integrity.write_marker(directory, Marker(meta.opened, closed=True))


def exchange(connection: sqlite3.Connection, directory: Path, meta: Meta) -> OpenedStore:
    """Copy the store to new files, sync them, and open these.

    Needed after a failed sync, when it is unknown how much of the old files is on the disk. Raises
    sqlite3.Error or OSError: then either *connection* is still open and usable, or reopen() can
    open the store.
    """
    fresh, old = _sibling(directory, "new"), _sibling(directory, "old")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    schema.copy_into(connection, fresh / FILE)
    copy = sqlite3.connect(fresh / FILE, isolation_level=None)
    with contextlib.closing(copy), transaction(copy):
        write_meta(copy, attrs.evolve(meta, closed=meta.opened))
    sync(fresh / FILE)
    integrity.write_marker(fresh, Marker(meta.opened, closed=True))
    for name in sorted(directory.glob("before-*.sqlite")):
        shutil.copy2(name, fresh)
    directory.rename(old)
    connection.close()  # its file was moved: it changes neither the old nor the new files
    fresh.rename(directory)
    sync(directory.parent)
    return reopen(directory)


def reopen(directory: Path) -> OpenedStore:
    """Open the store after an exchange(), in the same epoch. Raises sqlite3.Error, OSError."""
    _finish_exchange(directory)
    try:
        return _open(directory, MIGRATIONS, epochs=0)
    except _SetAside as exc:
        raise sqlite3.DatabaseError(str(exc)) from exc


def _finish_exchange(directory: Path) -> None:
    """Complete or revert an exchange or a close that was interrupted."""
    fresh, old = _sibling(directory, "new"), _sibling(directory, "old")
    if old.exists() and not directory.exists():
        (fresh if fresh.exists() else old).rename(directory)
        sync(directory.parent)
    for leftover in (fresh, old):
        if leftover.exists() and directory.exists():
            shutil.rmtree(leftover, ignore_errors=True)


def _sibling(directory: Path, name: str) -> Path:
    return directory.with_name(f"{directory.name}.{name}")
