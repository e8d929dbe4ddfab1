"""C07: programs are neither killed too early, nor left behind, nor left unreaped."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from harness import SLACK, Daemon, Limits, Site, children_of, marked, state_of, wait_until

pytestmark = pytest.mark.processes

ORPHANS = 50


def test_c07a_a_critical_program_runs_to_its_end(site: Site) -> None:
    """C07a: the program of a critical operation is not touched by a stop, and has its effect."""
    site.configure(Limits(drain=0.3, critical=20, cleanup=0.5), reconciler="exec")
    script = "touch running; sleep 3; touch done"
    site.declare("site", kind="Exec", apply=["/bin/sh", "-c", script], critical={"budget": "15s"})
    daemon = site.started()
    wait_until((site.resources / "running").exists, "the program")
    stopped = daemon.stop()
    assert (site.resources / "done").exists()
    assert stopped.code == 0
    assert stopped.wall <= 3 + SLACK
    assert daemon.left() == []


def test_c07b_a_stop_ends_the_whole_group(site: Site) -> None:
    """C07b: a cancelled program's pipeline is gone within its deadline, all of it."""
    limits = Limits(drain=0.3, critical=5, cleanup=0.5)
    site.configure(limits, reconciler="exec")
    script = "touch running; trap '' TERM; sleep 999 | cat"
    site.declare("site", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = site.started()
    wait_until((site.resources / "running").exists, "the program")
    wait_until(lambda: len(daemon.left()) >= 4, "the pipeline")
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= limits.drain + limits.cleanup + SLACK
    assert daemon.left() == []


def test_c07b_a_removed_manifest_ends_the_whole_group(site: Site) -> None:
    """C07b: the stop of one key ends its program's group, and the daemon goes on."""
    site.configure(Limits(drain=0.3, critical=5, cleanup=0.5), reconciler="exec")
    script = "touch running; trap '' TERM; sleep 999 | cat"
    manifest = site.declare("site", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = site.started()
    wait_until((site.resources / "running").exists, "the program")
    wait_until(lambda: len(daemon.left()) >= 4, "the pipeline")
    manifest.unlink()
    daemon.wait_for("reconcile.interrupted", key="c/site")
    wait_until(lambda: daemon.left() == [daemon.pid], "the end of the group")
    assert daemon.stop().wall <= SLACK


def test_the_last_resort_ends_ordinary_programs(site: Site) -> None:
    """No program outlives a daemon that hung: the last resort kills the groups, and reports it."""
    both = {
        "c": {"reconciler": "probe:ProbeReconciler", "watch": [{"directory": "resources"}]},
        "x": {"reconciler": "exec", "watch": [{"directory": "resources"}]},
    }
    site.configure(controllers=both)
    site.declare("site", kind="Exec", apply=["/bin/sh", "-c", "touch running; sleep 999 | cat"])
    daemon = site.started()
    wait_until((site.resources / "running").exists, "the program")
    wait_until(lambda: len(daemon.left()) >= 4, "the pipeline")
    site.declare("stuck", do="spin")
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    assert stopped.code == 70
    assert daemon.left() == []
    assert {child["fate"] for child in stopped.report["children"]} == {"killed"}


def test_c07c_as_pid_1_orphans_are_reaped_and_no_status_is_stolen(site: Site) -> None:
    """C07c: as PID 1, 50 double-forked orphans are gone within 1 s; our child's code is right."""
    wrapper = _own_pids()
    site.configure()
    script = f"for i in $(seq {ORPHANS}); do (setsid sleep 0.3 &) ; done; exit 7"
    site.declare("forks", do="program", argv=["/bin/sh", "-c", script])
    daemon = site.start(wrapper=wrapper)
    daemon.wait_for("daemon.starting", pid=1)
    (daemon.pid,) = children_of(daemon.process.pid)
    ended = daemon.wait_for("probe.ended")
    assert ended["code"] == 7
    wait_until(lambda: _sleeping(daemon) == 0, "the end of the orphans")
    wait_until(lambda: _zombies(daemon) == 0, "a process table without zombies", within=1.0)
    stopped = daemon.stop()
    assert stopped.code == 0
    assert daemon.left() == []


def _sleeping(daemon: Daemon) -> int:
    mine = (daemon.pid, daemon.process.pid)
    return sum(state_of(pid) != "Z" for pid in marked(daemon.marker) if pid not in mine)


def _zombies(daemon: Daemon) -> int:
    return sum(state_of(pid) == "Z" for pid in children_of(daemon.pid))


def _own_pids() -> list[str]:
    """The command that gives a process a table of its own; skips, visibly, where it cannot."""
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    if os.geteuid() != 0:
        command[1:1] = ["--user", "--map-root-user"]
    works = shutil.which("unshare") is not None and not subprocess.run(
        [*command, "true"], check=False, capture_output=True
    ).returncode  # fmt: skip
    if not works:
        pytest.skip("unshare cannot make a namespace of process ids here")
    return command
