"""Rules of the steps that programs record, and of the fence against older attempt_fence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from reconciled.core.errors import StaleAttempt, StepsDamaged
from reconciled.programs import attempt_fence, steps
from reconciled.programs.steps import format_handle, parse_handle, read_steps, record_step


@pytest.fixture
def op_dir(tmp_path: Path) -> Path:
    """An operation's directory, at attempt 1."""
    directory = tmp_path / "operations" / "01TEST"
    directory.mkdir(parents=True)
    attempt_fence.fence(directory, 1)
    return directory


def names(directory: Path) -> list[str]:
    return [step.name for step in read_steps(directory)]


class Syncs:
    """The names of the files and directories that were synced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        real = os.fsync

        def fsync(file: int) -> None:
            self.synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
            real(file)

        monkeypatch.setattr(os, "fsync", fsync)


def test_steps_are_kept_in_order(op_dir: Path) -> None:
    """Steps are read in the order in which they were recorded, with their attempt."""
    record_step(str(op_dir), 1, "copied")
    attempt_fence.fence(op_dir, 2)
    record_step(str(op_dir), 2, "switched over ü")
    assert [(step.attempt, step.name) for step in read_steps(op_dir)] == [
        (1, "copied"),
        (2, "switched over ü"),
    ]


def test_no_steps_are_recorded(tmp_path: Path, op_dir: Path) -> None:
    """Without a file or directory no step is done."""
    assert read_steps(op_dir) == []
    assert read_steps(tmp_path / "missing") == []


def test_repeated_name_is_one_step(op_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C04: a name that is already recorded adds no line and is synced like a new one."""
    record_step(str(op_dir), 1, "copied")
    before = (op_dir / "steps").read_bytes()
    attempt_fence.fence(op_dir, 2)
    syncs = Syncs(monkeypatch)
    record_step(str(op_dir), 2, "copied")
    assert (op_dir / "steps").read_bytes() == before
    assert syncs.synced == ["steps"]


def test_new_file_and_directory_are_synced(op_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step syncs the file and then the directory, later steps the file."""
    syncs = Syncs(monkeypatch)
    record_step(str(op_dir), 1, "a")
    assert syncs.synced == ["steps", "01TEST"]
    record_step(str(op_dir), 1, "b")
    assert syncs.synced[2:] == ["steps"]


def test_failed_sync_is_an_error(op_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose sync failed is not reported durable."""

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        record_step(str(op_dir), 1, "a")


def test_c04_cut_at_every_byte(op_dir: Path) -> None:
    """C04: a torn last line is ignored wherever it was cut, and the next step replaces it."""
    for name in ("first", "second", "third"):
        record_step(str(op_dir), 1, name)
    whole = (op_dir / "steps").read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        (op_dir / "steps").write_bytes(whole[:end])
        assert names(op_dir) == ["first", "second"]
        record_step(str(op_dir), 1, "4")  # may be shorter than the torn line
        assert names(op_dir) == ["first", "second", "4"]


def test_c04_flipped_bit(op_dir: Path) -> None:
    """C04: a damaged line before the last is reported with its number, whichever bit flipped."""
    for name in ("first", "second"):
        record_step(str(op_dir), 1, name)
    whole = (op_dir / "steps").read_bytes()
    for position in range(whole.index(b"\n")):
        for bit in range(8):
            bad = bytearray(whole)
            bad[position] ^= 1 << bit
            (op_dir / "steps").write_bytes(bad)
            with pytest.raises(StepsDamaged, match=r"steps:[12]:1: damaged line before"):
                read_steps(op_dir)
            with pytest.raises(StepsDamaged):
                record_step(str(op_dir), 1, "third")
            assert (op_dir / "steps").read_bytes() == bad


@pytest.mark.parametrize("attempt", [0, 2, 11])
def test_other_attempts_are_refused(op_dir: Path, attempt: int) -> None:
    """Only the current attempt records steps; a refused one changes nothing."""
    text = f"attempt {attempt} is not current: the operation is at attempt 1"
    with pytest.raises(StaleAttempt, match=text):
        record_step(str(op_dir), attempt, "a")
    assert read_steps(op_dir) == []


def test_fenced_when_the_next_begins(op_dir: Path) -> None:
    """After the next attempt has started, the one before is refused, durably."""
    attempt_fence.fence(op_dir, 2)
    with pytest.raises(StaleAttempt):
        record_step(str(op_dir), 1, "a")
    record_step(str(op_dir), 2, "a")


def test_programs_of_an_ended_operation_cannot_record_steps(op_dir: Path) -> None:
    """No step is recorded after the operation has ended or its files were removed."""
    attempt_fence.close_attempts(op_dir)
    with pytest.raises(StaleAttempt, match="attempt 1 is not current: the operation has ended"):
        record_step(str(op_dir), 1, "a")
    with pytest.raises(StaleAttempt, match=r"the operation of .*/missing has ended"):
        record_step(str(op_dir.with_name("missing")), 1, "a")
    attempt_fence.close_attempts(op_dir.with_name("missing"))
    assert not op_dir.with_name("missing").exists()


def test_fence_is_durable(op_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new attempt is synced with its directory and parent; the same one is not written."""
    syncs = Syncs(monkeypatch)
    attempt_fence.fence(op_dir, 2)
    assert syncs.synced[-2:] == ["01TEST", "operations"]
    assert len(syncs.synced) == 3
    attempt_fence.fence(op_dir, 2)
    assert len(syncs.synced) == 3


def test_fence_waits_for_a_step(op_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and a fence exclude each other: no old attempt records a step after a new fence."""
    taken: list[str] = []
    real = steps._append

    def append(handle: int, *rest: Any) -> None:
        import fcntl

        other = os.open(op_dir, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            taken.append("locked")
        finally:
            os.close(other)
        real(handle, *rest)

    monkeypatch.setattr(steps, "_append", append)
    record_step(str(op_dir), 1, "a")
    assert taken == ["locked"]


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "\x1b[31m", "x" * 201])
def test_names_are_checked(op_dir: Path, name: str) -> None:
    """A name that could not be read back or displayed is refused."""
    with pytest.raises(ValueError, match="is not a step name: write 1 to 200 printable"):
        record_step(str(op_dir), 1, name)
    assert read_steps(op_dir) == []


def test_handle() -> None:
    """A handle holds directory and attempt, whatever the directory's name is."""
    assert parse_handle(format_handle("/a:b/ü", 12)) == ("/a:b/ü", 12)
    for bad in ("", "x", "1:relative", "-1:/a", "/a"):
        with pytest.raises(ValueError, match="not a handle of an operation"):
            parse_handle(bad)
