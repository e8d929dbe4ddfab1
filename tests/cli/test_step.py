"""Rules of ``reconciled step``, as programs call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reconciled.cli.main import main
from reconciled.programs import attempt_fence
from reconciled.programs.steps import format_handle, read_steps

pytestmark = pytest.mark.processes


@pytest.fixture
def op_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An operation's directory at attempt 2, with its handle in the environment."""
    directory = tmp_path / "operations" / "01TEST"
    directory.mkdir(parents=True)
    attempt_fence.fence(directory, 2)
    monkeypatch.setenv("RECONCILED_HANDLE", format_handle(directory, 2))
    return directory


def names(directory: Path) -> list[str]:
    return [step.name for step in read_steps(directory)]


def test_step_is_durable(op_dir: Path) -> None:
    """A recorded step exits with 0, a repeated one too, and it is recorded once."""
    assert [main(["step", name]) for name in ("a", "b", "a")] == [0, 0, 0]
    assert names(op_dir) == ["a", "b"]


def test_name_like_an_option(op_dir: Path) -> None:
    """After ``--`` a name may begin with a dash."""
    assert main(["step", "--", "-x"]) == 0
    assert names(op_dir) == ["-x"]


def test_not_current(
    op_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attempt that is not current exits with 3, is advised to stop, and records nothing."""
    monkeypatch.setenv("RECONCILED_HANDLE", format_handle(op_dir, 1))
    assert main(["step", "a"]) == 3
    text = (
        "step a is refused: attempt 1 is not current: the operation is at attempt 2; stop without"
        " further effects"
    )
    assert capsys.readouterr().err == f"reconciled step: {text}\n"
    attempt_fence.close_attempts(op_dir)
    monkeypatch.setenv("RECONCILED_HANDLE", format_handle(op_dir, 2))
    assert main(["step", "a"]) == 3
    assert names(op_dir) == []


def test_not_durable(
    op_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that cannot be synced, or follows a damaged line, exits with 1."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["step", "a"]) == 1
    assert "step a is not durable: [Errno 28] No space left" in capsys.readouterr().err
    (op_dir / "steps").write_text("damaged\nlines\n")
    assert main(["step", "a"]) == 1


@pytest.mark.parametrize("handle", [None, "", "nonsense"])
def test_outside_an_operation(
    op_dir: Path,
    handle: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Outside of an operation it is wrong usage, with a message of one line."""
    if handle is None:
        monkeypatch.delenv("RECONCILED_HANDLE")
    else:
        monkeypatch.setenv("RECONCILED_HANDLE", handle)
    assert main(["step", "a"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert names(op_dir) == []


def test_imports_nothing_heavy(op_dir: Path) -> None:
    """It imports no trio, attrs or argparse: a program calls it between effects."""
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
    assert names(op_dir) == ["a"]


def test_from_a_program(tmp_path: Path, op_dir: Path) -> None:
    """It needs the handle alone: no configuration, state directory or socket."""
    script = Path(sys.executable).with_name("reconciled")
    environment = {"RECONCILED_HANDLE": os.environ["RECONCILED_HANDLE"], "PATH": "/usr/bin:/bin"}
    done = subprocess.run([script, "step", "done it"], env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0
    assert names(op_dir) == ["done it"]
