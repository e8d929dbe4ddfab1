"""The command line as an installed program: verbs not built yet, usage errors, a full disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

BOUND = 30.0
FULL = Path("/dev/full")


def reconciled(*arguments: str, stdout: int | None = subprocess.PIPE) -> tuple[int, str, str]:
    """Exit code, output and errors of one call."""
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("reconciled")), *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=BOUND,
        check=False,
    )
    return ended.returncode, ended.stdout or "", ended.stderr


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration without controllers."""
    file = tmp_path / "reconciled.yaml"
    file.write_text(f"state: {tmp_path}/state\ncontrollers: {{}}\n")
    return str(file)


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "site/a"),
        ("status", "--json"),
        ("reconcile", "site/a", "--wait"),
        ("suspend", "site/a", "--why", "x", "--until", "tomorrow"),
    ],
    ids=" ".join,
)
def test_a_verb_not_built_yet_accepts_any_options(arguments: tuple[str, ...]) -> None:
    """A verb that is not built yet reports that, with 69, whatever its options."""
    code, _, errors = reconciled(*arguments)
    assert code == 69
    assert f"reconciled {arguments[0]}: not built yet" in errors


def test_unknown_options_of_a_built_verb_are_wrong_usage(config: str) -> None:
    """Unknown options of a verb are wrong usage: exit code 2, and 78 for run."""
    assert reconciled("--config", config, "plan", "--bogus")[0] == 2
    assert reconciled("--config", config, "run", "--bogus")[0] == 78


def test_a_named_unit_must_be_loaded(config: str) -> None:
    """``check --unit`` with an unknown unit is a problem, with or without a service manager."""
    code, _, errors = reconciled("--config", config, "check", "--unit", "no-such-unit")
    assert code == 78
    assert errors.startswith(f"{config}:1:1: --unit no-such-unit: ")


def test_a_grade_that_was_not_checked_is_not_ok(tmp_path: Path) -> None:
    """The schema of a file that is not YAML is reported as not checked."""
    file = tmp_path / "reconciled.yaml"
    file.write_text("state: [\n")
    code, output, _ = reconciled("--config", str(file), "check")
    assert code == 78
    assert "schema       not checked" in output


@pytest.mark.parametrize("verb", ["check", "plan", "budget"])
def test_output_that_cannot_be_written_is_one_line(config: str, verb: str) -> None:
    """A full disk behind standard output is one line of error and 70, not a traceback."""
    with FULL.open("w") as full:
        code, _, errors = reconciled("--config", config, verb, stdout=full.fileno())
    assert code == 70
    assert errors.splitlines()[-1] == f"reconciled {verb}: [Errno 28] No space left on device"
    assert "Traceback" not in errors
