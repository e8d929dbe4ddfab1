"""The stop budget against the real unit: misfits are named, and their remedies work."""

from __future__ import annotations

import json
from typing import Any

from container import Container
from installed import STATE, Service

UNFIT = """\
[Service]
Type=exec
NotifyAccess=none
FileDescriptorStoreMax=0
WatchdogSec=0
KillMode=control-group
OOMPolicy=stop
TimeoutStopSec=10s
"""
NAMED = {
    "TimeoutStopSec": "below the stop budget of 23s",
    "KillMode": "a stop kills helm",
    "WatchdogSec": "lasts for ever",
    "NotifyAccess": "the manager ignores the daemon's notifications",
    "OOMPolicy": "the whole service is stopped",
    "InhibitDelayMaxSec": "below stop.drain (8s)",
}
LONG = {"drain": "8s", "critical": "19s", "cleanup": "1s"}
LOGIND = "/etc/systemd/logind.conf.d/60-reconciled.conf"
STRICT = "[Service]\nExecStart=\nExecStart=reconciled run --strict\n"


def told(service: Service) -> dict[str, str]:
    """The findings in the log, by their directives."""
    events = ("unit.timeout_too_short", "unit.advice", "unit.note")
    found = [entry for entry in service.entries() if entry.event in events]
    return {entry.fields["directive"]: entry.fields["reason"] for entry in found}


def checked(container: Container, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The output of ``check --json`` inside, as root from a shell."""
    ran = container.run("reconciled", "check", "--json", *arguments, check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    data: dict[str, Any] = json.loads(ran.stdout)
    return data


def directives(data: dict[str, Any]) -> set[str]:
    return {each["directive"] for each in data["unit"]["findings"]}


def test_what_does_not_fit_is_named(service: Service) -> None:
    """Each misfit is logged at the start with its remedy; `budget` shows it and exits 1."""
    service.configure(LONG, state=STATE)
    service.drop_in(UNFIT)
    service.start()
    service.wait_for("unit.note", directive="InhibitDelayMaxSec")
    said = told(service)
    assert said.keys() == NAMED.keys()
    assert all(part in said[directive] for directive, part in NAMED.items())
    misfit = service.wait_for("unit.timeout_too_short")
    assert misfit.fields["file"] == f"{service.dropins}/60-stop-budget.conf"
    assert misfit.fields["content"] == "[Service]\nTimeoutStopSec=6min\n"
    assert misfit.fields["command"] == "systemctl daemon-reload"
    short = service.container.run("reconciled", "budget", check=False)
    assert short.returncode == 1
    assert "10s  TimeoutStopSec= of reconciled.service: the budget does not fit" in short.stdout


def test_what_check_says_to_paste_puts_it_right(service: Service) -> None:
    """`check` names the same before the first start; its commands remove every finding."""
    container = service.container
    service.configure(LONG, state=STATE)
    service.drop_in(UNFIT)
    try:
        check = container.run("reconciled", "check")
        warnings = check.stderr.splitlines()
        assert len(warnings) == len(NAMED)
        assert all(any(part in line for line in warnings) for part in NAMED.values())
        _, _, paste = check.stdout.partition("for a root shell:\n")
        container.run("sh", "-e", text=paste.rpartition("\n\n")[0])
        assert directives(checked(container, "--strict")) == set()
        service.start()
        service.wait_for("unit.ok", unit=service.unit)
        assert told(service) == {}
    finally:
        (container.root / LOGIND.lstrip("/")).unlink(missing_ok=True)
        container.run("systemctl", "restart", "systemd-logind")


def test_strict_refuses_before_anything_begins(service: Service) -> None:
    """``run --strict`` under a limit that is too short is 78, without state or restart."""
    service.configure(LONG, state=STATE)
    service.drop_in(f"{STRICT}TimeoutStopSec=10s\n")
    assert service.start(check=False).returncode != 0
    service.wait_for_state("failed")
    assert service.show("ExecMainStatus", "NRestarts") == {"ExecMainStatus": "78", "NRestarts": "0"}
    refused = service.wait_for("daemon.refused")
    assert "--strict" in refused.fields["reason"]
    assert told(service)["TimeoutStopSec"].endswith("set 6min, or lower stop.critical")
    assert not (service.container.root / STATE.lstrip("/") / "store").exists()
    service.drop_in(STRICT)
    service.start()
    service.wait_for("daemon.starting")


def test_a_reload_that_asks_for_more_is_measured_again(service: Service) -> None:
    """A stop.critical that no longer fits is logged once the reload is in force."""
    service.configure({"drain": "1s", "critical": "6s"})
    service.start()
    service.wait_for("unit.ok")
    service.configure({"drain": "1s", "critical": "10m"})
    service.kill("SIGHUP")
    misfit = service.wait_for("unit.timeout_too_short")
    assert "below the stop budget of 10m8s" in misfit.fields["reason"]


def test_without_a_bus_nothing_is_logged(own_container: Container) -> None:
    """Without a bus the daemon starts silently; `check` as root reads the unit by systemctl."""
    service = Service(own_container)
    service.clean()
    service.configure(LONG, state=STATE, log={"level": "debug"})
    service.drop_in("[Service]\nTimeoutStopSec=10s\n")
    own_container.run("systemctl", "stop", "dbus.socket", "dbus.service")
    service.start()
    service.wait_for("unit.unavailable")
    assert told(service) == {}
    data = checked(own_container)
    assert data["unit"]["read"] == "systemctl"
    # Without the bus logind cannot be queried.
    assert directives(data) == {"TimeoutStopSec"}


def test_what_is_in_the_way_of_files_and_sockets_is_named(service: Service) -> None:
    """`check` names a file outside the sandbox, and a socket that a stop removes."""
    container = service.container
    files = {"f": {"reconciler": "file", "watch": [{"directory": "resources"}]}}
    service.configure(state=STATE, controllers=files)
    for name, path in {"a": "/etc/motd", "b": "/root/y", "c": f"{STATE}/z"}.items():
        service.declare(name, kind="File", path=path, content="x")
    place = "/etc/systemd/system/reconciled.socket.d"
    try:
        listen = "ListenStream=\nListenStream=/run/reconciled/activated.sock\nSocketUser=root\n"
        container.write(f"{place}/50-test.conf", f"[Socket]\n{listen}")
        container.run("systemctl", "daemon-reload")
        container.run("systemctl", "start", "reconciled.socket")
        data = checked(container)
    finally:
        container.run("systemctl", "stop", "reconciled.socket")
        (container.root / place.lstrip("/") / "50-test.conf").unlink()
        (container.root / place.lstrip("/")).rmdir()
        container.run("systemctl", "daemon-reload")
    motd, home = [each for each in data["warnings"] if "from writing" in each]
    assert "ProtectSystem=strict prevents reconciled.service from writing /etc/motd" in motd
    assert "add ReadWritePaths=/etc in a drop-in" in motd
    assert "ProtectHome=yes prevents reconciled.service from writing /root/y" in home
    assert {"ListenStream", "SocketUser"} <= directives(data)
    remedies = {each["directive"]: each["remedy"] for each in data["unit"]["findings"]}
    assert remedies["ListenStream"]["path"] == f"{place}/60-path.conf"
    assert "ListenStream=/run/reconciled.sock\n" in remedies["ListenStream"]["text"]
