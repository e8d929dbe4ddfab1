"""R1, R2 and R9: equal faults are folded, retries are spread, and keys do not affect each other."""

from __future__ import annotations

import datetime as dt
from collections import Counter

import pytest
from harness import Limits, Workspace

pytestmark = pytest.mark.processes


def test_r1_ten_thousand_equal_errors_are_a_few_lines(workspace: Workspace) -> None:
    """R1: of 10,000 equal lines few are shown, and the counts include every one."""
    workspace.configure()
    workspace.declare("a", do="log", count=10_000)
    daemon = workspace.started()
    daemon.wait_for("probe.noise")
    daemon.stop()
    shown = daemon.all("probe.noise")
    counted = sum(line.get("repeated", 0) + ("repeated" not in line) for line in shown)
    assert counted == 10_000
    assert len(shown) <= 4


def test_r1_repeated_failures_of_a_key_and_its_recovery_are_logged_once(
    workspace: Workspace,
) -> None:
    """R1: hundreds of equal failures are one line and a count; the recovery is announced once."""
    workspace.configure(retry={"initial": "5ms", "max": "5ms"})
    workspace.declare("a", do="fail", count=300)
    daemon = workspace.started()
    recovered = daemon.wait_for("fault.recovered", key="c/a")
    daemon.stop()
    shown = daemon.all("reconcile.failed")
    assert len(shown) <= 2
    assert recovered["fault"] == "reconcile.failed"
    counted = sum(line.get("repeated", 0) + ("repeated" not in line) for line in shown)
    assert counted + recovered.get("repeated", 0) == 300
    assert len(daemon.all("fault.recovered")) == 1


def test_r2_keys_that_failed_together_are_retried_apart(workspace: Workspace) -> None:
    """R2: the first retries of 500 keys are spread over the whole delay."""
    workspace.configure(
        Limits(drain=0.1, critical=2, cleanup=0.5), level="debug", concurrency=100,
        retry={"initial": "4s", "max": "4s"},
    )  # fmt: skip
    for number in range(500):
        workspace.declare(f"k{number}", do="fail", count=1000)
    daemon = workspace.started()
    daemon.wait_for("probe.run", turn=2, nth=500)
    first = {line["key"]: _moment(line["time"]) for line in daemon.all("probe.run", turn=1)}
    again = {line["key"]: _moment(line["time"]) for line in daemon.all("probe.run", turn=2)}
    waits = [(again[key] - first[key]).total_seconds() for key in first]
    assert daemon.stop().code == 0
    assert min(waits) >= 1.0
    assert max(waits) <= 4.0 + 10
    # An even spread over 3 s is 67 in each 0.4 s.
    buckets = Counter(int(wait / 0.4) for wait in waits)
    assert max(buckets.values()) <= 250
    assert len([count for count in buckets.values() if count > 10]) >= 6


def test_r9_one_failed_key_stops_no_other(workspace: Workspace) -> None:
    """R9: of ten keys one fails terminally; it is not retried, and the nine others are done."""
    workspace.configure(level="debug", concurrency=1, retry={"initial": "10ms", "max": "10ms"})
    for number in range(10):
        workspace.declare(f"k{number}", do="refuse" if number == 2 else "nothing")
    daemon = workspace.started()
    daemon.wait_for("reconcile.terminal", key="c/k2")
    for number in range(10):
        if number != 2:
            daemon.wait_for("reconcile.done", key=f"c/k{number}")
    assert daemon.stop().code == 0
    assert len(daemon.all("reconcile.started", key="c/k2")) == 1


def _moment(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)
