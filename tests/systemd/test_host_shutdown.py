"""A shutdown of the machine, with a real logind: work ends before services are stopped.

The inhibitor lock, its loss and a cancelled shutdown are tested in containers of their own: each
test powers its machine off, or breaks services that others need.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from container import Container
from installed import Service, wait_until

JSON = {"format": "json", "level": "info"}
# A stand-in for the network: its stop is not ordered relative to that of the daemon.
NETWORK = """\
[Service]
ExecStart=sleep infinity
ExecStop=echo the network has gone
"""
# logind requires that the unit is loaded before it announces a shutdown; it cannot start.
IMPOSSIBLE = "[Unit]\nRequires=nowhere-to-be-found.service\n"


def listed(container: Container) -> list[str]:
    """The processes that delay a shutdown, according to logind."""
    told = container.run(
        "systemd-inhibit", "--list", "--no-legend", "--no-pager", check=False
    ).stdout
    return [line.split()[0] for line in told.splitlines() if " shutdown " in line]


def wait_for_lock(container: Container) -> None:
    """Wait until logind lists exactly one lock of the daemon."""
    wait_until(lambda: listed(container).count("reconciled") == 1, "the lock is listed")


def lines_on(console: str) -> list[dict[str, Any]]:
    """The lines of the daemon, and others as messages, in the order of the console."""
    found = []
    for line in console.splitlines():
        _, brace, rest = line.partition(": {")
        try:
            found.append(json.loads(brace[2:] + rest))
        except ValueError:
            found.append({"event": line})
    return found


def index_of(lines: list[dict[str, Any]], event: str, **fields: Any) -> int:
    """The index of the first such line."""
    for index, line in enumerate(lines):
        if event in line["event"] and fields.items() <= line.items():
            return index
    raise AssertionError(f"no {event} {fields} in {lines}")


@pytest.fixture
def service(own_container: Container) -> Service:
    """The service in a container that only this test has."""
    made = Service(own_container)
    made.clean()
    return made


@contextmanager
def other_lock(container: Container) -> Iterator[None]:
    """Another process delays the shutdown too, until this is left."""
    words = ["systemd-inhibit", "--what=shutdown", "--mode=delay", "--who=other", "cat"]
    held = subprocess.Popen(container.command(*words), stdin=subprocess.PIPE)
    try:
        wait_until(lambda: "other" in listed(container), "the other lock is listed")
        yield
    finally:
        held.communicate(timeout=10)


def patient(container: Container, seconds: int) -> None:
    """Set the time for which logind waits for locks."""
    text = f"[Login]\nInhibitDelayMaxSec={seconds}s\n"
    container.write("/etc/systemd/logind.conf.d/60-test.conf", text)
    container.run("systemctl", "restart", "systemd-logind.service")


def begin_run(service: Service, name: str, ends: str = "go", **spec: Any) -> None:
    """Start the program of x/NAME, which ends when the file *ends* exists."""
    here = "$STATE_DIRECTORY"
    text = f"touch {here}/{name}; until [ -e {here}/{ends} ]; do sleep 0.1; done"
    service.declare(name, apply=[service.script(name, text)], **spec)
    wait_until((service.container.root / f"var/lib/reconciled/{name}").exists, f"{name} runs")


def go(service: Service) -> None:
    """Let all these programs end."""
    service.container.write("/var/lib/reconciled/go", "")


def test_17_what_runs_ends_before_anything_is_stopped(service: Service) -> None:
    """A power-off waits for an ordinary run, then stops the network and an idle daemon."""
    container = service.container
    patient(container, 30)
    container.write("/etc/systemd/system/network-like.service", NETWORK)
    service.configure({"drain": "15s", "critical": "20s", "cleanup": "500ms"}, log=JSON)
    service.start()
    service.systemctl("start", "network-like.service")
    begin_run(service, "slow")
    wait_for_lock(container)
    container.power_off()
    service.wait_for("shutdown.announced")
    service.declare("late", apply=["true"])
    go(service)
    assert container.wait_off()
    lines = lines_on(container.console)
    order = [
        index_of(lines, "shutdown.announced", running=1),
        index_of(lines, "reconcile.done", key="x/slow"),
        index_of(lines, "shutdown.drained"),
        index_of(lines, "the network has gone"),
    ]
    assert order == sorted(order)
    began = index_of(lines, "stop.began", signal="SIGTERM", running=0)
    assert began > order[2]
    assert index_of(lines, "stop.ended", exit_code=0, interrupted=0) > began
    assert [line for line in lines if line.get("key") == "x/late"] == []


def test_17_what_outlasts_the_lock_gets_the_stop(service: Service) -> None:
    """Past the delay of logind an ordinary run is interrupted, and a critical one completes."""
    container = service.container
    patient(container, 2)
    service.configure({"drain": "1s", "critical": "20s", "cleanup": "500ms"}, log=JSON)
    service.start()
    begin_run(service, "ordinary", ends="never")
    begin_run(service, "upgrade", critical={"budget": "15s"})
    wait_for_lock(container)
    container.power_off()
    service.wait_for("reconcile.interrupted", key="x/ordinary")
    go(service)
    assert container.wait_off()
    lines = lines_on(container.console)
    order = [
        index_of(lines, "shutdown.announced", running=2, wait_s=1.0),
        index_of(lines, "shutdown.overran", count=2),
        index_of(lines, "stop.began", signal="SIGTERM", running=2, critical=1),
        index_of(lines, "reconcile.interrupted", key="x/ordinary"),
        index_of(lines, "reconcile.done", key="x/upgrade"),
        index_of(lines, "stop.ended", exit_code=0, interrupted=1),
    ]
    assert order == sorted(order)


def test_17_called_off(service: Service) -> None:
    """During a shutdown that fails nothing begins; afterwards work and lock are back."""
    container = service.container
    patient(container, 30)
    container.write("/etc/systemd/system/poweroff.target.d/test.conf", IMPOSSIBLE)
    service.systemctl("daemon-reload")
    service.configure(log=JSON)
    service.start()
    wait_for_lock(container)
    with other_lock(container):
        container.power_off()
        service.wait_for("shutdown.drained")
        assert listed(container) == ["other"]
        service.declare("late", apply=["true"])
        service.declare("bad", apply=1)
        service.wait_for("manifest.invalid")
        assert service.all("reconcile.done") == []
    service.wait_for("shutdown.cancelled")
    service.wait_for("reconcile.done", key="x/late")
    wait_for_lock(container)
    # A stop during a pause works as usual.
    with other_lock(container):
        container.power_off()
        service.wait_for("shutdown.announced", nth=2)
        service.stop()
    assert service.show("Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}


def test_17_logind_forgets_a_shutdown(service: Service) -> None:
    """If logind is killed during a shutdown and restarts without knowing of it, work continues."""
    container = service.container
    patient(container, 30)
    service.configure(log=JSON)
    service.start()
    wait_for_lock(container)
    with other_lock(container):
        container.power_off()
        service.wait_for("shutdown.drained")
        service.declare("late", apply=["true"])
        service.systemctl("kill", "--signal=KILL", "systemd-logind.service")
        service.wait_for("shutdown.cancelled")
        service.wait_for("reconcile.done", key="x/late")
        wait_for_lock(container)


def test_18_logind_and_dbus_are_restarted(service: Service) -> None:
    """The lock survives a restart of logind, and is taken again after one of the bus."""
    container = service.container
    service.configure(log=JSON)
    service.start()
    wait_for_lock(container)
    pid = service.property("MainPID")
    service.systemctl("restart", "systemd-logind.service")
    wait_for_lock(container)
    assert service.all("shutdown.lock_missing") == []
    service.systemctl("restart", "dbus.service")
    service.wait_for("shutdown.lock_missing", level="warning")
    # From 257 on logind does not reconnect to a new bus.
    service.systemctl("restart", "systemd-logind.service")
    wait_for_lock(container)
    service.declare("works", apply=["true"])
    service.wait_for("reconcile.done", key="x/works")
    assert len(service.all("shutdown.lock_missing")) == 1
    assert service.show("MainPID", "NRestarts") == {"MainPID": pid, "NRestarts": "0"}


@pytest.mark.parametrize(
    ("units", "says"),
    [
        (["polkit.service"], "Unit polkit.service is masked"),
        (["dbus.socket", "dbus.service"], "no connection to the system bus"),
        (["systemd-logind.service"], "systemctl start systemd-logind"),
    ],
    ids=["polkit", "dbus", "logind"],
)
def test_18_without(service: Service, units: list[str], says: str) -> None:
    """Without polkit, logind or the bus one warning names the remedy; all else works."""
    container = service.container
    service.systemctl("mask", "--runtime", "--now", *units)
    service.configure(log=JSON)
    service.start()
    told = service.wait_for("shutdown.lock_missing", level="warning")
    assert says in told.fields["reason"]
    service.declare("works", apply=["true"])
    service.wait_for("reconcile.done", key="x/works")
    service.systemctl("unmask", "--runtime", *units)
    service.systemctl("start", *units)
    service.systemctl("restart", "systemd-logind.service")  # as above
    wait_for_lock(container)
    assert len(service.all("shutdown.lock_missing")) == 1
    service.stop()
    assert service.property("Result") == "success"


def test_18_polkit_is_not_installed(service: Service) -> None:
    """Without polkit on the machine one warning suggests to install it."""
    container = service.container
    activation = (
        container.root / "usr/share/dbus-1/system-services/org.freedesktop.PolicyKit1.service"
    )
    aside = activation.with_suffix(".aside")
    activation.rename(aside)
    service.systemctl("stop", "polkit.service")
    service.systemctl("reload", "dbus.service")
    service.configure(log=JSON)
    service.start()
    told = service.wait_for("shutdown.lock_missing", level="warning")
    assert "install polkit" in told.fields["reason"]
    aside.rename(activation)
    service.systemctl("reload", "dbus.service")
    wait_for_lock(container)
    assert len(service.all("shutdown.lock_missing")) == 1
