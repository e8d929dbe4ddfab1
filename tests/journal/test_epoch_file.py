"""The epoch is kept outside the store too, and never goes back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from reconciled.core.errors import StoreUnusable
from reconciled.journal import epoch_file
from reconciled.journal.epoch_file import read_epoch, write_epoch
from reconciled.journal.sqlite import lifecycle
from reconciled.journal.sqlite.store import Store


def start(state: Path) -> int:
    """Open and close the store; its epoch."""
    store = Store.open(state)
    store.close()
    return store.epoch


def test_new_store_continues_the_epoch(tmp_path: Path) -> None:
    """A store that is new continues with the epoch of the file."""
    assert [start(tmp_path), start(tmp_path)] == [1, 2]
    shutil.rmtree(tmp_path / "store")
    assert start(tmp_path) == 3
    assert read_epoch(tmp_path) == 3


@pytest.mark.parametrize("content", [None, b"", b"x", b"-7", b"1"])
def test_store_outranks_a_lower_file(tmp_path: Path, content: bytes | None) -> None:
    """A file that is missing, damaged or older does not set the epoch back."""
    epochs = [start(tmp_path), start(tmp_path)]
    if content is None:
        (tmp_path / epoch_file.NAME).unlink()
    else:
        (tmp_path / epoch_file.NAME).write_bytes(content)
    epochs.append(start(tmp_path))
    assert epochs == [1, 2, 3]
    assert read_epoch(tmp_path) == 3


def test_epoch_that_cannot_be_recorded_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the start fails, rather than use an epoch that could be repeated."""

    def full(_state: Path, _epoch: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lifecycle, "write_epoch", full)
    with pytest.raises(StoreUnusable):
        Store.open(tmp_path)
    monkeypatch.setattr(lifecycle, "write_epoch", write_epoch)
    assert start(tmp_path) > 1
