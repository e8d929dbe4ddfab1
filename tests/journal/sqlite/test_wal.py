"""The scan of a log agrees with SQLite, and distinguishes a torn tail from damage."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from reconciled.journal.sqlite.wal import FRAME_HEADER_SIZE, WAL_HEADER_SIZE, WalScan, scan

STEP = FRAME_HEADER_SIZE + 4096
SEED = random.SystemRandom().randrange(1 << 32)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A database with a log, one row for each transaction."""
    connection = sqlite3.connect(tmp_path / "x", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL").close()
    connection.execute("CREATE TABLE t (a)").close()
    yield connection
    connection.close()


def log_of(tmp_path: Path) -> bytes:
    """The content of the log."""
    return (tmp_path / "x-wal").read_bytes()


def rows(tmp_path: Path, database: bytes, log: bytes) -> int:
    """How many rows SQLite reads with *log*."""
    place = tmp_path / "copy"
    place.write_bytes(database)
    (tmp_path / "copy-wal").write_bytes(log)
    other = sqlite3.connect(place)
    count: int = other.execute("SELECT count(*) FROM t").fetchone()[0]
    other.close()
    return count


def test_an_empty_log_has_no_transaction() -> None:
    """An empty log is intact; less than a header is a torn tail."""
    assert scan(b"") == WalScan(end=0)
    assert scan(b"x" * 31).torn


def test_transactions_are_counted(connection: sqlite3.Connection, tmp_path: Path) -> None:
    """Each commit counts once, for any number of pages."""
    for number in range(9):
        connection.execute("BEGIN").close()
        for _ in range(number):
            connection.execute("INSERT INTO t VALUES (?)", ("x" * 3000,)).close()
        connection.execute("INSERT INTO t VALUES (1)").close()
        connection.execute("COMMIT").close()
    found = scan(log_of(tmp_path))
    assert (found.transactions, found.torn, found.damage) == (10, "", "")
    assert found.end == len(log_of(tmp_path))


def test_frames_of_an_earlier_log_are_ignored(
    connection: sqlite3.Connection, tmp_path: Path
) -> None:
    """Old frames after those of a restarted log are neither a torn tail nor damage."""
    for _ in range(20):
        connection.execute("INSERT INTO t VALUES (?)", ("x" * 3000,)).close()
    size = len(log_of(tmp_path))
    connection.execute("PRAGMA wal_checkpoint(RESTART)").close()
    for count in range(1, 4):
        connection.execute("INSERT INTO t VALUES (1)").close()
        log = log_of(tmp_path)
        assert len(log) == size
        found = scan(log)
        assert (found.transactions, found.torn, found.damage) == (count, "", "")
        assert found.end < size


def test_the_scan_counts_what_sqlite_reads(connection: sqlite3.Connection, tmp_path: Path) -> None:
    """After any flip, SQLite reads as many rows as the scan counts, or the scan finds damage."""
    database = (tmp_path / "x").read_bytes()
    for _ in range(12):
        connection.execute("INSERT INTO t VALUES (?)", ("x" * 1500,)).close()
    log = log_of(tmp_path)
    whole = scan(log)
    assert rows(tmp_path, database, log) == whole.transactions - 1 == 12
    rng = random.Random(SEED)
    print("seed", SEED)
    silent = 0
    for offset in [rng.randrange(len(log)) for _ in range(300)]:
        harmed = bytearray(log)
        harmed[offset] ^= 1 << rng.randrange(8)
        found = scan(bytes(harmed))
        if found.damage:
            silent += 1
            continue
        assert rows(tmp_path, database, bytes(harmed)) == found.transactions - 1
        assert found.torn
        assert found.transactions == whole.transactions - 1
    assert silent > 100


def test_a_tail_without_its_commit_is_torn(connection: sqlite3.Connection, tmp_path: Path) -> None:
    """Intact frames without a commit after them were never durable."""
    connection.execute("BEGIN").close()
    for _ in range(10):
        connection.execute("INSERT INTO t VALUES (?)", ("x" * 3000,)).close()
    connection.execute("COMMIT").close()
    log = log_of(tmp_path)
    before = scan(log[:-1]).end
    assert before < len(log) - STEP
    found = scan(log[:-STEP])
    assert (found.end, found.damage) == (before, "")
    assert "no end" in found.torn
    assert found.end >= WAL_HEADER_SIZE


def test_a_flip_in_the_salts_is_not_another_log(
    connection: sqlite3.Connection, tmp_path: Path
) -> None:
    """No checksum covers the salts: a flip there must not drop the last transaction."""
    connection.execute("INSERT INTO t VALUES (1)").close()
    log = log_of(tmp_path)
    last = len(log) - STEP
    assert scan(log[:last]).end == last
    for offset in range(last + 8, last + 16):
        harmed = bytearray(log)
        harmed[offset] ^= 1
        found = scan(bytes(harmed))
        assert (found.end, found.damage) == (last, "")
        assert found.torn
