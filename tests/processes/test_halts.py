"""A process that is halted (SIGSTOP) during a stop continues, and ends as its stages say."""

from __future__ import annotations

import signal
import time

import pytest
from harness import Daemon, Limits, Workspace, state_of, wait_until, with_last_resort

pytestmark = pytest.mark.processes

# Longer than everything a stop with these limits allows: its budget is 4.3 s.
LIMITS = Limits(drain=0.4, critical=1.0, cleanup=0.3)
HALT = 8.0


def halt(daemon: Daemon, seconds: float) -> None:
    """Halt the daemon for *seconds*."""
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: state_of(daemon.pid) == "T", "halted")
    time.sleep(seconds)  # the duration of the halt is under test
    daemon.send(signal.SIGCONT)


def check_end(daemon: Daemon, code: int) -> None:
    """The daemon ends by its stages, with *code* and a report."""
    ended = daemon.ended()
    assert ended.code == code, daemon
    assert ended.report["exit_code"] == code
    assert ended.report["signal"] == "SIGTERM"
    assert daemon.last("stop.ended")["exit_code"] == code
    assert daemon.all("stop.hung") == []
    assert daemon.all("stop.left_behind") == []
    assert daemon.other == []
    assert daemon.left() == []


def test_a_halt_at_the_signal(workspace: Workspace) -> None:
    """A stop that was requested during the halt goes through its stages after it."""
    workspace.configure(LIMITS)
    workspace.declare("w", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: state_of(daemon.pid) == "T", "halted")
    daemon.send(signal.SIGTERM)
    time.sleep(HALT)  # the duration of the halt is under test
    daemon.send(signal.SIGCONT)
    check_end(daemon, 0)


def test_a_halt_in_the_drain(workspace: Workspace) -> None:
    """Ordinary work that drains is cancelled after the halt, and the exit code is 0."""
    workspace.configure(LIMITS)
    workspace.declare("w", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    halt(daemon, HALT)
    check_end(daemon, 0)


def test_a_halt_beside_critical_work(workspace: Workspace) -> None:
    """Critical work whose deadline passed during the halt is cut, reported, and the code is 3."""
    workspace.configure(LIMITS)
    workspace.declare("w", do="critical", budget="900ms")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    halt(daemon, HALT)
    check_end(daemon, 3)
    assert daemon.last("operation.cut")["key"] == "c/w"


def test_a_halt_beside_critical_work_with_time_left(workspace: Workspace) -> None:
    """Critical work whose deadline is after the halt is finished."""
    workspace.configure(Limits(drain=0.4, critical=60, cleanup=0.3))
    workspace.declare("w", do="critical", budget="50s", seconds=3)
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    halt(daemon, HALT)
    check_end(daemon, 0)
    assert daemon.last("reconcile.done")["key"] == "c/w"


def test_a_halt_in_a_cleanup(workspace: Workspace) -> None:
    """A cleanup whose time passed during the halt is cut; its task is not left behind."""
    workspace.configure(LIMITS)
    workspace.declare("w", do="clean")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    daemon.send(signal.SIGTERM)  # ends the drain
    halt(daemon, HALT)
    check_end(daemon, 0)
    assert daemon.last("cleanup.cut")["key"] == "c/w"


def test_a_halt_in_hard(workspace: Workspace) -> None:
    """A halt while critical work is being cut changes neither the code nor the report."""
    workspace.configure(Limits(drain=5, critical=30, cleanup=0.5))
    workspace.declare("w", do="critical", budget="20s", seconds=600)
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    assert workspace.verb("stop", "--now").returncode == 0
    daemon.send(signal.SIGINT)
    halt(daemon, HALT)
    check_end(daemon, 3)


def test_halts_in_a_row(workspace: Workspace) -> None:
    """Many short halts during a turn of the loop count as little as a long one."""
    workspace.configure(LIMITS)
    workspace.declare("w", do="block", seconds=2.0)
    daemon = workspace.start(wrapper=with_last_resort(BLOCKED_AFTER=8.0))
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGTERM)
    for _ in range(3):
        halt(daemon, 3.0)
    check_end(daemon, 0)


def test_a_hang_after_a_halt_is_ended(workspace: Workspace) -> None:
    """What hangs before and after a halt is ended by the thread, with its report."""
    workspace.configure(LIMITS)
    workspace.declare("w", do="block", seconds=600)
    daemon = workspace.start(wrapper=with_last_resort(BLOCKED_AFTER=1.0))
    daemon.wait_for("loop.blocked")
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: state_of(daemon.pid) == "T", "halted")
    daemon.send(signal.SIGTERM)
    time.sleep(HALT)  # the duration of the halt is under test
    daemon.send(signal.SIGCONT)
    ended = daemon.ended()
    assert ended.code == 70
    assert any("in block" in line for line in ended.report["stacks"])
    assert daemon.left() == []


@pytest.mark.slow
def test_a_halt_of_half_a_minute_with_the_shipped_limits(workspace: Workspace) -> None:
    """The longest halt that is promised, within the limits that are the defaults."""
    workspace.configure(Limits(drain=20, critical=300, cleanup=5))
    workspace.declare("w", do="block", seconds=2.0)
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    daemon.send(signal.SIGTERM)
    halt(daemon, 30.0)
    check_end(daemon, 0)
