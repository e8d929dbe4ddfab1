"""A loop that hangs while nobody asks for a stop, and what only looks like it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from harness import Daemon, Site, wait_until, with_last_resort

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


def started(site: Site, path: Path) -> Daemon:
    """A daemon whose loop hangs until *path* is there."""
    site.plugin("waits", WAITS)
    site.configure(reconciler="waits:Waits")
    site.declare("w", kind="Wait", path=str(path))
    daemon = site.start(
        wrapper=with_last_resort(HUNG_AFTER=HUNG_AFTER, BLOCKED_AFTER=BLOCKED_AFTER)
    )
    daemon.wait_for("waits.began")
    return daemon


def test_a_loop_that_hangs_without_a_manager_is_left(site: Site, tmp_path: Path) -> None:
    """Where no manager watches, a hang ends the process with 70, its code and all stacks told."""
    daemon = started(site, tmp_path / "never")
    ended = daemon.ended(within=HUNG_AFTER + 10)
    assert ended.code == 70
    assert ended.wall >= HUNG_AFTER - 1.5
    assert daemon.last("loop.blocked")["task"] == "reconcile c/w"
    hung = daemon.last("stop.hung")
    assert any("in reconcile" in line for line in hung["where"])
    assert any("in reconcile" in line for line in ended.report["stacks"])
    assert daemon.left() == []


def test_a_halted_process_does_not_hang(site: Site, tmp_path: Path) -> None:
    """What was halted in the midst of a turn, for longer than a hang is given, goes on."""
    path = tmp_path / "there"
    daemon = started(site, path)
    daemon.send(signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{daemon.pid}/stat").read_text().split()[2] == "T", "halted")
    time.sleep(HUNG_AFTER + 1)  # the time itself is what this is about
    daemon.send(signal.SIGCONT)
    # Told by the thread that would have ended it, after it has looked at whether to.
    daemon.wait_for("loop.blocked")
    path.touch()
    daemon.wait_for("reconcile.done", key="c/w")
    assert daemon.stop().code == 0
    assert daemon.all("stop.hung") == []
