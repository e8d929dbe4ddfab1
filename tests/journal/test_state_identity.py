"""The identity of the state directory, and what a start concludes from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import attrs
import pytest

from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.state_identity import NAME, Origin, StateIdentity, examine

HERE = HostIdentity("boot 1", "machine 1")


@pytest.mark.parametrize(
    ("inode", "boot", "machine", "origin"),
    [
        (7, "boot 1", "machine 1", Origin.SAME),
        (7, "boot 1", "machine 2", Origin.SAME),  # a restarted container
        (8, "boot 1", "machine 1", Origin.COPY),
        (8, "boot 1", "machine 2", Origin.COPY),
        (7, "boot 2", "machine 1", Origin.SAME),
        (8, "boot 2", "machine 1", Origin.SAME),  # restored, or a migration with a reboot
        (7, "boot 2", "machine 2", Origin.MOVED),
        (8, "boot 2", "", Origin.MOVED),
    ],
)
def test_table_of_origins(inode: int, boot: str, machine: str, origin: Origin) -> None:
    """Boot, machine and inode decide; the device does not."""
    identity = StateIdentity("id", 7, 1, "boot 1", "machine 1")
    assert identity.compare(inode, HostIdentity(boot, machine)) is origin


def test_unknown_machines_are_not_the_same() -> None:
    """Two machines without an id are not taken for one."""
    identity = StateIdentity("id", 7, 1, "boot 1", "")
    assert identity.compare(7, HostIdentity("boot 2", "")) is Origin.MOVED


def test_first_start_makes_the_identity(tmp_path: Path) -> None:
    """The first start writes a random id, and the next one finds it."""
    first = examine(tmp_path, HERE)
    assert (first.origin, first.earlier) == (Origin.NEW, None)
    first.save()
    again = examine(tmp_path, HERE)
    assert (again.origin, again.current) == (Origin.SAME, first.current)
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_unchanged_identity_is_not_written(tmp_path: Path) -> None:
    """A restart writes nothing."""
    examine(tmp_path, HERE).save()
    before = (tmp_path / NAME).stat()
    examine(tmp_path, HERE).save()
    assert (tmp_path / NAME).stat() == before


def test_rename_keeps_the_identity(tmp_path: Path) -> None:
    """A renamed directory is the same one."""
    state = tmp_path / "state"
    state.mkdir()
    first = examine(state, HERE)
    first.save()
    moved = examine(state.rename(tmp_path / "moved"), HERE)
    assert (moved.origin, moved.current) == (Origin.SAME, first.current)


def test_copy_is_one_until_it_is_saved(tmp_path: Path) -> None:
    """A copy gets a new id; a start that was killed before it saved that finds the copy again."""
    state, copy = tmp_path / "state", tmp_path / "copy"
    state.mkdir()
    first = examine(state, HERE)
    first.save()
    shutil.copytree(state, copy)
    assert examine(copy, HERE).origin is Origin.COPY
    found = examine(copy, HERE)
    assert (found.origin, found.earlier) == (Origin.COPY, first.current)
    assert found.current.id != first.current.id
    found.save()
    assert examine(copy, HERE).origin is Origin.SAME
    assert examine(state, HERE).current == first.current


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"id": "a"}', b"\xff"])
def test_unreadable_identity_counts_as_that_of_a_copy(tmp_path: Path, content: bytes) -> None:
    """Whose operations these are is unknown, so they are held."""
    (tmp_path / NAME).write_bytes(content)
    found = examine(tmp_path, HERE)
    assert (found.origin, found.earlier) == (Origin.COPY, None)


def test_new_boot_is_recorded(tmp_path: Path) -> None:
    """After a reboot the id stays, and the boot is that of now."""
    examine(tmp_path, HERE).save()
    rebooted = attrs.evolve(HERE, boot_id="boot 2")
    examine(tmp_path, rebooted).save()
    assert examine(tmp_path, rebooted).current.boot_id == "boot 2"
