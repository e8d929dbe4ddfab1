"""Files of decisions: written whole, claimed by a rename, and checked before they are used."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from reconciled.journal.decision_files import DecisionFiles


@pytest.fixture
def files(tmp_path: Path) -> DecisionFiles:
    """Decisions of one kind, in a directory that does not exist yet."""
    return DecisionFiles(tmp_path / "decisions", ".new", 100)


def names(files: DecisionFiles) -> list[str]:
    return sorted(file.name for file in files.directory.iterdir())


def test_a_claimed_decision_cannot_be_withdrawn(files: DecisionFiles) -> None:
    """A decision can be withdrawn until it is claimed, and is pending until it is finished."""
    assert files.withdraw("a") is False
    files.submit("a", b"{}")
    assert files.withdraw("a") is True
    assert files.find("a") is None
    files.submit("a", b"{}")
    (claimed,) = files.claim()
    assert files.withdraw("a") is False
    assert files.find("a") == claimed
    files.finish(claimed)
    files.finish(claimed)
    assert files.find("a") is None
    assert names(files) == []


def test_a_claim_may_be_for_one_name(files: DecisionFiles) -> None:
    """A claim for one name leaves all other decisions as they are."""
    for name in ("a", "b", "a.b"):
        files.submit(name, b"{}")
    assert [file.name for file in files.claim("a")] == ["a.taken"]
    assert names(files) == ["a.b.new", "a.taken", "b.new"]


def test_claims_of_an_earlier_daemon_are_found(files: DecisionFiles) -> None:
    """A claim that was not finished is found again; a newer decision replaces it."""
    files.submit("a", b'{"number": 1}')
    files.claim()
    (file,) = files.claim()
    assert files.read(file) == {"number": 1}
    files.submit("a", b'{"number": 2}')
    (file,) = files.claim()
    assert files.read(file) == {"number": 2}


def test_a_decision_withdrawn_during_a_claim_is_passed_over(
    files: DecisionFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that disappears while others are claimed is no error."""
    files.submit("a", b"{}")
    files.submit("b", b"{}")
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.name == "a.new":
            self.unlink()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert [file.name for file in files.claim()] == ["b.taken"]


def link(file: Path) -> None:
    file.symlink_to(file.with_name("elsewhere"))


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(file.name)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (link, "is a symbolic link: remove it"),
        (os.mkfifo, "is not a regular file: remove it"),
        (Path.mkdir, "is not a regular file: remove it"),
        (make_socket, "is not a regular file: remove it"),
        (
            lambda file: file.write_text("{" + " " * 100 + "}"),
            "is longer than 100 bytes: remove it",
        ),
        (lambda file: file.write_text("{"), "was not written by reconciled: remove it"),
        (lambda file: file.write_text("[]"), "was not written by reconciled: remove it"),
        (lambda file: file.write_bytes(b"\xff"), "was not written by reconciled: remove it"),
    ],
)
def test_other_content_is_refused(
    files: DecisionFiles,
    make: Callable[[Path], object],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that reconciled does not write is refused with its name, and never waited for."""
    files.make_directory()
    monkeypatch.chdir(files.directory)  # the address of a socket holds 107 bytes only
    file = files.directory / "a.taken"
    (files.directory / "elsewhere").write_text("{}")
    make(file)
    with pytest.raises(ValueError, match=f"decisions/a.taken {reason}"):
        files.read(file)


def test_deeply_nested_content_is_refused(tmp_path: Path) -> None:
    """JSON that is nested deeper than Python can read is refused like other content."""
    files = DecisionFiles(tmp_path, ".new", 200_000)
    file = tmp_path / "a.taken"
    file.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="was not written by reconciled: remove it"):
        files.read(file)


def test_a_refused_directory_leaves_no_descriptor_open(files: DecisionFiles) -> None:
    """A directory in place of a decision is read again and again: each time it is closed."""
    (files.directory / "a.taken").mkdir(parents=True)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(ValueError, match="is not a regular file"):
            files.read(files.directory / "a.taken")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_directory_that_cannot_be_read_is_not_empty(
    files: DecisionFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors a claim fails, and the caller tries again; it does not find nothing."""

    def refuse(*_: object) -> list[str]:
        raise OSError(24, "Too many open files")

    files.submit("a", b"{}")
    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(OSError, match="Too many open files"):
        files.claim()
