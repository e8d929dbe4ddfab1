"""Further signals during a stop, and the signals that do not stop the daemon."""

from __future__ import annotations

import signal
import time

import pytest
from harness import SLACK, Limits, Line, Workspace, wait_until, with_last_resort

pytestmark = pytest.mark.processes

LONG = Limits(drain=30, critical=60, cleanup=0.5)


def test_a_second_sigterm_ends_the_drain(workspace: Workspace) -> None:
    """A second SIGTERM ends the drain: ordinary runs are cancelled, the exit code is 0."""
    workspace.configure(LONG)
    workspace.declare("busy", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    began, cpu = time.monotonic(), daemon.cpu()
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began", signal="SIGTERM")
    daemon.send(signal.SIGTERM)
    stopped = daemon.ended(began, cpu)
    assert stopped.code == 0
    assert stopped.wall <= SLACK
    assert stopped.report["interrupted"] == ["c/busy"]


def test_no_number_of_sigterms_shortens_a_critical_operation(workspace: Workspace) -> None:
    """However often SIGTERM comes, a critical operation finishes, and the exit code is 0."""
    workspace.configure(LONG)
    workspace.declare("busy", do="critical", seconds=2.0, budget="10s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    began, cpu = time.monotonic(), daemon.cpu()
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    for _ in range(20):
        daemon.send(signal.SIGTERM)
        time.sleep(0.02)  # the pace of an impatient person; nothing is awaited
    stopped = daemon.ended(began, cpu)
    daemon.wait_for("probe.finished")
    assert stopped.code == 0
    assert 1.5 <= stopped.wall <= 2.0 + SLACK
    assert stopped.report["critical_finished"] == 1


def test_sigint_moves_one_stage_on_each_time(workspace: Workspace) -> None:
    """SIGINT begins a stop, SIGINT ends its drain, SIGINT cuts what is critical: exit code 3."""
    workspace.configure(LONG)
    workspace.declare("ordinary", do="sleep")
    workspace.declare("held", do="critical", seconds=50, budget="50s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    daemon.wait_for("probe.began", key="c/ordinary")
    began, cpu = time.monotonic(), daemon.cpu()
    daemon.send(signal.SIGINT)
    daemon.wait_for("stop.began", signal="SIGINT")
    daemon.send(signal.SIGINT)
    daemon.wait_for("reconcile.interrupted", key="c/ordinary")
    assert daemon.alive
    daemon.send(signal.SIGINT)
    stopped = daemon.ended(began, cpu)
    daemon.wait_for("operation.cut")
    assert stopped.code == 3
    assert stopped.wall <= SLACK
    assert [stage["stage"] for stage in stopped.report["stages"]] == [
        "draining", "stopping", "hard",
    ]  # fmt: skip
    outcomes = {each["key"]: each["fate"] for each in stopped.report["stragglers"]}
    assert outcomes == {"c/ordinary": "cancelled", "c/held": "cut"}


def test_a_reload_is_refused_during_a_stop(workspace: Workspace) -> None:
    """SIGHUP during a stop changes nothing and is logged as refused."""
    workspace.configure(LONG)
    workspace.declare("busy", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.refused")
    assert daemon.stop(signal.SIGTERM).code == 0
    assert daemon.all("reload.done") == []


def test_a_reload_asked_for_during_the_start_is_done_after_it(workspace: Workspace) -> None:
    """SIGHUP during the start causes a reload once the daemon is ready."""
    workspace.plugin(
        "slow",
        "import os, pathlib, time\n"
        'os.write(2, b\'{"event": "test.importing"}\\n\')\n'
        f"while not pathlib.Path({str(workspace.root / 'go')!r}).exists(): time.sleep(0.01)\n"
        f"exec(pathlib.Path({str(workspace.plugins / 'probe.py')!r}).read_text())\n",
    )
    workspace.configure(reconciler="slow:ProbeReconciler")
    daemon = workspace.start()
    daemon.wait_for("test.importing")
    daemon.send(signal.SIGHUP)
    (workspace.root / "go").touch()
    daemon.wait_for("reload.done", kept=["c"])
    assert daemon.stop().code == 0


def test_stacks_and_task_tree_are_shown_on_demand(workspace: Workspace) -> None:
    """SIGUSR1 dumps the stacks of all threads, SIGUSR2 logs the task tree; the daemon continues."""
    workspace.configure()
    workspace.declare("busy", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGUSR2)
    daemon.wait_for("tasks.tree")
    wait_until(lambda: any(_is_of_busy(each) for each in daemon.all("tasks.tree")), "the run")
    daemon.send(signal.SIGUSR1)
    daemon.wait_for_text("most recent call first")
    assert daemon.stop().code == 0


def _is_of_busy(line: Line) -> bool:
    return "reconcile c/busy" in line.get("task", "") and "probe.py" in line["task"]


def test_stacks_are_shown_while_the_loop_is_blocked(workspace: Workspace) -> None:
    """SIGUSR1 works while the loop is blocked: the blocking frame is in the dump."""
    workspace.configure()
    workspace.declare("stuck", do="block", seconds=60)
    daemon = workspace.start(wrapper=with_last_resort(BLOCKED_AFTER=1.0))
    # The loop is in the blocking call by then, not on its way there.
    daemon.wait_for("loop.blocked")
    daemon.send(signal.SIGUSR1)
    daemon.wait_for_text("in block")
    daemon.send(signal.SIGKILL)
    assert daemon.ended().code == -signal.SIGKILL
