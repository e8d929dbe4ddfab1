"""C05: nothing starts after the instant of a stop."""

from __future__ import annotations

import datetime as dt
import os
import random
import time

import pytest
from harness import SLACK, Limits, Workspace

pytestmark = pytest.mark.processes

LIMITS = Limits(drain=0.5, critical=3, cleanup=0.5)
ROUNDS = 20
# Times in the log and the report are rounded to 1 ms each.
ROUNDING = dt.timedelta(milliseconds=2)


def _moment(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


@pytest.mark.parametrize("turn", range(ROUNDS))
def test_c05_no_reconcile_starts_after_the_instant(workspace: Workspace, turn: int) -> None:
    """C05: with 1,000 enqueues a second and a stop at a random instant, no run starts after it."""
    seed = os.environ.get("STOP_SUITE_SEED", f"{time.time_ns()}:{turn}")
    print(f"STOP_SUITE_SEED={seed}")
    workspace.configure(
        LIMITS,
        level="debug",
        watch=[{"directory": "resources"}, {"every": {"interval": "50ms", "jitter": "0%"}}],
        concurrency=16,
    )
    for number in range(50):
        workspace.declare(f"k{number}")
    daemon = workspace.started()
    daemon.wait_for("reconcile.started", nth=200)
    time.sleep(random.Random(seed).uniform(0, 0.3))  # the random instant itself
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= LIMITS.drain + LIMITS.cleanup + SLACK
    instant = _moment(stopped.report["began"]) + ROUNDING
    starts = [_moment(line["time"]) for line in daemon.all("reconcile.started")]
    # The handler may run between the check of its flag in a run and the line that logs the
    # start. A loop has one run at that point, so at most one line has a later time.
    assert len([start for start in starts if start > instant]) <= 1
    events = [line["event"] for line in daemon.lines]
    assert "reconcile.started" not in events[events.index("stop.began") :]
    # Runs that began before are not lost: each start has its end.
    ends = len(daemon.all("reconcile.done")) + len(daemon.all("reconcile.interrupted"))
    assert len(starts) == ends


def test_c05_nothing_starts_between_the_signal_and_the_loops_next_turn(
    workspace: Workspace,
) -> None:
    """C05: runs that were dispatched but had not begun at the signal never begin."""
    workspace.configure(LIMITS, level="debug", concurrency=10)
    for number in range(10):
        workspace.declare(f"k{number}", do="block", seconds=0.5)
    daemon = workspace.start()
    # All ten are dispatched in one turn of the loop, and each blocks it.
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    assert len(daemon.all("reconcile.started")) == 1
    assert stopped.code == 0
    assert stopped.wall <= 0.5 + SLACK


def test_c05_keys_without_a_run_are_counted_and_run_after_the_next_start(
    workspace: Workspace,
) -> None:
    """C05: the report counts waiting keys, and the next start runs all of them."""
    workspace.configure(LIMITS, concurrency=1)
    for number in range(5):
        workspace.declare(f"k{number}", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    stopped = daemon.stop()
    assert stopped.report["not_served"] == 4
    workspace.configure(LIMITS, level="debug")
    for number in range(5):
        workspace.declare(f"k{number}", do="nothing")
    daemon = workspace.started()
    for number in range(5):
        daemon.wait_for("reconcile.done", key=f"c/k{number}")
