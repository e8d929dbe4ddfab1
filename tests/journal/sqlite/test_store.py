"""The store: group commit, isolation of callers, the mirror, epochs and schemas."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from reconciled.core.errors import StoreClosed, StoreTooNew, StoreUnusable, WriteFailed
from reconciled.core.resources import Fingerprint, Key, fingerprint_of
from reconciled.journal.sqlite import schema
from reconciled.journal.sqlite.applied import Applied, read_all_applied, write_applied
from reconciled.journal.sqlite.lifecycle import open_directory
from reconciled.journal.sqlite.schema import MIGRATIONS, read_meta
from reconciled.journal.sqlite.store import Store
from reconciled.journal.sqlite.writer import PendingWrite

KEY = Key("site/motd")
SPEC = {"path": "/etc/motd", "content": "hé"}
PRINT = fingerprint_of(SPEC)


async def record(store: Store, key: Key = KEY, *, complete: bool = True) -> None:
    """Record the same spec for *key*."""
    await store.record_applied(key, "File", SPEC, PRINT, base="/etc/x", complete=complete)


async def end(nursery: trio.Nursery) -> None:
    """End the writer and wait for it."""
    nursery.cancel_scope.cancel(reason="test")
    await trio.lowlevel.checkpoint()


async def test_applied_specs_survive_a_restart(tmp_path: Path) -> None:
    """The last spec of a key, complete and with its fingerprint, is there after a restart."""
    store = Store.open(tmp_path, now=lambda: 12.5)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await record(store)
        await record(store, Key("site/ns/other"), complete=False)
        await record(store, Key("site2/motd"))
        await end(nursery)
    again = Store.open(tmp_path)
    found = read_all_applied(again.writer.connection).get("site", {})
    assert list(found) == [KEY, Key("site/ns/other")]
    row = found[KEY]
    assert (row.kind, row.spec, row.fingerprint, row.base, row.at, row.complete) == (
        "File", SPEC, PRINT, "/etc/x", 12.5, True,
    )  # fmt: skip
    assert again.all_keys() == {KEY, Key("site/ns/other"), Key("site2/motd")}
    again.close()


async def test_one_key_and_all_keys_can_be_read(tmp_path: Path) -> None:
    """find_applied() reads one key, None if it is unknown; read_all_applied() all of them."""
    store = Store.open(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await record(store)
        await record(store, Key("other/ns/x"))
        found = await store.find_applied(KEY)
        assert found is not None
        assert found.spec == SPEC
        assert await store.find_applied(Key("site/none")) is None
        everything = read_all_applied(store.writer.connection)
        assert everything["site"] == {KEY: found}
        assert list(everything["other"]) == [Key("other/ns/x")]
        await end(nursery)


async def test_a_begun_spec_hides_the_one_before(tmp_path: Path) -> None:
    """While a spec is begun, no fingerprint counts as applied: reverting to it acts."""
    store = Store.open(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await record(store)
        assert (store.fingerprint(KEY), store.incomplete_fingerprint(KEY)) == (PRINT, None)
        await record(store, complete=False)
        assert (store.fingerprint(KEY), store.incomplete_fingerprint(KEY)) == (None, PRINT)
        await record(store)
        assert (store.fingerprint(KEY), store.incomplete_fingerprint(KEY)) == (PRINT, None)
        await store.forget(KEY)
        assert (store.fingerprint(KEY), store.incomplete_fingerprint(KEY)) == (None, None)
        await end(nursery)
    again = Store.open(tmp_path)
    assert read_all_applied(again.writer.connection).get("site", {}) == {}
    again.close()


def again_writable(store: Store) -> trio.Event:
    """Set when the store is writable again."""
    event = trio.Event()

    def told(trouble: str) -> None:
        if not trouble:
            event.set()

    store.writer.on_writable_change = told
    return event


async def test_many_callers_share_a_commit(tmp_path: Path) -> None:
    """Writes that wait at the same time are one commit."""
    store = Store.open(tmp_path)
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as callers:
            for number in range(200):
                callers.start_soon(record, store, Key(f"site/{number}"))
            await trio.testing.wait_all_tasks_blocked()
            assert store.commits == 0
            await nursery.start(store.run)
        assert store.commits == 1
        await record(store)
        assert store.commits == 2
        await end(nursery)


async def test_an_error_of_one_caller_does_not_affect_others(tmp_path: Path) -> None:
    """An error in one function reverts that part only, and is raised in its caller."""
    store = Store.open(tmp_path)

    def half(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE meta SET value = 'mine'")
        raise KeyError("mine")

    async def failing() -> None:
        with pytest.raises(KeyError, match="mine"):
            await store.writer.write(PendingWrite(half))

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as callers:
            callers.start_soon(record, store, Key("site/a"))
            callers.start_soon(failing)
            callers.start_soon(record, store, Key("site/b"))
            await trio.testing.wait_all_tasks_blocked()
            await nursery.start(store.run)
        assert store.commits == 1
        assert (await store.writer.write(PendingWrite(read_meta))).epoch == store.epoch == 1
        await end(nursery)
    again = Store.open(tmp_path)
    assert again.all_keys() == {Key("site/a"), Key("site/b")}
    again.close()


async def test_a_failed_commit_fails_all_its_writes_and_the_writer_continues(
    tmp_path: Path,
) -> None:
    """Each caller of a failed commit gets the error; the mirror and the writer are intact."""
    store = Store.open(tmp_path)
    writable = again_writable(store)
    failures = []

    async def attempt(key: Key) -> None:
        try:
            await record(store, key)
        except WriteFailed as exc:
            failures.append(str(exc))

    def end_it(connection: sqlite3.Connection) -> None:
        connection.execute("ROLLBACK")  # as SQLite does on a full disk
        raise sqlite3.OperationalError("database or disk is full")

    async def full() -> None:
        with pytest.raises(WriteFailed, match="disk is full"):
            await store.writer.write(PendingWrite(end_it))

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as callers:
            callers.start_soon(attempt, Key("site/a"))
            callers.start_soon(full)
            callers.start_soon(attempt, Key("site/b"))
            await trio.testing.wait_all_tasks_blocked()
            await nursery.start(store.run)
        assert failures == ["the store cannot be written: database or disk is full"] * 2
        assert store.all_keys() == set()
        assert store.commits == 0
        await writable.wait()
        await record(store)
        await end(nursery)
    again = Store.open(tmp_path)
    assert again.all_keys() == {KEY}
    again.close()


async def test_a_real_full_disk_fails_the_writes_that_do_not_fit(tmp_path: Path) -> None:
    """Callers get SQLite's error for a full database, and later, smaller writes succeed."""
    store = Store.open(tmp_path)
    (pages,) = store.writer.connection.execute("PRAGMA page_count").fetchone()
    store.writer.connection.execute(f"PRAGMA max_page_count={pages + 8}")
    writable = again_writable(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        with pytest.raises(WriteFailed, match="full"):
            await store.record_applied(
                KEY, "File", {"content": "x" * 200_000}, PRINT, base="/", complete=True
            )
        assert store.all_keys() == set()
        await writable.wait()
        await record(store)
        assert store.fingerprint(KEY) == PRINT
        await end(nursery)


async def test_a_cancelled_write_is_done_all_the_same(tmp_path: Path) -> None:
    """A cancellation of the caller reverts the write neither on the disk nor in the mirror."""
    store = Store.open(tmp_path)
    with trio.move_on_after(0):
        await record(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await record(store, Key("site/later"))
        assert store.fingerprint(KEY) == PRINT
        await end(nursery)
    again = Store.open(tmp_path)
    assert KEY in read_all_applied(again.writer.connection).get("site", {})
    again.close()


async def test_a_cancelled_writer_commits_the_waiting_writes(tmp_path: Path) -> None:
    """The end of the writer commits earlier writes and refuses later ones."""
    store = Store.open(tmp_path)
    done = []

    async def caller(number: int) -> None:
        await record(store, Key(f"site/{number}"))
        done.append(number)

    async with trio.open_nursery() as callers:
        for number in range(1200):
            callers.start_soon(caller, number)
        await trio.testing.wait_all_tasks_blocked()
        with trio.CancelScope() as scope:
            scope.cancel(reason="test")
            await store.run()
    assert len(done) == 1200
    with pytest.raises(StoreClosed):
        await record(store)
    again = Store.open(tmp_path)
    assert len(again.all_keys()) == 1200
    again.close()


async def test_a_spec_that_json_cannot_express_is_refused(tmp_path: Path) -> None:
    """The caller gets a TypeError before anything is queued."""
    store = Store.open(tmp_path)
    with pytest.raises(TypeError):
        await store.record_applied(KEY, "File", {"x": object()}, PRINT, base="/", complete=True)
    assert store.writer.waiting == []
    store.close()


async def test_source_identities_are_kept_and_repeated_ones_cost_nothing(tmp_path: Path) -> None:
    """An identity survives a restart; recording the same one again is no transaction."""
    store = Store.open(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        assert store.source_identity("site", "directory /x") == ""
        await store.set_source_identity("site", "directory /x", "1:2")
        await store.set_source_identity("site", "directory /x", "1:2")
        assert store.commits == 1
        await store.set_source_identity("site", "directory /x", "1:3")
        await end(nursery)
    again = Store.open(tmp_path)
    assert again.source_identity("site", "directory /x") == "1:3"
    again.close()


def test_the_epoch_rises_with_every_open(tmp_path: Path) -> None:
    """Each start has a higher epoch than all earlier ones, even one that ended at once."""
    epochs = []
    for _ in range(3):
        store = Store.open(tmp_path)
        epochs.append(store.epoch)
        store.close()
    assert epochs == [1, 2, 3]


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    """The directory has mode 0700 and every file 0600 at any umask: specs may hold secrets."""
    old = os.umask(0)
    try:
        store = Store.open(tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "store").iterdir()}
    assert modes == {0o600}
    store.close()


@pytest.mark.parametrize("pending", [False, True])
def test_a_newer_schema_is_refused_unchanged(tmp_path: Path, *, pending: bool) -> None:
    """A store of a newer program is not changed, also if its version is only in the log."""
    Store.open(tmp_path).close()
    file = tmp_path / "store" / schema.FILE
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA user_version=7")
    kept = {}
    if pending:  # as a kill leaves it: the log is not written back
        kept = {each.name: each.read_bytes() for each in file.parent.iterdir()}
        kept.pop(f"{schema.FILE}-shm")
        assert kept[f"{schema.FILE}-wal"]
    connection.close()
    for name, content in kept.items():
        (file.parent / name).write_bytes(content)
    before = {each.name: each.read_bytes() for each in file.parent.iterdir()}
    with pytest.raises(StoreTooNew, match=r"schema 7, and this version supports up to 1"):
        Store.open(tmp_path)
    after = {each.name: each.read_bytes() for each in file.parent.iterdir()}
    after.pop(f"{schema.FILE}-shm", None)  # the index of the reader, not a part of the store
    assert after == before


def test_a_file_that_is_not_a_database_is_set_aside(tmp_path: Path) -> None:
    """A store that is not an SQLite database is set aside unchanged, and a new one is made."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / schema.FILE).write_bytes(b"not a database" * 100)
    store = Store.open(tmp_path)
    assert store.integrity.damage == "it is not an SQLite database"
    assert store.integrity.set_aside_path is not None
    assert (store.integrity.set_aside_path / schema.FILE).read_bytes() == b"not a database" * 100
    assert store.degraded
    store.close()


def test_a_migration_keeps_the_rows_and_a_copy(tmp_path: Path) -> None:
    """The next version starts with the rows of this one, after a copy of the store."""
    store = Store.open(tmp_path)
    row = Applied(Key("site/a"), "File", Fingerprint("f"), "/", 1.0, complete=True, spec="{}")
    write_applied(store.writer.connection, row)
    store.close()

    def version_2(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE next (id TEXT)")

    connection = open_directory(tmp_path / "store", (*MIGRATIONS, version_2)).connection
    assert connection.execute("SELECT key FROM applied").fetchall() == [("site/a",)]
    assert connection.execute("PRAGMA user_version").fetchone() == (2,)
    connection.close()
    copy = sqlite3.connect(tmp_path / "store" / "before-2.sqlite")
    assert copy.execute("SELECT key FROM applied").fetchall() == [("site/a",)]
    assert copy.execute("PRAGMA user_version").fetchone() == (1,)
    copy.close()


def test_a_failed_migration_changes_nothing(tmp_path: Path) -> None:
    """A migration is complete or has no effect."""
    Store.open(tmp_path).close()

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE half (id TEXT)")
        raise sqlite3.OperationalError("broken")

    with pytest.raises(StoreUnusable, match="broken"):
        open_directory(tmp_path / "store", (*MIGRATIONS, broken))
    store = Store.open(tmp_path)
    assert store.writer.connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert store.writer.connection.execute(
        "SELECT count(*) FROM sqlite_master WHERE name = 'half'"
    ).fetchone() == (0,)
    store.close()


def test_a_second_opener_is_refused(tmp_path: Path) -> None:
    """No other connection reads or writes the open store, even without the state lock."""
    store = Store.open(tmp_path)
    other = sqlite3.connect(tmp_path / "store" / schema.FILE, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT count(*) FROM applied")
    other.close()
    store.close()


@pytest.mark.slow
def test_a_hundred_thousand_keys(tmp_path: Path) -> None:
    """A start reads them within seconds, and the mirror takes at most 300 bytes for each key."""
    import tracemalloc

    store = Store.open(tmp_path)
    connection = store.writer.connection
    connection.execute("BEGIN")
    for n in range(100_000):
        key, print_ = Key(f"site/resource-{n:06}"), Fingerprint(f"{n:032x}")
        row = Applied(key, "File", print_, "/etc/x", 1.0, complete=True, spec='{"path": "/etc/x"}')
        write_applied(connection, row)
    connection.execute("COMMIT")
    store.close()
    begun = time.process_time()
    store = Store.open(tmp_path)
    assert len(read_all_applied(store.writer.connection)["site"]) == 100_000
    assert time.process_time() - begun < 6.0  # measured: 0.9; the machine may be shared
    store.close()
    del store
    tracemalloc.start()
    store = Store.open(tmp_path)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert store.fingerprint(Key("site/resource-000001")) == Fingerprint(f"{1:032x}")
    assert used / 100_000 < 300
    store.close()


CHILD = """
import os, signal, sys, trio
from pathlib import Path
from reconciled.journal.sqlite.store import Store
async def main():
    store = Store.open(Path(sys.argv[1]))
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for number in range(20):
            await store.record_applied(f"site/{number}", "File", {}, "f", base="/", complete=True)
        os.kill(os.getpid(), signal.SIGKILL)
trio.run(main)
"""


@pytest.mark.processes
def test_a_write_that_returned_survives_a_kill(tmp_path: Path) -> None:
    """A write that returned is there after SIGKILL, and the store opens again."""
    ended = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=False)
    assert ended.returncode == -9
    store = Store.open(tmp_path)
    assert store.all_keys() == {Key(f"site/{number}") for number in range(20)}
    assert store.epoch == 2
    store.close()
