"""Hangs: the manager ends a running daemon, the last resort one that is stopping."""

from __future__ import annotations

import os
import time

from installed import Service, wait_until

STOP = {"drain": "500ms", "critical": "6s", "cleanup": "500ms"}


def hang(service: Service) -> None:
    """Block the event loop of the running daemon."""
    service.declare("stuck", kind="Probe", do="block", seconds=600)
    service.wait_for("probe.began", key="c/stuck")


def test_a_hang_is_ended_by_the_manager_with_all_stacks(service: Service) -> None:
    """A hung loop misses the watchdog: SIGABRT, the blocking stack in the journal, a restart."""
    service.drop_in("[Service]\nWatchdogSec=2s\n")
    service.configure(STOP)
    service.start()
    first = service.property("MainPID")
    began = time.monotonic()
    hang(service)
    service.withdraw("stuck")
    wait_until(lambda: service.property("NRestarts") == "1", "a restart")
    # By the manager, not by the last resort (R10) or the limit of a stop.
    assert 1.0 <= time.monotonic() - began <= 30
    service.wait_for_state("running")
    told = service.text()
    assert "Watchdog timeout (limit 2s)!" in told
    assert "Failed with result 'watchdog'" in told
    assert 'probe.py", line' in told
    assert "in block" in told
    # The stacks of all threads are there.
    assert told.count("most recent call first") >= 2
    assert service.property("MainPID") not in ("0", first)
    assert service.all("stop.hung") == []


def test_a_hang_while_stopping_is_ended_from_inside(service: Service) -> None:
    """The watchdog is off in a stop: the last resort ends a hang, long before TimeoutStopSec."""
    service.drop_in("[Service]\nWatchdogSec=30s\n")
    service.configure({"drain": "20s", "critical": "5m", "cleanup": "5s"})
    service.start()
    hang(service)
    began = time.monotonic()
    service.stop()
    assert 4.5 <= time.monotonic() - began <= 60
    assert service.show("Result", "ExecMainStatus") == {
        "Result": "exit-code",
        "ExecMainStatus": "70",
    }
    (hung,) = service.all("stop.hung")
    assert "in block" in hung.fields["where"]


def test_a_busy_machine_is_no_hang(service: Service) -> None:
    """On a processor with twice the load that it can take, the heartbeat is on time."""
    # One processor of the machine, so that concurrent tests keep theirs.
    processor = str(max(os.sched_getaffinity(0)))
    service.drop_in(f"[Service]\nWatchdogSec=3s\nCPUAffinity={processor}\n")
    service.configure(STOP)
    for number in range(5):
        service.declare(f"k{number}", check=["/bin/false"], apply=["/bin/true"])
    service.start()
    first = service.property("MainPID")
    fed = int(service.property("WatchdogTimestampMonotonic"))
    spin = ("taskset", "-c", processor, "timeout", "7", "sh", "-c", "while :; do :; done")
    for load in [service.container.begin(*spin) for _ in range(2)]:
        load.communicate()
    assert service.show("MainPID", "NRestarts", "ActiveState") == {
        "MainPID": first,
        "NRestarts": "0",
        "ActiveState": "active",
    }
    assert int(service.property("WatchdogTimestampMonotonic")) - fed > 6_000_000
    assert "Watchdog" not in service.text()
    assert service.all("loop.blocked") == []
