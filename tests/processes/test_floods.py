"""R1, R2 and R9: many equal faults are told few times, spread out, and stay apart."""

from __future__ import annotations

import datetime as dt
from collections import Counter

import pytest
from harness import Limits, Site

pytestmark = pytest.mark.processes


def test_r1_ten_thousand_equal_errors_are_a_few_lines(site: Site) -> None:
    """R1: the first line, then counts: not one of 10,000 is lost, and hardly any is shown."""
    site.configure()
    site.declare("a", do="log", count=10_000)
    daemon = site.started()
    daemon.wait_for("probe.noise")
    daemon.stop()
    shown = daemon.all("probe.noise")
    counted = sum(line.get("repeated", 0) + ("repeated" not in line) for line in shown)
    assert counted == 10_000
    assert len(shown) <= 4


def test_r1_a_key_that_fails_again_and_again_is_told_once_and_so_is_its_recovery(
    site: Site,
) -> None:
    """R1: hundreds of equal failures are one line and a count; the recovery is announced once."""
    site.configure(retry={"initial": "5ms", "max": "5ms"})
    site.declare("a", do="fail", count=300)
    daemon = site.started()
    recovered = daemon.wait_for("fault.recovered", key="c/a")
    daemon.stop()
    shown = daemon.all("reconcile.failed")
    assert len(shown) <= 2
    assert recovered["fault"] == "reconcile.failed"
    counted = sum(line.get("repeated", 0) + ("repeated" not in line) for line in shown)
    assert counted + recovered.get("repeated", 0) == 300
    assert len(daemon.all("fault.recovered")) == 1


def test_r2_keys_that_failed_together_come_back_apart(site: Site) -> None:
    """R2: the first retries of 500 keys are spread over their whole delay, none comes at once."""
    site.configure(
        Limits(drain=0.1, critical=2, cleanup=0.5), level="debug", concurrency=100,
        retry={"initial": "4s", "max": "4s"},
    )  # fmt: skip
    for number in range(500):
        site.declare(f"k{number}", do="fail", count=1000)
    daemon = site.started()
    daemon.wait_for("probe.run", turn=2, nth=500)
    first = {line["key"]: _moment(line["time"]) for line in daemon.all("probe.run", turn=1)}
    again = {line["key"]: _moment(line["time"]) for line in daemon.all("probe.run", turn=2)}
    waits = [(again[key] - first[key]).total_seconds() for key in first]
    assert daemon.stop().code == 0
    assert min(waits) >= 1.0
    assert max(waits) <= 4.0 + 2.0
    # 3 s of even spread are 67 in each 0.4 s.
    buckets = Counter(int(wait / 0.4) for wait in waits)
    assert max(buckets.values()) <= 150
    assert len([count for count in buckets.values() if count > 10]) >= 6


def test_r9_one_failed_key_stops_no_other(site: Site) -> None:
    """R9: of ten keys the third fails for good; the nine others are done, and it is not retried."""
    site.configure(level="debug", concurrency=1, retry={"initial": "10ms", "max": "10ms"})
    for number in range(10):
        site.declare(f"k{number}", do="refuse" if number == 2 else "nothing")
    daemon = site.started()
    daemon.wait_for("reconcile.terminal", key="c/k2")
    for number in range(10):
        if number != 2:
            daemon.wait_for("reconcile.done", key=f"c/k{number}")
    assert daemon.stop().code == 0
    assert len(daemon.all("reconcile.started", key="c/k2")) == 1


def _moment(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)
