"""The schema of the store: connection, check, and migration by one version at a time.

1. A schema newer than this program is refused, and no file is changed.
2. A released version never changes: a change is another migration.
3. The store is copied before each migration, unless it is empty.
4. A migration and the number of its version are one transaction.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from reconciled.core.errors import StoreTooNew
from reconciled.durability import sync
from reconciled.journal.sqlite.rows import checksum, dump_json, verify_row

FILE = "store.sqlite"
_HEADER = 100  # bytes of SQLite's file header …
_VERSION = slice(60, 64)  # … and where it has user_version, big-endian
_FORMATS = slice(18, 20)  # versions needed to write and to read it: 2 with a log, else 1
_FRACTIONS = slice(21, 24)  # the same in every database
_MAGIC = b"SQLite format 3\0"

Migration = Callable[[sqlite3.Connection], None]


_TABLES = (
    "meta (name TEXT PRIMARY KEY, value NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID",
    """applied (key TEXT PRIMARY KEY, kind TEXT NOT NULL, spec TEXT NOT NULL,
        fingerprint TEXT NOT NULL, base TEXT NOT NULL, at REAL NOT NULL,
        complete INTEGER NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID""",
    """sources (controller TEXT NOT NULL, source TEXT NOT NULL, identity TEXT NOT NULL,
        sum INTEGER NOT NULL, PRIMARY KEY (controller, source)) WITHOUT ROWID""",
    """operations (id TEXT PRIMARY KEY, key TEXT NOT NULL, body TEXT NOT NULL,
        sum INTEGER NOT NULL) WITHOUT ROWID""",
    "states (id TEXT PRIMARY KEY, body TEXT NOT NULL, sum INTEGER NOT NULL) WITHOUT ROWID",
    """steps (operation TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL,
        sum INTEGER NOT NULL, PRIMARY KEY (operation, name)) WITHOUT ROWID""",
    """past (seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key TEXT NOT NULL,
        ended REAL NOT NULL, body TEXT NOT NULL, sum INTEGER NOT NULL)""",
)


def _version_1(connection: sqlite3.Connection) -> None:
    """Each row ends with a checksum over the name of its table and the other columns.

    Open operations have tables apart from the history, since a start reads only the former.
    """
    for columns in _TABLES:
        connection.execute(f"CREATE TABLE {columns}").close()


MIGRATIONS: tuple[Migration, ...] = (_version_1,)  # the first makes version 1


def make_directory(directory: Path) -> None:
    """Make the directory of the store if it is missing, mode 0700."""
    if not directory.exists():
        directory.mkdir(mode=0o700, exist_ok=True)
        sync(directory.parent)


def make_file(directory: Path) -> None:
    """Make the database if it is missing, mode 0600: SQLite's other files take over the mode.

    Its directory entry becomes durable together with that of the marker.
    """
    file = directory / FILE
    if not file.exists():
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))


def refuse_newer(directory: Path, known: int) -> None:
    """Check the version before there is a connection that could write.

    The header of the database is enough if every migration ends with a checkpoint of the log, as
    those here do. In case another program's did not, the log is read as well, read-only. Raises
    StoreTooNew, sqlite3.Error, OSError.
    """
    file = directory / FILE
    with file.open("rb") as stream:
        header = stream.read(_HEADER)
    if header and not header.startswith(_MAGIC):
        raise sqlite3.DatabaseError("it is not an SQLite database")
    if header and not (set(header[_FORMATS]) <= {1, 2} and header[_FRACTIONS] == b"@  "):
        # With other numbers there, SQLite opens it read-only, or with another page size.
        raise sqlite3.DatabaseError("its header is damaged")
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


def connect(file: Path) -> sqlite3.Connection:
    """A connection without implicit transactions, for one thread at a time; reads nothing yet."""
    return sqlite3.connect(file, isolation_level=None, check_same_thread=False)


def configure(connection: sqlite3.Connection) -> None:
    """Set up *connection* before its first read. Raises sqlite3.Error; the caller closes it."""
    # Before the first read: an exclusive connection keeps the index of the log in its memory,
    # needs no shared memory file, and locks other processes out of the store.
    connection.execute("PRAGMA locking_mode=EXCLUSIVE").close()
    (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise sqlite3.OperationalError(f"cannot set its journal mode to wal: it is {mode}")
    connection.execute("PRAGMA synchronous=FULL").close()
    connection.execute("PRAGMA trusted_schema=OFF").close()


def migrate(
    connection: sqlite3.Connection, directory: Path, migrations: Sequence[Migration] = MIGRATIONS
) -> None:
    """Migrate the schema to the newest version. Raises sqlite3.Error, OSError."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    for version, migration in enumerate(migrations[found:], start=found + 1):
        if version > 1:
            _copy(connection, directory / f"before-{version}.sqlite")
        connection.execute("BEGIN IMMEDIATE").close()
        try:
            migration(connection)
            connection.execute(f"PRAGMA user_version={version:d}").close()
        except BaseException:
            connection.execute("ROLLBACK").close()
            raise
        connection.execute("COMMIT").close()
    if found < len(migrations):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def layout(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    """The tables and indexes as the file declares them."""
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    ).fetchall()


def expected_layout(migrations: Sequence[Migration] = MIGRATIONS) -> list[tuple[str, ...]]:
    """The layout() after *migrations*."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for migration in migrations:
            migration(connection)
        return layout(connection)
    finally:
        connection.close()


def _copy(connection: sqlite3.Connection, file: Path) -> None:
    """Copy the store to *file*, replacing a copy that an incomplete migration left."""
    file.unlink(missing_ok=True)
    copy_into(connection, file)


def copy_into(connection: sqlite3.Connection, file: Path) -> None:
    """Copy the database to the new *file*, durably. Raises sqlite3.Error, OSError."""
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection.execute("VACUUM INTO ?", (str(file),)).close()
    sync(file)


@attrs.frozen
class Meta:
    """Facts about the store itself, in one row, which is complete or missing.

    epoch     number of the start of a daemon that opened it last
    opened    generation: how often it was opened, including new files after a failed sync
    closed    the last generation that was closed, or could not lose anything any more
    degraded  why the store does not know everything that was done; empty: it does
    settled   who cleared degraded, and why
    """

    epoch: int = 0
    opened: int = 0
    closed: int = 0
    degraded: str = ""
    settled: str = ""


def read_meta(connection: sqlite3.Connection) -> Meta:
    """The row, or zeros in a new store. Raises rows.RowDamaged."""
    row = connection.execute("SELECT name, value, sum FROM meta WHERE name = 'store'").fetchone()
    return Meta() if row is None else Meta(**json.loads(verify_row("meta", row)[1]))


def write_meta(connection: sqlite3.Connection, meta: Meta) -> None:
    """Write the row, as a part of the open transaction."""
    columns = ("store", dump_json(attrs.asdict(meta)))
    connection.execute(
        "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (*columns, checksum("meta", *columns))
    ).close()
