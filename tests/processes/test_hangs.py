"""An event loop that hangs outside a stop, and a halted process that only looks like it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from harness import Daemon, Workspace, wait_until, with_last_resort

pytestmark = pytest.mark.processes

# Seconds, in place of the minute that the daemon allows.
HUNG_AFTER, BLOCKED_AFTER = 3.0, 1.0  # a check each second comes between them
WAITS = """
import os, time
import attrs
from reconciled.api import Reconciler, done

@attrs.frozen
class Wait:
    path: str

class Waits(Reconciler[Wait]):
    async def reconcile(self, request):
        request.log.info("waits.began")
        while not os.path.exists(request.spec.path):
            time.sleep(0.01)
        return done("it is there")
"""


def started(workspace: Workspace, path: Path) -> Daemon:
    """A daemon whose loop hangs until *path* exists."""
    workspace.plugin("waits", WAITS)
    workspace.configure(reconciler="waits:Waits")
    workspace.declare("w", kind="Wait", path=str(path))
    daemon = workspace.start(
        wrapper=with_last_resort(HUNG_AFTER=HUNG_AFTER, BLOCKED_AFTER=BLOCKED_AFTER)
    )
    daemon.wait_for("waits.began")
    return daemon


def test_a_loop_that_hangs_without_a_manager_is_left(workspace: Workspace, tmp_path: Path) -> None:
    """Without a manager's watchdog a hang ends the process with 70; all stacks are reported."""
    daemon = started(workspace, tmp_path / "never")
    ended = daemon.ended(within=HUNG_AFTER + 10)
    assert ended.code == 70
    assert ended.wall >= HUNG_AFTER - 1.5
    assert daemon.last("loop.blocked")["task"] == "reconcile c/w"
    hung = daemon.last("stop.hung")
    assert any("in reconcile" in line for line in hung["where"])
    assert any("in reconcile" in line for line in ended.report["stacks"])
    assert daemon.left() == []


def test_a_halted_process_does_not_hang(workspace: Workspace, tmp_path: Path) -> None:
    """A process that was halted during a turn, for longer than a hang may last, continues."""
    path = tmp_path / "there"
    daemon = started(workspace, path)
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{daemon.pid}/stat").read_text().split()[2] == "T", "halted")
    time.sleep(HUNG_AFTER + 1)  # the duration of the halt is under test
    daemon.send(signal.SIGCONT)
    # Logged by the thread of the last resort, after it has checked whether to end the process.
    daemon.wait_for("loop.blocked")
    path.touch()
    daemon.wait_for("reconcile.done", key="c/w")
    assert daemon.stop().code == 0
    assert daemon.all("stop.hung") == []
