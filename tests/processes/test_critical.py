"""C01, first half: critical operations finish; work that can never finish is left behind."""

from __future__ import annotations

import pytest
from harness import SLACK, Limits, Workspace

pytestmark = pytest.mark.processes


def test_c01_a_critical_operation_outlives_the_drain(workspace: Workspace) -> None:
    """C01: a critical operation that is longer than the drain finishes, and the exit code is 0."""
    workspace.configure(Limits(drain=0.5, critical=20, cleanup=0.5))
    workspace.declare("slow", do="critical", seconds=3.0, budget="10s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    stopped = daemon.stop()
    daemon.wait_for("probe.finished")
    daemon.wait_for("reconcile.done", key="c/slow")
    assert stopped.code == 0
    assert stopped.wall <= 3.0 + SLACK
    assert stopped.report["critical_finished"] == 1
    assert stopped.report["interrupted"] == []
    outcomes = [(each["key"], each["fate"]) for each in stopped.report["stragglers"]]
    assert outcomes == [("c/slow", "finished")]


def test_c01_what_was_finished_is_not_done_again(workspace: Workspace) -> None:
    """C01: the next start finds the fingerprint of an operation that finished during a stop."""
    workspace.configure(Limits(drain=0.2, critical=20, cleanup=0.5), level="debug")
    workspace.declare("slow", do="critical", seconds=1.0, budget="10s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    assert daemon.stop().code == 0
    daemon = workspace.started()
    assert daemon.wait_for("reconcile.started", key="c/slow")["causes"] == ["start"]


def test_a_critical_operation_may_begin_while_the_drain_lasts(workspace: Workspace) -> None:
    """A run may begin its critical section during the drain, and finishes it."""
    workspace.configure(Limits(drain=5, critical=20, cleanup=0.5))
    workspace.declare("late", do="late", seconds=0.5, path=str(workspace.root / "go"))
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(15)
    daemon.wait_for("stop.began", critical=0)
    (workspace.root / "go").touch()
    stopped = daemon.ended()
    daemon.wait_for("probe.finished")
    assert stopped.code == 0
    assert stopped.wall <= 0.5 + SLACK


def test_a_late_critical_operation_ends_by_the_hard_limit_of_the_stop(workspace: Workspace) -> None:
    """A section that begins in the drain is clamped to the hard limit of the stop."""
    workspace.configure(Limits(drain=1.5, critical=2.0, cleanup=0.5))
    # Its budget alone would last until 3 s after the signal.
    workspace.declare("late", do="delayed", delay=1.0, seconds=60, budget="2s")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    daemon.wait_for("probe.critical")
    cut = daemon.last("operation.cut")
    assert stopped.code == 3
    assert 1.9 <= stopped.report["duration_s"] <= 2.0 + SLACK
    assert "the hard limit of the stop" in cut["reason"]


@pytest.mark.parametrize("do", ["thread", "swallow"])
def test_work_that_ignores_its_cancellation_is_left_behind_and_named(
    workspace: Workspace, do: str
) -> None:
    """C15: a hung thread or a swallowed cancellation is named, and does not delay the exit."""
    limits = Limits(drain=0.3, critical=5, cleanup=0.5)
    workspace.configure(limits)
    workspace.declare("stuck", do=do, seconds=600)
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    left = daemon.wait_for("stop.left_behind", key="c/stuck")
    assert stopped.code == 3
    assert stopped.wall <= limits.drain + limits.cleanup + SLACK
    assert any("probe.py" in line for line in left["where"])
    assert [each["fate"] for each in stopped.report["stragglers"]] == ["left behind"]
    assert daemon.left() == []
