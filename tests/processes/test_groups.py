"""C07: programs are not killed too early, not left behind, and always reaped."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from harness import SLACK, Daemon, Limits, Workspace, children_of, marked, state_of, wait_until

pytestmark = pytest.mark.processes

ORPHANS = 50


def test_c07a_a_critical_program_runs_to_its_end(workspace: Workspace) -> None:
    """C07a: a stop does not signal the program of a critical operation, which finishes."""
    workspace.configure(Limits(drain=0.3, critical=20, cleanup=0.5), reconciler="exec")
    script = "touch running; sleep 3; touch done"
    workspace.declare(
        "site", kind="Exec", apply=["/bin/sh", "-c", script], critical={"budget": "15s"}
    )
    daemon = workspace.started()
    wait_until((workspace.resources / "running").exists, "the program")
    stopped = daemon.stop()
    assert (workspace.resources / "done").exists()
    assert stopped.code == 0
    assert stopped.wall <= 3 + SLACK
    assert daemon.left() == []


def test_c07b_a_stop_ends_the_whole_group(workspace: Workspace) -> None:
    """C07b: every process of a cancelled pipeline has ended by the deadline."""
    limits = Limits(drain=0.3, critical=5, cleanup=0.5)
    workspace.configure(limits, reconciler="exec")
    script = "touch running; trap '' TERM; sleep 999 | cat"
    workspace.declare("site", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = workspace.started()
    wait_until((workspace.resources / "running").exists, "the program")
    wait_until(lambda: len(daemon.left()) >= 4, "the pipeline")
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= limits.drain + limits.cleanup + SLACK
    assert daemon.left() == []


def test_c07b_a_removed_manifest_ends_the_whole_group(workspace: Workspace) -> None:
    """C07b: the stop of one key ends the group of its program; the daemon continues."""
    workspace.configure(Limits(drain=0.3, critical=5, cleanup=0.5), reconciler="exec")
    script = "touch running; trap '' TERM; sleep 999 | cat"
    manifest = workspace.declare("site", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = workspace.started()
    wait_until((workspace.resources / "running").exists, "the program")
    wait_until(lambda: len(daemon.left()) >= 4, "the pipeline")
    manifest.unlink()
    daemon.wait_for("reconcile.interrupted", key="c/site")
    wait_until(lambda: daemon.left() == [daemon.pid], "the end of the group")
    assert daemon.stop().wall <= SLACK


def test_the_last_resort_ends_ordinary_programs(workspace: Workspace) -> None:
    """The last resort kills the groups of all programs, and reports it."""
    both = {
        "c": {"reconciler": "probe:ProbeReconciler", "watch": [{"directory": "resources"}]},
        "x": {"reconciler": "exec", "watch": [{"directory": "resources"}]},
    }
    workspace.configure(controllers=both)
    workspace.declare(
        "site", kind="Exec", apply=["/bin/sh", "-c", "touch running; sleep 999 | cat"]
    )
    daemon = workspace.started()
    wait_until((workspace.resources / "running").exists, "the program")
    wait_until(lambda: len(daemon.left()) >= 4, "the pipeline")
    workspace.declare("stuck", do="spin")
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    assert stopped.code == 70
    assert daemon.left() == []
    assert {child["fate"] for child in stopped.report["children"]} == {"killed"}


def test_c07c_as_pid_1_orphans_are_reaped_and_no_status_is_stolen(workspace: Workspace) -> None:
    """C07c: as PID 1 the daemon reaps 50 double-forked orphans, and no exit code is lost."""
    wrapper = _own_pids()
    workspace.configure()
    script = f"for i in $(seq {ORPHANS}); do (setsid sleep 0.3 &) ; done; exit 7"
    workspace.declare("forks", do="program", argv=["/bin/sh", "-c", script])
    daemon = workspace.start(wrapper=wrapper)
    daemon.wait_for("daemon.starting", pid=1)
    (daemon.pid,) = children_of(daemon.process.pid)
    ended = daemon.wait_for("probe.ended")
    assert ended["code"] == 7
    wait_until(lambda: _sleeping(daemon) == 0, "the end of the orphans")
    wait_until(lambda: _zombies(daemon) == 0, "a process table without zombies")
    stopped = daemon.stop()
    assert stopped.code == 0
    assert daemon.left() == []


def _sleeping(daemon: Daemon) -> int:
    own = (daemon.pid, daemon.process.pid)
    return sum(state_of(pid) != "Z" for pid in marked(daemon.marker) if pid not in own)


def _zombies(daemon: Daemon) -> int:
    return sum(state_of(pid) == "Z" for pid in children_of(daemon.pid))


def _own_pids() -> list[str]:
    """The command that starts a process in a PID namespace; skips the test where that fails."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    works = shutil.which("unshare") is not None and not subprocess.run(
        [*command, "true"], check=False, capture_output=True
    ).returncode  # fmt: skip
    if not works:
        pytest.skip("unshare cannot make a namespace of process ids here")
    return command


SETPGID = "python3 -c 'import os, sys; os.setpgid(0, 0); os.execvp(sys.argv[1], sys.argv[1:])'"


@pytest.mark.parametrize("leave", ["timeout 60", SETPGID])
def test_an_apply_that_leaves_its_group_runs_once_at_a_time(
    workspace: Workspace, leave: str
) -> None:
    """``timeout 60 …`` and ``setpgid`` in an apply: no two attempts run at once, none survives."""
    workspace.configure(Limits(drain=0.3, critical=5, cleanup=0.5), reconciler="exec", timeout="1s")
    # A second attempt beside the first finds the directory, and leaves the file "twice".
    body = "mkdir alone || touch twice; trap '' TERM; echo $$ >> began; exec sleep 999"
    script = f"trap 'exit 1' TERM; {leave} sh -c \"{body}\"; :"
    # The directory is removed only after the process that made it has ended.
    first = "for p in $(cat began 2>/dev/null); do [ -e /proc/$p ] || rm -rf alone; done; "
    workspace.declare("site", kind="Exec", apply=["/bin/sh", "-c", first + script])
    daemon = workspace.started()
    began = workspace.resources / "began"
    wait_until(lambda: began.exists() and len(began.read_text().split()) >= 3, "three attempts")
    assert not (workspace.resources / "twice").exists()
    assert daemon.stop().code == 0
    assert daemon.left() == []
