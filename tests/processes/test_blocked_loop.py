"""C06: whatever blocks the event loop is named, and does not delay a stop."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from harness import SLACK, Limits, Workspace, with_last_resort

from reconciled.stop.last_resort import FAULTHANDLER_MARGIN

pytestmark = pytest.mark.processes

# Seconds that a blocked loop has. The shipped value, 5 s, is proven by the stop suite.
QUICK = 1.0
# Seconds that a halt may last, in place of a minute.
HALT = 2.0
# The critical limit does not matter here: no critical operation is open.
LIMITS = Limits(drain=20, critical=300, cleanup=5)
LOCKS = """
import ctypes, os
import attrs, trio
from reconciled.api import Reconciler, done

@attrs.frozen
class Lock:
    path: str

class Locks(Reconciler[Lock]):
    async def reconcile(self, request):
        request.log.info("locks.began")
        while not os.path.exists(request.spec.path):
            await trio.sleep(0.01)
        # Twice the same mutex, which is a deadlock that no signal interrupts.
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):
            ctypes.PyDLL(None).pthread_mutex_lock(mutex)
        return done()
"""


@pytest.mark.parametrize("do", ["spin", "block"])
def test_c06_a_blocked_loop_is_named_and_left_by_the_last_resort(
    workspace: Workspace, do: str
) -> None:
    """C06: with and without the lock, the last resort ends a blocked loop on time, by 70."""
    workspace.configure(LIMITS)
    workspace.declare("stuck", do=do, seconds=40)
    daemon = workspace.start(wrapper=with_last_resort(BLOCKED_AFTER=QUICK))
    daemon.wait_for("probe.began")
    blocked = daemon.wait_for("loop.blocked")
    assert blocked["task"] == "reconcile c/stuck"
    assert any(f"in {do}" in line for line in blocked["where"])
    stopped = daemon.stop()
    assert stopped.code == 70
    assert QUICK - 0.1 <= stopped.wall <= QUICK + SLACK
    hung = daemon.wait_for("stop.hung")
    assert any(f"in {do}" in line for line in hung["where"])
    assert any(f"in {do}" in line for line in stopped.report["stacks"])
    assert stopped.report["signal"] == "SIGTERM"
    assert stopped.report["duration_s"] == pytest.approx(QUICK, abs=SLACK)
    assert daemon.left() == []


def test_c06_a_loop_that_turns_again_ends_by_its_stages(workspace: Workspace) -> None:
    """C06: where the loop runs again in time, the stop goes through its stages."""
    workspace.configure(Limits(drain=0.5, critical=20, cleanup=0.5))
    workspace.declare("stuck", do="block", seconds=2.0)
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= 2.0 + SLACK
    assert daemon.all("stop.hung") == []
    # The limits count from the signal, not from the turn in which the loop received it.
    assert stopped.report["stages"][0]["at_s"] >= 1.5


def test_c06_a_call_that_keeps_the_interpreters_lock_is_left_with_stacks(
    workspace: Workspace,
) -> None:
    """C06: where not even the last resort's thread can run, the C timer exits 1 with stacks."""
    workspace.configure(LIMITS)
    workspace.declare("stuck", do="match")
    daemon = workspace.start(wrapper=with_last_resort(BLOCKED_AFTER=QUICK, LONGEST_HALT=HALT))
    daemon.wait_for("probe.began")
    stopped = daemon.stop(signal.SIGINT)
    assert stopped.code == 1
    assert HALT <= stopped.wall <= HALT + FAULTHANDLER_MARGIN + SLACK
    assert any("in match" in line for line in daemon.other)


def test_a_call_that_waits_with_the_interpreters_lock_is_left_with_stacks(
    workspace: Workspace, tmp_path: Path
) -> None:
    """A call in C that waits during a stop, with the lock held and no processor time, ends by 1."""
    workspace.plugin("locks", LOCKS)
    workspace.configure(LIMITS, reconciler="locks:Locks")
    path = tmp_path / "now"
    workspace.declare("stuck", kind="Lock", path=str(path))
    daemon = workspace.start(wrapper=with_last_resort(BLOCKED_AFTER=QUICK, LONGEST_HALT=HALT))
    daemon.wait_for("locks.began")
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    began = time.monotonic()
    path.touch()
    ended = daemon.ended(began)
    assert ended.code == 1
    assert ended.wall <= HALT + FAULTHANDLER_MARGIN + SLACK
    assert any("in reconcile" in line for line in daemon.other)
    assert daemon.left() == []


def test_an_open_critical_operation_keeps_its_time_beside_a_blocked_loop(
    workspace: Workspace,
) -> None:
    """The last resort leaves no earlier than an open critical operation's own deadline."""
    workspace.configure(Limits(drain=1, critical=30, cleanup=0.5))
    workspace.declare("held", do="critical", seconds=60, budget="2s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    workspace.declare("stuck", do="block", seconds=60)
    daemon.wait_for("probe.began", key="c/stuck")
    stopped = daemon.stop()
    assert stopped.code == 70
    # The budget, of which some was used before, cleanup, and the 3 s of the last resort.
    assert 4.0 <= stopped.wall <= 2 + 0.5 + 3 + SLACK
