"""Secrets and verbs: named outside the unit, checked inside, never printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from desk import Desk

PLUGIN = """
import attrs
from reconciled.api import Reconciler, Secret, done

@attrs.frozen
class Thing:
    token: Secret

@attrs.frozen
class Settings:
    login: Secret

class Mine(Reconciler[Thing]):
    Options = Settings
    async def reconcile(self, request): return done()
"""
CONTROLLERS = """\
  p:
    reconciler: secretive:Mine
    watch: [{directory: m}]
    options: {login: {credential: login}}
  x: {reconciler: exec, watch: [{directory: m}]}
"""
OUTSIDE = (
    "these credentials cannot be checked from here: login, token;"
    " $CREDENTIALS_DIRECTORY is set in the unit alone (warning)"
)


@pytest.fixture
def credentials(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of credentials that is not configured yet, and resources that refer to them."""
    desk.write("plugins/secretive.py", PLUGIN, mode=0o644)
    desk.configure(CONTROLLERS)
    token = {"credential": "token"}
    desk.declare("a", kind="Thing", token=token)
    says = ["sh", "-c", 'echo "it is $TOKEN"; exit 1']
    desk.declare("b", kind="Exec", check=says, apply=["true"], environment={"TOKEN": token})
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    directory = desk.root / "credentials"
    directory.mkdir()
    (directory / "token").write_text("tok-Q7x9\n")
    return directory


@pytest.mark.usefixtures("credentials")
def test_check_outside_the_unit_warns_once(desk: Desk) -> None:
    """From a shell, check prints one warning with all credentials that are referred to."""
    said = desk.say("check")
    assert (said.code, said.err.splitlines()) == (0, [OUTSIDE])
    assert desk.say("check", "--strict").code == 78


def test_check_inside_the_unit_checks_each_credential(
    desk: Desk, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the unit a missing credential of options is a problem, and one of a spec a warning."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    said = desk.say("check")
    assert said.code == 78
    assert "@/r.yaml:7:22: controllers.p.options.login: credential login was not" in said.err
    (credentials / "token").rename(credentials / "login")
    said = desk.say("check")
    assert said.code == 0
    assert sorted(line.split(": credential")[0] for line in said.err.splitlines()) == [
        "@/m/a.yaml:1:1: spec.token",
        "@/m/b.yaml:1:1: spec.environment.TOKEN",
    ]


@pytest.mark.processes
def test_a_plan_shows_the_reference(
    desk: Desk, credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan quotes what the program check printed, redacted; without the secret it is an error."""
    said = desk.say("plan", "x/b")
    assert said.code == 70
    reason = "ProgramFailed: cannot set TOKEN in environment: credential token was not"
    assert f"? x/b: cannot be planned: {reason}" in said.out
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    said = desk.say("plan", "x/b")
    assert said.out.splitlines()[1].strip() == "it is [redacted]"


@pytest.mark.processes
def test_a_start_stalls_what_lacks_its_secret(desk: Desk, credentials: Path) -> None:
    """A controller whose options lack their secret stalls at the start; others run, redacted."""
    code = "import sys; from reconciled.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--config", desk.root / "r.yaml", "run", "--once"],
        env={"CREDENTIALS_DIRECTORY": str(credentials), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 4
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    (stalled,) = (line for line in lines if line["event"] == "controller.stalled")
    assert stalled["controller"] == "p"
    assert "options.login: credential login was not passed in" in stalled["reason"]
    assert any(line.get("key") == "x/b" for line in lines)
    assert "it is [redacted]" in ran.stderr
    assert "tok-Q7x9" not in ran.stderr
