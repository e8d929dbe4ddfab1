"""The files in systemd/ are consistent with each other and with the program.

No manager is involved: tests/systemd runs the units under a real one.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from reconciled.cli.main import _parsed
from reconciled.config.load import load
from reconciled.config.model import StopConfig
from reconciled.core.durations import parse_duration

ROOT = Path(__file__).resolve().parents[1]
SYSTEMD = ROOT / "systemd"
SERVICE, INSTANCE = SYSTEMD / "reconciled.service", SYSTEMD / "reconciled@.service"
FORCED_POWER_OFF = 30 * 60
OLDEST = 252
DROP_INS = sorted({*SYSTEMD.glob("*.conf")} - {*SYSTEMD.glob("reconciled.*")})


def settings(path: Path) -> list[tuple[str, str]]:
    """The lines of the unit *path* as names and values, in their order."""
    lines = [line for line in path.read_text().splitlines() if re.match(r"[A-Z]\w+=", line)]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines)]


def span(text: str) -> float:
    """A time as systemd writes it, in seconds."""
    return parse_duration(text.replace("min", "m"))


def stop_times(values: dict[str, str]) -> tuple[float, float, float]:
    """TimeoutStopSec, TimeoutAbortSec, and the longest time that the reaper itself takes."""
    words = shlex.split(values["ExecStopPost"])
    reaper = sum(span(word.partition("=")[2]) for word in words if word.startswith("--"))
    return span(values["TimeoutStopSec"]), span(values["TimeoutAbortSec"]), reaper


@pytest.mark.parametrize(
    ("drop_in", "critical"), [("", StopConfig().critical), ("60-long-stop.conf", 600.0)]
)
def test_the_unit_allows_the_longest_stop(drop_in: str, critical: float) -> None:
    """TimeoutStopSec= is the stop budget and ten percent; the reaper fits; 30 min never pass."""
    values = dict(settings(SERVICE))
    values |= dict(settings(SYSTEMD / drop_in)) if drop_in else {}
    limit, abort, reaper = stop_times(values)
    budget = critical + StopConfig().cleanup + 3
    assert limit >= budget * 1.1
    assert critical < reaper < limit
    # Stop, abort, reaper, and the signals of systemd to the processes that are left.
    left_over = 0 if "process" in values["KillMode"] else 2 * limit
    assert limit + abort + limit + left_over < FORCED_POWER_OFF


def test_an_instance_is_the_service_with_names_of_its_own() -> None:
    """reconciled@.service differs from reconciled.service by ``-%i``, and by its target."""
    own = {
        "Description": "Reconciliation daemon, instance %i",
        "SyslogIdentifier": "reconciled-%i",
        "WantedBy": "reconciled.target",
        "LoadCredential": "kubeconfig:reconciled-%i.kubeconfig",
    }
    wanted = []
    for name, value in settings(SERVICE):
        named = re.sub(r"(^|[SC]/)reconciled\b", r"\1reconciled-%i", value)
        shared = name == "User" or name.startswith("Exec")
        wanted.append((name, own.get(name, value if shared else named)))
    assert [each for each in settings(INSTANCE) if each[0] != "PartOf"] == wanted
    assert dict(settings(INSTANCE))["PartOf"] == "reconciled.target"


def test_every_directive_is_argued() -> None:
    """docs/systemd.md gives the reason of each line of the unit, and of no other."""
    text = (ROOT / "docs/systemd.md").read_text()
    table = text.partition("<!-- directives -->")[2].partition("\n\n###")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    argued = {name for cell in first for name in re.findall(r"`(\w+)=", cell)}
    assert argued == {name for name, _ in settings(SERVICE)}


def test_what_is_newer_names_its_version() -> None:
    """A drop-in for newer managers is named after the version that first knows its keys."""
    newer = [path for path in DROP_INS if re.match(r"\d{3}-", path.name)]
    assert newer
    for path in newer:
        assert int(path.name.partition("-")[0]) > OLDEST


@pytest.mark.parametrize("path", DROP_INS, ids=[path.name for path in DROP_INS])
def test_a_drop_in_changes_something(path: Path) -> None:
    """Each line of a drop-in differs from the unit: nothing is repeated."""
    assert settings(path)
    assert [each for each in settings(path) if each in settings(SERVICE)] == []


def test_the_command_line_takes_what_the_units_call() -> None:
    """Every command in a unit or drop-in is one that the program has."""
    called = [
        shlex.split(value)
        for path in [*SYSTEMD.glob("*.service"), *DROP_INS]
        for name, value in settings(path)
        if name.startswith("Exec") and value
    ]
    assert len(called) > 5
    for program, *arguments in called:
        # A name, which systemd resolves: it finds the link of a venv and the file of a package.
        assert program == "reconciled"
        assert _parsed(arguments).verb == arguments[0]


def test_everything_is_installed() -> None:
    """The installer names each file that is not an optional drop-in."""
    text = (SYSTEMD / "install.sh").read_text()
    files = [path.name for path in SYSTEMD.glob("reconciled*")]
    assert [name for name in files if name not in text] == []


def test_the_installer_is_a_shell_program() -> None:
    """Bash can parse it; without a verb it lists its variables, and changes nothing."""
    told = subprocess.run(
        [SYSTEMD / "install.sh"], capture_output=True, text=True, timeout=10, check=False
    )
    assert told.returncode == 2
    assert set(re.findall(r"\b([A-Z]+)=", told.stdout)) == {
        *("PREFIX", "BINDIR", "UNITDIR", "SYSUSERSDIR", "TMPFILESDIR", "CATALOGDIR", "SYSCONFDIR"),
        *("PYTHON", "WHEELS", "SYSTEMD", "DESTDIR"),
    }


def test_the_installed_configuration_is_valid(tmp_path: Path) -> None:
    """The configuration of a first installation is valid, and has the directories of the unit."""
    path = tmp_path / "reconciled.yaml"
    path.write_text((SYSTEMD / "reconciled.yaml").read_text())
    path.chmod(0o640)
    config = load(path, {}).config
    values = dict(settings(SERVICE))
    assert config.state == Path("/var/lib", values["StateDirectory"])
    assert str(config.control) == f"/run/{values['RuntimeDirectory']}/control.sock"
