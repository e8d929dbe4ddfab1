"""C06: a loop that does not turn is named, and never makes a stop late."""

from __future__ import annotations

import signal

import pytest
from harness import SLACK, Limits, Site, with_last_resort

from reconciled.stop.last_resort import FAULTHANDLER_MARGIN

pytestmark = pytest.mark.processes

# Seconds that a blocked loop has. The shipped value, 5 s, is proven by the stop suite.
QUICK = 1.0
# The critical limit does not matter here: no critical operation is open.
LIMITS = Limits(drain=20, critical=300, cleanup=5)


@pytest.mark.parametrize("do", ["spin", "block"])
def test_c06_a_blocked_loop_is_named_and_left_by_the_last_resort(site: Site, do: str) -> None:
    """C06: with and without the lock, the last resort ends a blocked loop on time, by 70."""
    site.configure(LIMITS)
    site.declare("stuck", do=do, seconds=40)
    daemon = site.start(wrapper=with_last_resort(BLOCKED_AFTER=QUICK))
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


def test_c06_a_loop_that_turns_again_ends_by_its_stages(site: Site) -> None:
    """C06: where the blocking code gives way in time, the stop is an ordinary one."""
    site.configure(Limits(drain=0.5, critical=20, cleanup=0.5))
    site.declare("stuck", do="block", seconds=2.0)
    daemon = site.started()
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= 2.0 + SLACK
    assert daemon.all("stop.hung") == []
    # The limits count from the signal, not from when the loop learned of it.
    assert stopped.report["stages"][0]["at_s"] >= 1.5


def test_c06_a_call_that_keeps_the_interpreters_lock_is_left_with_stacks(site: Site) -> None:
    """C06: where not even the last resort's thread can run, the C timer exits 1 with stacks."""
    site.configure(LIMITS)
    site.declare("stuck", do="match")
    daemon = site.start(wrapper=with_last_resort(BLOCKED_AFTER=QUICK))
    daemon.wait_for("probe.began")
    stopped = daemon.stop(signal.SIGINT)
    assert stopped.code == 1
    assert QUICK <= stopped.wall <= QUICK + FAULTHANDLER_MARGIN + SLACK
    assert any("in match" in line for line in daemon.other)


def test_an_open_critical_operation_keeps_its_time_beside_a_blocked_loop(site: Site) -> None:
    """The last resort leaves no earlier than an open critical operation's own deadline."""
    site.configure(Limits(drain=1, critical=30, cleanup=0.5))
    site.declare("held", do="critical", seconds=60, budget="2s")
    daemon = site.started()
    daemon.wait_for("probe.critical")
    site.declare("stuck", do="block", seconds=60)
    daemon.wait_for("probe.began", key="c/stuck")
    stopped = daemon.stop()
    assert stopped.code == 70
    # Its budget, cleanup, and the last resort's 3 s; some of the budget was used before.
    assert 4.0 <= stopped.wall <= 2 + 0.5 + 3 + SLACK
