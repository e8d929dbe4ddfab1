"""Reading the store beside a running daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from reconciled.core.errors import StoreTooNew, StoreUnusable
from reconciled.core.resources import Fingerprint, Key
from reconciled.journal.sqlite import snapshot
from reconciled.journal.sqlite.schema import FILE
from reconciled.journal.sqlite.snapshot import open_snapshot
from reconciled.journal.sqlite.store import Store, read_all_applied

PRINT = Fingerprint("f")


async def test_the_store_of_a_running_daemon_is_read_and_unchanged(tmp_path: Path) -> None:
    """Rows that are only in the log are read, while the daemon has the store open."""
    store = Store.open(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        await store.record_applied(Key("site/a"), "File", {"x": 1}, PRINT, base="/", complete=True)
        before = {file.name: file.read_bytes() for file in (tmp_path / "store").iterdir()}
        with open_snapshot(tmp_path) as connection:
            assert connection is not None
            found = read_all_applied(connection)["site"]
        assert found[Key("site/a")].spec == {"x": 1}
        assert {f.name: f.read_bytes() for f in (tmp_path / "store").iterdir()} == before
        await store.forget(Key("site/a"))
        nursery.cancel_scope.cancel(reason="test")
    with open_snapshot(tmp_path) as connection:
        assert connection is not None
        assert read_all_applied(connection) == {}


def test_no_store_is_no_error(tmp_path: Path) -> None:
    """Before the first start, a snapshot is empty and creates nothing."""
    with open_snapshot(tmp_path / "never") as connection:
        assert connection is None
    assert list(tmp_path.iterdir()) == []


def test_a_copy_during_a_write_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that changes during the copy is copied again, up to five times."""
    Store.open(tmp_path).close()
    file = tmp_path / "store" / FILE
    copies: list[int] = []
    changes = 2
    read_log = snapshot._read_wal

    def changing(store: Path) -> bytes:
        copies.append(len(copies))
        if len(copies) // 3 < changes:  # before, during and after: three reads for each copy
            file.touch()
        return read_log(store)

    monkeypatch.setattr(snapshot, "_read_wal", changing)
    with open_snapshot(tmp_path) as connection:
        assert connection is not None
    assert len(copies) == 9
    changes = 1000
    with pytest.raises(StoreUnusable, match="changed during each of 5"), open_snapshot(tmp_path):
        pass


def test_an_unreadable_store_is_an_error(tmp_path: Path) -> None:
    """A newer schema and a damaged store raise the same errors as a start."""
    store = Store.open(tmp_path)
    store.writer.connection.execute("PRAGMA user_version=9")
    store.close()
    with pytest.raises(StoreTooNew, match="schema 9"), open_snapshot(tmp_path):
        pass
    (tmp_path / "store" / FILE).write_bytes(b"nonsense" * 1000)
    with pytest.raises(StoreUnusable, match="move it away"), open_snapshot(tmp_path):
        pass
