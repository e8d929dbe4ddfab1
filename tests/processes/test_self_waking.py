"""C11: self-triggered runs are detected, logged once, and slowed down."""

from __future__ import annotations

import datetime as dt

import pytest
from harness import Workspace, wait_until

pytestmark = pytest.mark.processes


def test_c11_a_write_without_a_change_triggers_no_run(workspace: Workspace) -> None:
    """C11: a reconciler that writes only a comment into the watched tree runs once."""
    workspace.configure(level="debug")
    path = workspace.resources / "a.yaml"
    workspace.declare("a", do="touch", path=str(path))
    daemon = workspace.started()
    daemon.wait_for("reconcile.done", key="c/a")
    wait_until(lambda: "# last run" in path.read_text(), "its write")
    # The listing that finds a key declared later has seen the write as well.
    workspace.declare("later")
    daemon.wait_for("reconcile.done", key="c/later")
    assert daemon.stop().code == 0
    assert len(daemon.all("reconcile.started", key="c/a")) == 1


def test_c11_a_reconciler_that_rewrites_its_own_spec_is_slowed_down(workspace: Workspace) -> None:
    """C11: a reconciler that changes its own spec in each run is a loop, which is logged once."""
    workspace.configure(level="debug")
    path = workspace.resources / "a.yaml"
    workspace.declare("a", do="rewrite", path=str(path), count=1)
    daemon = workspace.started()
    looping = daemon.wait_for("reconcile.looping", key="c/a", within=40)
    before = len(daemon.all("reconcile.started", key="c/a"))
    # Backoffs of 1, 2, 4 s follow: two more runs take seconds, where 20 took a few.
    daemon.wait_for("reconcile.started", key="c/a", nth=before + 2, within=20)
    assert daemon.stop().code == 0
    assert "writes what it watches" in looping["reason"]
    assert before <= 30
    assert len(daemon.all("reconcile.looping")) == 1


def test_c11_a_reconciler_that_differs_from_itself_each_time_is_slowed_down(
    workspace: Workspace,
) -> None:
    """C11: a reconciler that finds a difference in each run is slowed down, to hardly any CPU."""
    workspace.configure(level="debug")
    workspace.declare("a", do="stamp")
    daemon = workspace.started()
    daemon.wait_for("reconcile.looping", key="c/a")
    before, cpu = len(daemon.all("reconcile.started")), daemon.cpu()
    first = daemon.wait_for("reconcile.started", nth=before + 1)
    last = daemon.wait_for("reconcile.started", nth=before + 2)
    # The backoff between these two is 2 s, and 1 s before them.
    waited = dt.datetime.fromisoformat(last["time"]) - dt.datetime.fromisoformat(first["time"])
    assert waited >= dt.timedelta(seconds=1)
    assert daemon.cpu() - cpu <= 1.0
    assert len(daemon.all("reconcile.looping")) == 1
    assert daemon.stop().code == 0
