"""The stop report, as JSON for tools and as text for a person."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import attrs
import pytest

from reconciled.core.stages import Stage
from reconciled.observe.stop_report import (
    RunningProgram,
    StopOutcome,
    StopReport,
    Straggler,
    UnfinishedOperation,
    write,
)

CUT = Straggler(
    name="reconcile site/a",
    key="site/a",
    operation="write",
    stage=Stage.HARD,
    age_s=300.04,
    budget_s=120.0,
    outcome=StopOutcome.CUT,
    where=("sitekit/write.py:12 copy → trio sleep", "sitekit/write.py:40 reconcile"),
)
LEFT = Straggler(
    name="reconcile site/b",
    stage=Stage.HARD,
    age_s=305.0,
    outcome=StopOutcome.LEFT_BEHIND,
    where=("a.py:1 f → trio to_thread_run_sync", "b.py:2 g", "c.py:3 h", "d.py:4 i"),
)
FINISHED = Straggler(
    name="reconcile site/c",
    key="site/c",
    operation="write",
    stage=Stage.STOPPING,
    age_s=41.5,
    budget_s=60.0,
    outcome=StopOutcome.FINISHED,
)
REPORT = StopReport(
    reason="asked by the service manager",
    signal="SIGTERM",
    began="2026-11-30T03:00:00.000Z",
    duration_s=308.1234,
    exit_code=3,
    stages=((Stage.DRAINING, 0.0), (Stage.STOPPING, 20.0), (Stage.HARD, 300.0)),
    critical_finished=2,
    stragglers=(FINISHED, CUT, LEFT),
    interrupted=("site/a", "site/d"),
    operations=(
        UnfinishedOperation("01JG", "site/d", "apply"),
        UnfinishedOperation("01JH", "site/h", "write", held=True),
    ),
    not_served=7,
    children=(
        RunningProgram(4711, "helm", StopOutcome.KILLED, "site/a"),
        RunningProgram(4712, "agent", StopOutcome.LEFT_BEHIND),
    ),
    stacks=("Thread 0x1", '  File "x.py", line 1 in f'),
    log_lines_dropped=12,
)

GOLDEN = """\
Stop took 308.1 s, exit code 3: NOT CLEAN: something was cut, not recorded, or left behind
began   2026-11-30T03:00:00.000Z, reason: SIGTERM, asked by the service manager
stages  DRAINING at 0.0 s, STOPPING at 20.0 s, HARD at 300.0 s

Outlived the signal (3, the worst first):
  LEFT BEHIND reconcile site/b: 305.0 s after the signal, in HARD
              at a.py:1 f → trio to_thread_run_sync
              at b.py:2 g
              at c.py:3 h
  CUT         site/a, operation write: 300.0 s after the signal, in HARD, budget 120.0 s
              at sitekit/write.py:12 copy → trio sleep
  FINISHED    site/c, operation write: 41.5 s after the signal, in STOPPING, budget 60.0 s

Programs that were still running (2):
  LEFT BEHIND pid 4712 agent
  KILLED      pid 4711 helm of site/a

Critical operations that finished within their budget: 2
Interrupted (2), the next start continues: site/a site/d
Open operations (2), the next start recovers them:
  01JG  site/d apply
  01JH  site/h write (held)
Keys that waited and got no run, the next start runs: 7
Log lines dropped because the reader stalled: 12

Run next:
  reconciled journal list   what was cut, and what the next start does with it
  reconciled budget         whether the budgets fit what operations take
  the frames above          a thread, or code that swallows cancellation
  reconciled reap           ends the programs that were left behind
  last-stop.json            stacks of all threads, under "stacks"
"""


def test_the_text_of_the_report() -> None:
    """The text has the verdict first, then the worst outcome first, then what to check."""
    assert REPORT.as_text() == GOLDEN


def test_a_clean_stop_is_short() -> None:
    """The report of a clean stop is five lines long and has no advice."""
    report = StopReport("asked", "2026-11-30T03:00:00.000Z", 0.01, 0, signal="SIGINT")
    assert report.as_text().splitlines() == [
        "Stop took 0.0 s, exit code 0: clean",
        "began   2026-11-30T03:00:00.000Z, reason: SIGINT, asked",
        "stages  none was reached",
        "",
        "Critical operations that finished within their budget: 0",
    ]


def test_the_text_fits_on_one_screen() -> None:
    """Lists are cut so that the text fits on one screen; it names the file that has all."""
    report = attrs.evolve(
        REPORT,
        stragglers=REPORT.stragglers * 100,
        children=REPORT.children * 100,
        interrupted=REPORT.interrupted * 100,
    )
    text = report.as_text()
    assert len(text.splitlines()) < 70
    assert text.count("see last-stop.json") == 3
    assert len(json.loads(report.as_json())["stragglers"]) == 300


def test_names_are_escaped() -> None:
    """Keys, reasons and program names are escaped, so that they cannot forge lines."""
    evil = "x\n\x1b[2Jforged"
    report = attrs.evolve(
        REPORT,
        reason=evil,
        stragglers=(attrs.evolve(CUT, key=evil, operation=evil, where=(evil,)),),
        interrupted=(evil,),
        children=(RunningProgram(1, evil, StopOutcome.KILLED, evil),),
    )
    assert "\x1b" not in report.as_text()
    assert not any(line.startswith("forged") for line in report.as_text().splitlines())


def test_the_keys_of_the_json_are_stable() -> None:
    """Version, names and units of last-stop.json are stable."""
    data = json.loads(REPORT.as_json())
    assert data["version"] == 1
    assert list(data) == [
        "version", "reason", "signal", "began", "duration_s", "exit_code", "stages",
        "critical_finished", "stragglers", "interrupted", "operations", "not_served",
        "children", "stacks", "log_lines_dropped",
    ]  # fmt: skip
    assert data["stages"][1] == {"stage": "stopping", "at_s": 20.0}
    assert data["stragglers"][1] == {
        "name": "reconcile site/a",
        "key": "site/a",
        "operation": "write",
        "stage": "hard",
        "age_s": 300.04,
        "budget_s": 120.0,
        "fate": "cut",
        "where": ["sitekit/write.py:12 copy → trio sleep", "sitekit/write.py:40 reconcile"],
    }
    assert data["children"][0] == {"pid": 4711, "argv0": "helm", "key": "site/a", "fate": "killed"}


def test_write_replaces_both_files(tmp_path: Path) -> None:
    """Both files are replaced, readable by the owner only, and no temporary file remains."""
    assert write(REPORT, tmp_path) == ""
    assert write(attrs.evolve(REPORT, exit_code=0), tmp_path) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-stop.json", "last-stop.txt"]
    assert json.loads((tmp_path / "last-stop.json").read_text())["exit_code"] == 0
    assert (tmp_path / "last-stop.txt").stat().st_mode & 0o777 == 0o600


def test_a_failed_write_keeps_the_previous_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync is returned as text, and the previous file is kept."""
    write(REPORT, tmp_path)

    def fail(_descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    error = write(attrs.evolve(REPORT, exit_code=0), tmp_path)
    assert error.count("no space left") == 2
    assert json.loads((tmp_path / "last-stop.json").read_text())["exit_code"] == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_a_missing_directory_is_returned_as_text(tmp_path: Path) -> None:
    """A missing state directory gives a message, not an exception."""
    error = write(REPORT, tmp_path / "missing")
    assert "last-stop.json" in error
    assert "last-stop.txt" in error


def test_data_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 16: for each file the data is synced, then renamed, then the directory synced."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def traced_fsync(descriptor: int) -> None:
        steps.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def traced_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(Path, "replace", traced_replace)
    write(REPORT, tmp_path)
    assert steps == ["file", "rename", "directory"] * 2
