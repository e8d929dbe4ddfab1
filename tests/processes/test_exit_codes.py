"""The exit codes of ``run`` other than those of a stop: 75, 78 and ``run --once``; R7."""

from __future__ import annotations

import pytest
from harness import SLACK, Limits, Workspace, wait_until

pytestmark = pytest.mark.processes


def test_a_second_daemon_is_refused_with_75(workspace: Workspace) -> None:
    """A second daemon on one state directory waits 5 s and ends with 75; the first goes on."""
    workspace.configure(level="debug")
    first = workspace.started()
    second = workspace.start()
    refused = second.ended()
    assert refused.code == 75
    assert refused.wall >= 5.0
    locked = second.last("daemon.locked")
    assert f"process {first.pid}" in locked["reason"]
    workspace.declare("a")
    first.wait_for("reconcile.done", key="c/a")
    assert first.stop().code == 0


def test_a_stop_while_another_daemon_is_waited_for_leaves_at_once(workspace: Workspace) -> None:
    """A signal during the wait for the lock ends the daemon at once, with 0."""
    workspace.configure()
    first = workspace.started()
    second = workspace.start()
    second.wait_for_file("lock")
    stopped = second.stop()
    assert stopped.code == 0
    assert stopped.wall <= SLACK
    assert first.stop().code == 0


def test_a_killed_daemon_leaves_no_lock(workspace: Workspace) -> None:
    """After a SIGKILL the next start gets the lock at once."""
    workspace.configure()
    first = workspace.started()
    first.send(9)
    assert first.ended().code == -9
    second = workspace.started()
    assert second.all("daemon.locked") == []
    assert second.stop().code == 0


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("state: state\ncontrolers: {}\n", ":2:1"),
        ("state: [\n", ":"),
        ("state: state\nstop: {drain: 20}\n", ":2:15"),
    ],
)
def test_a_bad_configuration_is_78_with_its_location(
    workspace: Workspace, text: str, at: str
) -> None:
    """An invalid configuration is 78 with file and line, and nothing is written."""
    workspace.configure()
    workspace.write(workspace.config, text)
    daemon = workspace.start()
    assert daemon.ended().code == 78
    fault = daemon.last("config.invalid")
    assert f"{workspace.config}{at}" in fault["at"]
    assert not (workspace.root / "state").exists()
    assert daemon.other == []


def test_a_missing_configuration_is_78(workspace: Workspace) -> None:
    """A missing configuration is 78 and is logged without a traceback."""
    daemon = workspace.start()
    assert daemon.ended().code == 78
    assert "r.yaml" in daemon.last("config.invalid")["at"]
    assert daemon.other == []


def test_wrong_usage_of_run_is_78(workspace: Workspace) -> None:
    """A misspelt option is 78, on which the unit does not restart."""
    workspace.configure()
    assert workspace.start("--onse").ended().code == 78


def test_once_runs_each_key_and_ends_with_0(workspace: Workspace) -> None:
    """``run --once`` runs each key to its outcome, then exits with 0."""
    workspace.configure(level="debug")
    for name in ("a", "b", "c"):
        workspace.declare(name)
    daemon = workspace.start("--once")
    assert daemon.ended().code == 0
    for name in ("a", "b", "c"):
        assert len(daemon.all("reconcile.done", key=f"c/{name}")) == 1


def test_once_ends_with_4_and_names_each_key_that_is_not_done(workspace: Workspace) -> None:
    """``run --once``: terminal, and failed three times in a row, is 4, with the key and why."""
    workspace.configure(retry={"initial": "10ms", "max": "10ms"})
    workspace.declare("good")
    workspace.declare("never", do="refuse")
    workspace.declare("down", do="fail", count=1000)
    workspace.declare("twice", do="fail", count=2)
    daemon = workspace.start("--once")
    assert daemon.ended().code == 4
    named = {line["key"] for line in daemon.all("once.not_done")}
    assert named == {"c/never", "c/down"}


def test_once_ends_with_4_where_a_source_could_not_be_read(workspace: Workspace) -> None:
    """``run --once`` exits with 4 where a source could not be read."""
    workspace.configure()
    workspace.resources.rmdir()
    daemon = workspace.start("--once")
    assert daemon.ended().code == 4
    assert daemon.all("once.source_incomplete")


def test_once_that_is_stopped_names_what_it_did_not_get_to(workspace: Workspace) -> None:
    """``run --once``: a signal stops it; keys without an outcome are named, exit code 4."""
    workspace.configure(Limits(drain=0.3, critical=3, cleanup=0.5))
    workspace.declare("busy", do="sleep")
    daemon = workspace.start("--once")
    daemon.wait_for("probe.began")
    daemon.wait_for("daemon.ready")
    stopped = daemon.stop()
    assert stopped.code == 4
    assert [line["key"] for line in daemon.all("once.not_done")] == ["c/busy"]


def test_r7_a_plan_neither_waits_for_nor_holds_up_the_daemon(workspace: Workspace) -> None:
    """R7: ``plan`` beside a running daemon takes no lock, ends at once, and changes nothing."""
    workspace.configure(reconciler="exec")
    script = "touch running; sleep 600"
    workspace.declare("a", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = workspace.started()
    wait_until((workspace.resources / "running").exists, "the run")
    before = sorted(path.name for path in workspace.state.iterdir())
    plan = workspace.verb("plan")
    assert plan.returncode == 1, plan.stderr
    assert sorted(path.name for path in workspace.state.iterdir()) == before
    assert daemon.stop().code == 0
