"""The notification protocol with a real manager: start, status, stop, and extended timeouts."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
import time
from collections.abc import Iterator

from container import Container
from installed import STATE, Service, wait_until

# Longer than a critical operation in any of these tests.
STOP = {"drain": "500ms", "critical": "12s", "cleanup": "500ms"}

HANGS = """
import sys, time
print("it hangs here", file=sys.stderr, flush=True)
time.sleep(600)
"""


def status(service: Service) -> str:
    return service.property("StatusText")


def wait_for_status(service: Service, text: str) -> None:
    try:
        wait_until(lambda: status(service).startswith(text), f"status {text!r}")
    except AssertionError as error:
        raise AssertionError(f"{error}; it is {status(service)!r}\n{service.text()}") from None


def answers(service: Service) -> bool:
    """Whether the manager answers."""
    return service.systemctl("is-system-running", check=False).stdout.strip() != ""


@contextlib.contextmanager
def held(container: Container) -> Iterator[None]:
    """Hold the lock of the state directory."""
    with (container.root / STATE.lstrip("/") / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def used(service: Service) -> None:
    """A service that was started and stopped once, so that its state directory exists."""
    service.configure(STOP)
    service.start()
    service.stop()


def holding(service: Service, seconds: float, **stop: str) -> None:
    """A service with a critical operation of *seconds* running."""
    service.configure(STOP | stop)
    service.declare("h", kind="Probe", do="critical", seconds=seconds, budget="10s")
    service.start()
    service.wait_for("probe.critical")


def ended(process: subprocess.Popen[str], within: float = 15.0) -> int:
    """The exit code of a systemctl that was started by begin()."""
    process.communicate(timeout=within)
    return process.returncode


# -- the start ---------------------------------------------------------------------------------


def test_start_waits_for_ready_and_has_its_time(service: Service) -> None:
    """``systemctl start`` returns when the daemon is ready, even after TimeoutStartSec."""
    used(service)
    service.drop_in("[Service]\nTimeoutStartSec=3s\n")
    with held(service.container):
        began = time.monotonic()
        starting = service.begin("start")
        wait_for_status(service, "starting: opening the journal")
        time.sleep(3.2)  # longer than TimeoutStartSec, which is under test
        assert service.property("ActiveState") == "activating"
        assert starting.poll() is None
    assert ended(starting) == 0
    assert time.monotonic() - began >= 3.2
    assert service.property("ActiveState") == "active"
    assert service.all("daemon.ready")
    wait_for_status(service, "ready: 0 keys, 0 running, 0 held")


def test_a_start_that_hangs_is_ended_by_its_limit(service: Service) -> None:
    """A start that makes no progress is not extended: TimeoutStartSec ends it."""
    service.configure(STOP)
    service.file("plugins/probe.py", HANGS)
    service.drop_in("[Service]\nTimeoutStartSec=4s\nRestart=no\n")
    began = time.monotonic()
    assert service.start(check=False).returncode != 0
    assert 3.5 <= time.monotonic() - began <= 40
    assert "it hangs here" in service.text()
    assert service.property("Result") == "timeout"


# -- the status --------------------------------------------------------------------------------


def test_each_stage_has_its_status(service: Service) -> None:
    """``systemctl status`` shows the state: ready, reloading, draining, stopping."""
    holding(service, 6, drain="1500ms")
    wait_for_status(service, "ready: 1 key, 1 running, 0 held")
    service.declare("y", kind="Probe", do="sleep", seconds=600)
    service.wait_for("probe.began", key="c/y")
    configuration = service.container.read("/etc/reconciled/reconciled.yaml")
    service.file("reconciled.yaml", "no: [such thing\n")
    assert service.reload(check=False).returncode != 0
    wait_for_status(service, "ready: 2 keys, 2 running, 0 held; the last reload failed")
    assert service.show("ActiveState", "SubState") == {
        "ActiveState": "active",
        "SubState": "running",
    }
    service.file("reconciled.yaml", configuration)
    service.reload()
    assert "failed" not in status(service)
    stopping = service.begin("stop")
    wait_for_status(service, "draining: waits for reconcile c/y, ")
    assert "; critical: hold of c/h, " in status(service)
    wait_for_status(service, "stopping: critical: hold of c/h, ")
    assert ended(stopping) == 0


# -- the stop ------------------------------------------------------------------------------------


def test_a_stop_has_more_time_than_the_unit_gives(service: Service) -> None:
    """A critical operation may take longer than TimeoutStopSec, and completes."""
    service.drop_in("[Service]\nTimeoutStopSec=1s\n")
    holding(service, 4)
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began >= 2
    assert service.all("probe.finished")
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}


def test_a_stop_that_the_manager_did_not_ask_for_has_its_time(service: Service) -> None:
    """A stop by another process's signal becomes the manager's with STOPPING, and is extended."""
    service.drop_in("[Service]\nTimeoutStopSec=1s\nRestart=no\n")
    holding(service, 4)
    service.container.run("kill", "-TERM", service.property("MainPID"))
    service.wait_for_state("stop-sigterm")  # the state after STOPPING
    service.wait_for_state("inactive")
    assert service.all("probe.finished")
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}


def test_a_manager_that_reads_its_units_anew_kills_nothing(service: Service) -> None:
    """daemon-reload and daemon-reexec in a drain drop all extensions: the unit is long enough."""
    holding(service, 5)
    stopping = service.begin("stop")
    wait_for_status(service, "stopping: critical")
    service.systemctl("daemon-reload")
    service.systemctl("daemon-reexec", check=False)
    wait_until(lambda: answers(service), "the manager")
    assert service.property("ActiveState") == "deactivating"
    service.wait_for_state("inactive")
    assert service.all("probe.finished")
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    stopping.communicate()  # a reexec ends it early, so its code proves nothing


def test_a_second_stop_joins_the_first(service: Service) -> None:
    """A second ``systemctl stop`` joins the first, and does not shorten it."""
    holding(service, 3)
    stops = [service.begin("stop")]
    wait_for_status(service, "stopping: critical")
    stops.append(service.begin("stop"))
    assert [ended(stop) for stop in stops] == [0, 0]
    assert service.all("probe.finished")
    assert len(service.all("stop.began")) == 1
    assert service.property("Result") == "success"


def test_a_restart_during_a_stop_waits_for_it(service: Service) -> None:
    """``systemctl restart`` during a drain starts the next daemon after the end of the first."""
    holding(service, 3)
    first = service.property("MainPID")
    stopping = service.begin("stop")
    wait_for_status(service, "stopping: critical")
    service.withdraw("h")
    service.restart()
    stopping.communicate()
    assert service.property("ActiveState") == "active"
    assert service.property("MainPID") not in ("0", first)
    events = [entry.event for entry in service.entries()]
    assert events.index("probe.finished") < events.index("daemon.ready", events.index("stop.began"))


def test_a_start_during_a_stop_follows_it(service: Service) -> None:
    """``systemctl start`` during a drain does not cancel it: the next daemon starts afterwards."""
    holding(service, 3)
    first = service.property("MainPID")
    stopping = service.begin("stop")
    wait_for_status(service, "stopping: critical")
    service.withdraw("h")
    service.start()
    stopping.communicate()
    assert service.property("MainPID") not in ("0", first)
    assert len(service.all("probe.finished")) == 1
    assert len(service.all("daemon.ready")) == 2
