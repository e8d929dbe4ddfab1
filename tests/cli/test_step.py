"""Rules of ``reconciled step``, as programs call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reconciled.cli.main import main
from reconciled.programs import attempts
from reconciled.programs.steps import format_handle, read_steps

pytestmark = pytest.mark.processes


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operation's directory at attempt 2, with its handle in the environment."""
    directory = tmp_path / "operations" / "01TEST"
    directory.mkdir(parents=True)
    attempts.fence(directory, 2)
    monkeypatch.setenv("RECONCILED_HANDLE", format_handle(directory, 2))
    return directory


def names(directory: Path) -> list[str]:
    return [step.name for step in read_steps(directory)]


def test_durable(place: Path) -> None:
    """A noted step is 0, a repeated one too, and it is there once."""
    assert [main(["step", name]) for name in ("a", "b", "a")] == [0, 0, 0]
    assert names(place) == ["a", "b"]


def test_name_like_an_option(place: Path) -> None:
    """A name that begins with a dash is told apart by ``--``, as everywhere."""
    assert main(["step", "--", "-x"]) == 0
    assert names(place) == ["-x"]


def test_not_current(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attempt that is over gets 3 and the word to stop, and leaves nothing."""
    monkeypatch.setenv("RECONCILED_HANDLE", format_handle(place, 1))
    assert main(["step", "a"]) == 3
    told = "attempt 1 is over: the operation is at 2: stop without effects"
    assert capsys.readouterr().err == f"reconciled step: {told}\n"
    attempts.close_attempts(place)
    monkeypatch.setenv("RECONCILED_HANDLE", format_handle(place, 2))
    assert main(["step", "a"]) == 3
    assert names(place) == []


def test_not_durable(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that cannot be synced, or stands behind damage, is 1."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["step", "a"]) == 1
    assert "step a is not durable: [Errno 28] No space left" in capsys.readouterr().err
    (place / "steps").write_text("damaged\nlines\n")
    assert main(["step", "a"]) == 1


@pytest.mark.parametrize("handle", [None, "", "nonsense"])
def test_outside_an_operation(
    place: Path,
    handle: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Called by nobody's program it is wrong usage, in one line."""
    if handle is None:
        monkeypatch.delenv("RECONCILED_HANDLE")
    else:
        monkeypatch.setenv("RECONCILED_HANDLE", handle)
    assert main(["step", "a"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert names(place) == []


def test_imports_nothing_heavy(place: Path) -> None:
    """It needs no trio, no attrs, no parser of options: a program calls it between effects."""
    script = (
        "import sys; before = set(sys.modules); from reconciled.cli import main;"
        " code = main(['step', 'a']); print(code, *sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    code, *modules = done.stdout.split()
    assert code == "0"
    heavy = {"trio", "attr", "attrs", "argparse", "json", "logging", "sqlite3", "yaml", "typing"}
    assert heavy & set(modules) == set()
    assert names(place) == ["a"]


def test_from_a_program(tmp_path: Path, place: Path) -> None:
    """The script calls it with nothing but the handle: no configuration, no state, no socket."""
    script = Path(sys.executable).with_name("reconciled")
    environment = {"RECONCILED_HANDLE": os.environ["RECONCILED_HANDLE"], "PATH": "/usr/bin:/bin"}
    done = subprocess.run([script, "step", "done it"], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert names(place) == ["done it"]
