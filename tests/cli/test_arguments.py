"""The command line as a person types it: names of later verbs, and output that goes nowhere."""

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
def test_a_verb_that_comes_later_says_so_whatever_its_options(arguments: tuple[str, ...]) -> None:
    """Options of a verb that is not built yet are no wrong usage: it says that it comes later."""
    code, _, errors = reconciled(*arguments)
    assert code == 69
    assert f"reconciled {arguments[0]}: not built yet" in errors


def test_unknown_options_of_a_built_verb_are_wrong_usage(config: str) -> None:
    """What a verb does not take is refused: 2, and 78 for the daemon."""
    assert reconciled("--config", config, "plan", "--bogus")[0] == 2
    assert reconciled("--config", config, "run", "--bogus")[0] == 78


def test_a_unit_that_is_named_has_to_be_there(config: str) -> None:
    """``check --unit`` of a unit that nobody knows is a problem, with or without a manager."""
    code, _, errors = reconciled("--config", config, "check", "--unit", "no-such-unit")
    assert code == 78
    assert errors.startswith(f"{config}:1:1: --unit no-such-unit: ")


def test_what_was_not_looked_at_is_not_called_right(tmp_path: Path) -> None:
    """A file that is no YAML has no schema that could be ok."""
    file = tmp_path / "reconciled.yaml"
    file.write_text("state: [\n")
    code, output, _ = reconciled("--config", str(file), "check")
    assert code == 78
    assert "schema       not looked at" in output


@pytest.mark.parametrize("verb", ["check", "plan", "budget"])
def test_output_that_cannot_be_written_is_one_line(config: str, verb: str) -> None:
    """A full disk behind standard output is an error of its own, not a traceback or a result."""
    with FULL.open("w") as full:
        code, _, errors = reconciled("--config", config, verb, stdout=full.fileno())
    assert code == 70
    assert errors.splitlines()[-1] == f"reconciled {verb}: [Errno 28] No space left on device"
    assert "Traceback" not in errors
