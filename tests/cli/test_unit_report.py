"""Findings about the unit, and measured durations, in the output of check and budget."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from desk import Desk

from reconciled.cli.unit_report import default_unit, shell_commands
from reconciled.core.resources import Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.store import Store
from reconciled.service.unit.facts import Sandbox, UnitFacts, UnitUnavailable
from reconciled.service.unit.findings import Remedy

FITTING = UnitFacts("reconciled.service", "bus", timeout_stop=360.0, watchdog=60.0)
SHORT = attrs.evolve(FITTING, timeout_stop=10.0)
MIXED = attrs.evolve(FITTING, kill_mode="mixed")


@pytest.fixture
def unit(monkeypatch: pytest.MonkeyPatch) -> dict[str, UnitFacts]:
    """The loaded units, by name; a test adds some."""
    units: dict[str, UnitFacts] = {}

    def read(_environ: Any, name: str, _watchdog: Any) -> UnitFacts | UnitUnavailable:
        return units.get(name, UnitUnavailable(f"{name} is not loaded: not-found"))

    monkeypatch.setattr("reconciled.service.unit.comparison.read_unit", read)
    return units


def test_check_of_a_unit_that_fits(desk: Desk, unit: dict[str, UnitFacts]) -> None:
    """The daemon's unit is checked by default; a choice is a note, which --strict accepts."""
    unit["reconciled.service"] = MIXED
    desk.configure()
    result = desk.say("check", "--strict")
    assert result.code == 0
    assert "unit         ok, reconciled.service" in result.lines
    (note,) = result.err.splitlines()
    assert note.startswith("reconciled.service: KillMode=mixed waits")
    assert note.endswith("(note)")


def test_check_of_a_unit_that_does_not_fit(desk: Desk, unit: dict[str, UnitFacts]) -> None:
    """A unit that does not fit is a warning with commands to paste; --strict fails."""
    unit["reconciled.service"] = SHORT
    desk.configure()
    result = desk.say("check")
    assert result.code == 0
    assert result.err.startswith("reconciled.service: TimeoutStopSec=10s is below the stop budget")
    assert "unit         1 warning, reconciled.service" in result.lines
    directory = "/etc/systemd/system/reconciled.service.d"
    assert result.out.split("for a root shell:\n")[1].splitlines() == [
        f"mkdir -p {directory}",
        f"cat >{directory}/60-stop-budget.conf <<'END'",
        "[Service]",
        "TimeoutStopSec=6min",
        "END",
        "systemctl daemon-reload",
        "",
        "@/r.yaml is valid.",
    ]
    unit["reconciled.service"] = attrs.evolve(SHORT, is_user_unit=True)
    assert "# Commands that fix the unit, for its user's shell:" in desk.say("check").lines
    strict = desk.say("check", "--strict", "--json")
    assert strict.code == 78
    (finding,) = strict.data["unit"]["findings"]
    assert (finding["grade"], finding["directive"]) == ("fault", "TimeoutStopSec")
    assert finding["remedy"]["text"] == "[Service]\nTimeoutStopSec=6min\n"


def test_a_unit_is_named_with_or_without_its_suffix(desk: Desk, unit: dict[str, UnitFacts]) -> None:
    """--unit selects another unit; it must be loaded, while the default one need not be."""
    unit["reconciled@a.service"] = attrs.evolve(FITTING, name="reconciled@a.service")
    desk.configure()
    assert (
        "unit         ok, reconciled@a.service" in desk.say("check", "--unit", "reconciled@a").out
    )
    result = desk.say("check", "--unit", "nosuch")
    assert result.code == 78
    assert result.err == "@/r.yaml:1:1: --unit nosuch: nosuch.service is not loaded: not-found\n"
    quiet = desk.say("check")
    assert (quiet.code, quiet.err) == (0, "")
    assert "unit         not checked: reconciled.service is not loaded: not-found" in quiet.lines


def test_check_names_the_directive_that_prevents_a_write(
    desk: Desk, unit: dict[str, UnitFacts]
) -> None:
    """Declared files and a state directory that the sandbox makes read-only are named."""
    sandbox = Sandbox("strict", "yes", private_tmp=False, writable=("/var/lib/reconciled",))
    unit["reconciled.service"] = attrs.evolve(FITTING, sandbox=sandbox)
    desk.configure(
        "  f: {reconciler: file, watch: [{directory: m}]}\n"
        "  g: {reconciler: file, options: {root: /var/lib/reconciled}, watch: [{directory: n}]}\n"
    )
    (desk.root / "n").mkdir()
    desk.declare("etc", kind="File", path="/etc/motd", content="x")
    desk.write("n/in.yaml", "{kind: File, metadata: {name: in}, spec: {path: a/b, content: x}}")
    result = desk.say("check")
    state, motd = result.err.splitlines()
    assert state.startswith(
        "@/r.yaml:1:1: ProtectSystem=strict prevents reconciled.service from writing @/state; "
    )
    assert motd == (
        "@/m/etc.yaml:1:1: ProtectSystem=strict prevents reconciled.service from writing"
        " /etc/motd; add ReadWritePaths=/etc in a drop-in, or choose another path (warning)"
    )


@pytest.mark.processes
def test_the_commands_to_paste_are_quoted_for_a_shell(tmp_path: Path) -> None:
    """A shell writes the files of a remedy exactly, for any names and text."""
    directory = tmp_path / "a b"
    remedies = [
        Remedy(f"{directory}/x.conf", "[Service]\nA='$HOME' `id` \\\n", "true reload"),
        Remedy("", "", "true reload"),
        Remedy("~/c d/y.conf", "[Unit]\n", "true other"),
    ]
    lines = shell_commands(remedies)
    assert lines[-2:] == ["true other", "true reload"]
    ran = subprocess.run(
        ["sh", "-e"], input="\n".join(lines), text=True, check=True, env={"HOME": str(tmp_path)}
    )
    assert ran.returncode == 0
    assert (directory / "x.conf").read_text() == "[Service]\nA='$HOME' `id` \\\n"
    assert (tmp_path / "c d/y.conf").read_text() == "[Unit]\n"


def redirect(pasted: str, root: Path) -> str:
    """*pasted*, with files below *root* and without a call of the service manager."""
    return pasted.replace("/etc/", f"{root}/etc/").replace("systemctl daemon-reload", "true")


def test_budget_against_the_unit(desk: Desk, unit: dict[str, UnitFacts]) -> None:
    """The unit's limit is shown below the budget; a short one gives code 1 and the remedy."""
    desk.configure()
    unit["reconciled.service"] = FITTING
    result = desk.say("budget")
    assert result.code == 0
    fits = "unit             6min  TimeoutStopSec= of reconciled.service: the budget fits"
    assert result.lines[5] == fits
    unit["reconciled.service"] = attrs.evolve(SHORT, oom_policy="stop")
    short = desk.say("budget")
    assert short.code == 1
    assert "10s  TimeoutStopSec= of reconciled.service: the budget does not fit" in short.out
    pasted = short.out.split("for a root shell:\n")[1].split("\n\n")[0]
    written = subprocess.run(
        ["bash", "-eu"],
        input=redirect(pasted, desk.root),
        text=True,
        capture_output=True,
        check=True,
    )
    assert written.stderr == ""
    drop_in = desk.root / "etc/systemd/system/reconciled.service.d/60-stop-budget.conf"
    assert drop_in.read_text() == "[Service]\nTimeoutStopSec=6min\n"
    assert "OOMPolicy" not in short.out + short.err  # only check reports it
    data = desk.say("budget", "--json").data
    assert (data["unit"]["timeout_stop_s"], data["unit"]["fits"]) == (10.0, False)
    unit.clear()
    assert desk.say("budget").code == 0
    assert desk.say("budget", "--unit", "reconciled").code == 1


def test_budget_shows_measured_durations(desk: Desk) -> None:
    """Critical operations that ended uninterrupted are measured; each key shows its longest."""
    desk.configure()
    desk.state.mkdir(mode=0o700)
    trio.run(operate, desk.state)
    result = desk.say("budget")
    assert result.code == 0
    position = result.lines.index("Measured, the longest of each key (3 critical operations):")
    assert [line.split() for line in result.lines[position + 1 :]] == [
        ["30s", "c/a"],
        ["20s", "c/b"],
    ]
    assert desk.say("budget", "--json").data["measured"] == {
        "operations": 3,
        "longest": [{"key": "c/a", "duration_s": 30.0}, {"key": "c/b", "duration_s": 20.0}],
    }


async def operate(state: Path) -> None:
    """Critical operations of 10, 30 and 20 s, and longer ones that must not be measured."""
    clock = 1_800_000_000.0
    store = Store.open(state)
    operations = OperationJournal.load(store, now=lambda: clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for key, seconds, how in [
            ("c/a", 10, "done"),
            ("c/a", 30, "done"),
            ("c/b", 20, "done"),
            ("c/a", 100, "ordinary"),
            ("c/b", 200, "failed"),
            ("c/b", 300, "again"),
        ]:
            record = await operations.begin(Key(key), "write", {})
            if how != "ordinary":
                operations.mark_critical(record.id)
            if how == "again":
                await operations.count_recovery(record.id)
            clock += seconds
            await operations.end(record.id, Ending.FAILED if how == "failed" else Ending.DONE)
        nursery.cancel_scope.cancel(reason="written")


@pytest.mark.parametrize(
    ("path", "unit_name"),
    [
        ("/etc/reconciled/reconciled.yaml", "reconciled.service"),
        ("/etc/reconciled-web/reconciled.yaml", "reconciled@web.service"),
        ("/etc/reconciled-/reconciled.yaml", "reconciled.service"),
        ("/srv/reconciled-web/reconciled.yaml", "reconciled.service"),
    ],
)
def test_the_unit_is_that_of_the_configuration(path: str, unit_name: str) -> None:
    """The configuration of an instance is compared with the unit of that instance."""
    config = SimpleNamespace(files=[Path(path)])
    assert default_unit(config) == unit_name  # type: ignore[arg-type]


def test_a_note_is_not_a_warning(desk: Desk, unit: dict[str, UnitFacts]) -> None:
    """Commands for a note are offered as such, and not as a correction of the unit."""
    unit["reconciled.service"] = attrs.evolve(FITTING, inhibit_delay=5.0)
    desk.configure()
    result = desk.say("check")
    assert "unit         ok, reconciled.service" in result.lines
    assert "the drain lasts at most 4s and continues in the stop that follows" in result.err
    assert "# Commands that follow the notes, for a root shell:" in result.lines
