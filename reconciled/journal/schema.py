"""The store's schema: opened, checked, and brought up to date one version at a time.

1. A schema newer than this program is refused, and nothing is touched.
2. A version, once released, never changes: what comes next is another migration.
3. A copy of the store precedes each migration of one that has content.
4. A migration is one transaction with the number of its version.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

FILE = "store.sqlite"
_HEADER = 100  # bytes of SQLite's file header …
_VERSION = slice(60, 64)  # … and where it has user_version, big-endian
_MAGIC = b"SQLite format 3\0"

Migration = Callable[[sqlite3.Connection], None]


class StoreUnusable(Exception):
    """The store cannot be opened or read. str() says why and what to do."""

    def __init__(self, store: Path, why: str) -> None:
        super().__init__(
            f"the store {store} cannot be used: {why}. Repair it, or move it away: what was "
            f"applied is then forgotten, and nothing is removed for it"
        )


class StoreTooNew(Exception):
    """The store was written by a newer program: exit 78. Nothing was touched."""

    def __init__(self, store: Path, found: int, known: int) -> None:
        super().__init__(
            f"the store {store} has schema {found}, and this program knows up to {known}: "
            f"install the newer version again"
        )


def _version_1(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL)")
    connection.execute("INSERT INTO meta VALUES ('epoch', 0)")
    connection.execute(
        "CREATE TABLE applied (key TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL,"
        " fingerprint TEXT NOT NULL, base TEXT NOT NULL, at REAL NOT NULL,"
        " complete INTEGER NOT NULL) WITHOUT ROWID"
    )
    connection.execute(
        "CREATE TABLE sources (controller TEXT NOT NULL, source TEXT NOT NULL,"
        " identity TEXT NOT NULL, PRIMARY KEY (controller, source)) WITHOUT ROWID"
    )


MIGRATIONS: tuple[Migration, ...] = (_version_1,)  # the first makes version 1


def open_store(directory: Path, migrations: Sequence[Migration] = MIGRATIONS) -> sqlite3.Connection:
    """A connection to the store in *directory*, made if missing, with the newest schema.

    It begins and ends no transaction by itself, and may be used from any thread, by one at a
    time. Raises StoreTooNew or StoreUnusable.
    """
    try:
        _make(directory)
        _refuse_newer(directory, len(migrations))
        connection = _connect(directory / FILE)
        try:
            _migrate(connection, directory, migrations)
        except BaseException:
            connection.close()
            raise
        return connection
    except (sqlite3.Error, OSError) as exc:
        raise StoreUnusable(directory, str(exc)) from exc


def _make(directory: Path) -> None:
    """Make directory and file, readable by us alone: SQLite's own files take over the mode."""
    directory.mkdir(mode=0o700, exist_ok=True)
    file = directory / FILE
    if not file.exists():
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        for place in (directory, directory.parent):
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _refuse_newer(directory: Path, known: int) -> None:
    """Judge the version before a connection exists that could write.

    The header is enough as long as each migration ends with a checkpoint of the log, and ours
    do. For a program that lacks one, the log is looked at too, read-only.
    """
    file = directory / FILE
    with file.open("rb") as stream:
        header = stream.read(_HEADER)
    if header and not header.startswith(_MAGIC):
        raise sqlite3.DatabaseError("it is no SQLite database")
    found = int.from_bytes(header[_VERSION], "big")
    log = file.with_name(FILE + "-wal")
    if found <= known and log.exists() and log.stat().st_size:
        connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        try:
            (found,) = connection.execute("PRAGMA user_version").fetchone()
        finally:
            connection.close()
    if found > known:
        raise StoreTooNew(directory, found, known)


def _connect(file: Path) -> sqlite3.Connection:
    # autocommit: the transactions are the writer's own. Threads: never two at once.
    connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    # Before the first read: an exclusive connection keeps the log's index in its memory, needs
    # no shared memory file, and shuts out whoever opens the store beside us.
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        connection.close()
        raise sqlite3.OperationalError(f"its journal mode stays {mode}")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA trusted_schema=OFF")
    return connection


def _migrate(
    connection: sqlite3.Connection, directory: Path, migrations: Sequence[Migration]
) -> None:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    for version, migration in enumerate(migrations[found:], start=found + 1):
        if version > 1:
            _copy(connection, directory / f"before-{version}.sqlite")
        connection.execute("BEGIN IMMEDIATE")
        try:
            migration(connection)
            connection.execute(f"PRAGMA user_version={version:d}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
    if found < len(migrations):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _copy(connection: sqlite3.Connection, file: Path) -> None:
    """A copy of the store as it is. One that is there is from a migration that never ended."""
    file.unlink(missing_ok=True)
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection.execute("VACUUM INTO ?", (str(file),))
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
