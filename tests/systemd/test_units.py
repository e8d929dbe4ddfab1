"""The shipped units as the manager reads them, and what the sandbox lets through (cases 23, 24)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from container import Container
from installed import STATE, UNITS, Service, wait_until

PROBE = (Path(__file__).parent / "sandbox_probe.py").read_text()
# Exposure, as `systemd-analyze security` rates it: 0 is best, 10 worst.
RATED = 1.5


@pytest.fixture
def variant(service: Service) -> Iterator[Service]:
    """The service with the shipped drop-in for KillMode=mixed."""
    service.drop_in((UNITS / "60-mixed.conf").read_text(), "60-mixed.conf")
    return service


def version(container: Container) -> int:
    """The manager's version."""
    told = re.search(r"systemd (\d+)", container.run("systemctl", "--version").stdout)
    assert told is not None
    return int(told[1])


def exposure(service: Service) -> float:
    """The rating of the unit; fails above the threshold."""
    words = ("systemd-analyze", "security", "--no-pager", f"--threshold={RATED * 10:.0f}")
    told = service.container.run(*words, service.unit)
    rating = re.search(r"Overall exposure level.*: ([\d.]+)", told.stdout)
    assert rating is not None, told.stdout
    return float(rating[1])


# -- 23: what the manager thinks of the files ------------------------------------------------


@pytest.mark.parametrize(
    "unit",
    ["reconciled.service", "reconciled@web.service", "reconciled.socket", "reconciled.target"],
)
def test_the_manager_has_nothing_to_say(service: Service, unit: str) -> None:
    """``systemd-analyze verify`` finds no fault and no unknown key in a unit."""
    told = service.container.run("systemd-analyze", "verify", f"/etc/systemd/system/{unit}")
    assert (told.stdout, told.stderr) == ("", "")


@pytest.mark.parametrize("path", sorted(UNITS.glob("60-*.conf")), ids=lambda p: p.name)
def test_the_manager_takes_each_drop_in(service: Service, path: Path) -> None:
    """With each shipped drop-in ``verify`` finds no fault either."""
    service.drop_in(path.read_text(), path.name)
    told = service.container.run("systemd-analyze", "verify", f"/etc/systemd/system/{service.unit}")
    assert (told.stdout, told.stderr) == ("", "")


def test_newer_keys_are_known_to_newer_managers(service: Service) -> None:
    """A drop-in for newer managers is valid in every manager of its version or later."""
    for path in sorted(UNITS.glob("[0-9][0-9][0-9]-*.conf")):
        if int(path.name.partition("-")[0]) <= version(service.container):
            service.drop_in(path.read_text(), f"10-newer-{path.name}")
    told = service.container.run("systemd-analyze", "verify", f"/etc/systemd/system/{service.unit}")
    assert (told.stdout, told.stderr) == ("", "")


def test_the_sandbox_is_tight(service: Service) -> None:
    """The service is rated 1.5 or better."""
    assert exposure(service) <= RATED


def test_the_variant_is_as_tight(variant: Service) -> None:
    """The variant has the same rating: only KillMode= differs."""
    assert exposure(variant) <= RATED
    shown = variant.show("KillMode", "ExecStopPost", "NotifyAccess")
    assert (shown["KillMode"], shown["NotifyAccess"]) == ("mixed", "main")
    assert not shown.get("ExecStopPost")


# -- 24: what works inside --------------------------------------------------------------------

WORKS = {
    *("ctypes callback", "thread", "sqlite wal", "inotify", "pidfd", "memfd", "setrlimit"),
    *("getaddrinfo", "interface names", "unix listener", "tcp listener", "boot id", "system bus"),
    *("own directory", "chmod", "link", "fsync", "flock", "child", "clock"),
}
# Where the guest has them.
TOOLS = {"kubectl", "helm"}
REFUSED = {
    *("write /etc", "write /opt", "write /usr", "write /root", "write state of others"),
    *("nice", "affinity", "user namespace", "mount", "chroot", "setgid bit", "own chown"),
    *("control group", "raw socket", "kernel log", "writable code", "realtime"),
}


def probe(service: Service) -> dict[str, str]:
    """The results of a program in the sandbox: "works", or the error."""
    service.configure()
    service.file("programs/sandbox_probe.py", PROBE)
    report = f"{STATE}/sandbox.json"
    python = "/usr/bin/python3"
    service.declare("probe", apply=[python, "/etc/reconciled/programs/sandbox_probe.py", report])
    service.start()
    path = service.container.root / report.lstrip("/")
    wait_until(path.exists, f"{report}\n{service.text()}")
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


def test_what_the_sandbox_lets_through(service: Service) -> None:
    """In the shipped unit a program can do exactly what docs/systemd.md lists."""
    found = probe(service)
    wanted = WORKS | TOOLS
    assert {name: why for name, why in found.items() if name in wanted and why != "works"} == {}
    assert sorted(name for name in REFUSED if found[name] == "works") == []
    assert found.keys() - TOOLS == WORKS | REFUSED
    # A refused call is a named error, and does not kill the process.
    assert [why for name, why in found.items() if name in REFUSED and "Error" not in why] == []


def test_a_drop_in_lets_it_change_the_host(service: Service) -> None:
    """With the drop-in for it, ``file`` writes below /etc with owner and mode."""
    service.drop_in((UNITS / "60-host.conf").read_text(), "60-host.conf")
    path = "/etc/reconciled-host-test"
    files = {"reconciler": "file", "watch": [{"directory": "resources"}]}
    service.configure(controllers={"files": files})
    service.declare(
        "host",
        kind="File",
        path=path,
        content="x\n",
        mode="0640",
        owner="reconciled",
        group="daemon",
    )
    service.start()
    target = service.container.root / path.lstrip("/")
    wait_until(target.exists, f"{path}\n{service.text()}")
    owner = service.container.run("stat", "--format=%U:%G %a", path).stdout.strip()
    assert owner == "reconciled:daemon 640"
    service.withdraw("host")
    wait_until(lambda: not target.exists(), f"{path} removed")
