"""A copy of the store for verbs that take no lock, with the daemon up or down.

1. The store and its log are copied, and only the copy is opened: the store itself has one opener
   at a time, and a running daemon has it locked.
2. If the daemon wrote the database during the copy, the copy is discarded and made again.
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
_LOG_HEADER = 32  # bytes, with the salts, which change when the log is restarted


@contextlib.contextmanager
def open_snapshot(state: Path) -> Iterator[sqlite3.Connection | None]:
    """A connection to a copy of the store below *state*; None: there is no store yet.

    Blocks for as long as copying takes. Raises StoreTooNew or StoreUnusable.
    """
    store = state / "store"
    with tempfile.TemporaryDirectory(prefix="reconciled-") as directory:
        copy = Path(directory) / FILE
        try:
            found = _copy(store / FILE, copy)
        except OSError as exc:
            raise StoreUnusable(store, exc) from exc
        if not found:
            yield None
            return
        try:
            with contextlib.closing(sqlite3.connect(copy)) as connection:
                # Version 0: just made, its first migration is not committed yet.
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
        # The log only grows between two restarts, and the database changes only at a checkpoint
        # of the log: with both states unchanged, the two copies belong together. Frames that were
        # appended during the copy are a torn tail, which SQLite ignores by its checksums.
        if _file_state(store) == before:
            return True
    raise OSError(f"it changed during each of {ATTEMPTS} attempts to copy it: try again")


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
