"""Rules of the steps that programs note, and of the fence before them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from reconciled.core.errors import StaleAttempt, StepsDamaged
from reconciled.programs import attempts, steps
from reconciled.programs.steps import format_handle, parse_handle, read_steps, record_step


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An operation's directory, at attempt 1."""
    directory = tmp_path / "operations" / "01TEST"
    directory.mkdir(parents=True)
    attempts.fence(directory, 1)
    return directory


def names(directory: Path) -> list[str]:
    return [step.name for step in read_steps(directory)]


class Syncs:
    """Which files and directories were synced, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        real = os.fsync

        def fsync(file: int) -> None:
            self.synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
            real(file)

        monkeypatch.setattr(os, "fsync", fsync)


def test_steps_are_kept_in_order(place: Path) -> None:
    """Steps are read in the order in which they were noted, with their attempt."""
    record_step(str(place), 1, "copied")
    attempts.fence(place, 2)
    record_step(str(place), 2, "switched over ü")
    assert [(step.attempt, step.name) for step in read_steps(place)] == [
        (1, "copied"),
        (2, "switched over ü"),
    ]


def test_nothing_noted(tmp_path: Path, place: Path) -> None:
    """No file and no directory mean that no step is done."""
    assert read_steps(place) == []
    assert read_steps(tmp_path / "gone") == []


def test_repeated_name_is_one_step(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C04: a name that is there already adds no line, and is synced like a new one."""
    record_step(str(place), 1, "copied")
    before = (place / "steps").read_bytes()
    attempts.fence(place, 2)
    syncs = Syncs(monkeypatch)
    record_step(str(place), 2, "copied")
    assert (place / "steps").read_bytes() == before
    assert syncs.synced == ["steps"]


def test_new_file_and_directory_are_synced(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step syncs the file and then the directory, later ones the file."""
    syncs = Syncs(monkeypatch)
    record_step(str(place), 1, "a")
    assert syncs.synced == ["steps", "01TEST"]
    record_step(str(place), 1, "b")
    assert syncs.synced[2:] == ["steps"]


def test_failed_sync_is_no_success(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose sync failed is not called durable."""

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        record_step(str(place), 1, "a")


def test_c04_cut_at_every_byte(place: Path) -> None:
    """C04: wherever the last line was torn, it is dropped, and the next step follows well."""
    for name in ("first", "second", "third"):
        record_step(str(place), 1, name)
    whole = (place / "steps").read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        (place / "steps").write_bytes(whole[:end])
        assert names(place) == ["first", "second"]
        record_step(str(place), 1, "4")  # shorter than what may be left of the torn one
        assert names(place) == ["first", "second", "4"]


def test_c04_flipped_bit(place: Path) -> None:
    """C04: a bad line before the last is damage at its line, whichever bit is bad."""
    for name in ("first", "second"):
        record_step(str(place), 1, name)
    whole = (place / "steps").read_bytes()
    for position in range(whole.index(b"\n")):
        for bit in range(8):
            bad = bytearray(whole)
            bad[position] ^= 1 << bit
            (place / "steps").write_bytes(bad)
            with pytest.raises(StepsDamaged, match=r"steps:[12]:1: the line is damaged"):
                read_steps(place)
            with pytest.raises(StepsDamaged):
                record_step(str(place), 1, "third")
            assert (place / "steps").read_bytes() == bad


@pytest.mark.parametrize("attempt", [0, 2, 11])
def test_other_attempts_are_refused(place: Path, attempt: int) -> None:
    """Only the current attempt notes steps; a refused one leaves nothing."""
    with pytest.raises(StaleAttempt, match=f"attempt {attempt} is over: the operation is at 1"):
        record_step(str(place), attempt, "a")
    assert read_steps(place) == []


def test_fenced_when_the_next_begins(place: Path) -> None:
    """From the next attempt on the one before is refused, durably."""
    attempts.fence(place, 2)
    with pytest.raises(StaleAttempt):
        record_step(str(place), 1, "a")
    record_step(str(place), 2, "a")


def test_fenced_when_it_is_over(place: Path) -> None:
    """Once the operation is over, or its files are gone, nobody notes steps."""
    attempts.close_attempts(place)
    with pytest.raises(StaleAttempt, match="closed"):
        record_step(str(place), 1, "a")
    with pytest.raises(StaleAttempt, match="is over"):
        record_step(str(place.with_name("gone")), 1, "a")
    attempts.close_attempts(place.with_name("gone"))
    assert not place.with_name("gone").exists()


def test_fence_is_durable(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new attempt is synced with its directory and the one above; the same one costs nothing."""
    syncs = Syncs(monkeypatch)
    attempts.fence(place, 2)
    assert syncs.synced[-2:] == ["01TEST", "operations"]
    assert len(syncs.synced) == 3
    attempts.fence(place, 2)
    assert len(syncs.synced) == 3


def test_fence_waits_for_a_step(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and a fence exclude each other: no step of an old attempt follows a new fence."""
    taken: list[str] = []
    real = steps._append

    def append(handle: int, *rest: Any) -> None:
        import fcntl

        other = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken.append("locked")
        finally:
            os.close(other)
        real(handle, *rest)

    monkeypatch.setattr(steps, "_append", append)
    record_step(str(place), 1, "a")
    assert taken == ["locked"]


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "\x1b[31m", "x" * 201])
def test_names_are_checked(place: Path, name: str) -> None:
    """A name that could not be read back, or not shown, is refused."""
    with pytest.raises(ValueError, match="is no name of a step: write up to 200 printable"):
        record_step(str(place), 1, name)
    assert read_steps(place) == []


def test_handle() -> None:
    """A handle leads back to directory and attempt, whatever the directory is called."""
    assert parse_handle(format_handle("/a:b/ü", 12)) == ("/a:b/ü", 12)
    for bad in ("", "x", "1:relative", "-1:/a", "/a"):
        with pytest.raises(ValueError, match="no handle of an operation"):
            parse_handle(bad)
