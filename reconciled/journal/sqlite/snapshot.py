"""Reading the store without opening it: for verbs that take no lock, a daemon being up or down.

1. The store and its log are copied and only the copy is opened: the store itself has one
   opener at a time, and a running daemon has it locked.
2. A copy into which the daemon wrote meanwhile is thrown away and made again.
"""

from __future__ import annotations

import contextlib
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from reconciled.core.errors import StoreTooNew, StoreUnusable
from reconciled.journal.sqlite.schema import FILE, MIGRATIONS

ATTEMPTS = 5
_LOG_HEADER = 32  # bytes, salts included: they change when the log begins anew


@contextlib.contextmanager
def open_snapshot(state: Path) -> Iterator[sqlite3.Connection | None]:
    """A connection to a copy of the store below *state*; None where there is no store yet.

    Blocks for as long as copying takes. Raises StoreTooNew or StoreUnusable.
    """
    store = state / "store"
    with tempfile.TemporaryDirectory(prefix="reconciled-") as directory:
        copy = Path(directory) / FILE
        try:
            found = _copy(store / FILE, copy)
        except OSError as exc:
            raise StoreUnusable(store, str(exc)) from exc
        if not found:
            yield None
            return
        try:
            with contextlib.closing(sqlite3.connect(copy)) as connection:
                # Version 0: made this instant, and its first migration is still to come.
                yield connection if _check_version(connection, store) else None
        except sqlite3.Error as exc:
            raise StoreUnusable(store, str(exc)) from exc


def _check_version(connection: sqlite3.Connection, store: Path) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise StoreTooNew(store, version, len(MIGRATIONS))
    return version


def _copy(store: Path, copy: Path) -> bool:
    """Copy store and log as of one instant; False if there is no store."""
    for _ in range(ATTEMPTS):
        before = _file_state(store)
        if before is None:
            return False
        copy.write_bytes(store.read_bytes())
        copy.with_name(f"{FILE}-wal").write_bytes(_read_wal(store))
        # The log only grows between two of its beginnings, and the store changes only when the
        # log is written back: with both marks as they were, the two belong together. What was
        # appended while it was read is a torn tail, which SQLite leaves out by its checksums.
        if _file_state(store) == before:
            return True
    raise OSError(f"it changed during each of {ATTEMPTS} copies")


def _file_state(store: Path) -> tuple[int, int, int, bytes] | None:
    try:
        status = store.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, _read_wal(store)[:_LOG_HEADER]


def _read_wal(store: Path) -> bytes:
    try:
        return store.with_name(f"{FILE}-wal").read_bytes()
    except FileNotFoundError:
        return b""
