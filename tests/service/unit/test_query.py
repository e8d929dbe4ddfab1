"""Asking for a unit ends in time and never fails, whatever answers; the real one is in a box."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.stages import StopLimits
from reconciled.service.unit import query
from reconciled.service.unit.comparison import find_mismatches
from reconciled.service.unit.facts import PROPERTIES, UnitFacts, UnitUnavailable
from reconciled.service.unit.query import ManagerReply, read_unit

NAME = "reconciled.service"
GROUP = f"0::/system.slice/{NAME}\n"
# In place of the 2 s, which a test need not wait for.
TAKES = 0.3
SHOWN = f"Id={NAME}\nLoadState=loaded\nMainPID=%d\nTimeoutStopUSec=10s\nExecStart=\n"


@attrs.define(eq=False)
class Machine:
    """A machine on which systemd runs, as far as our process can see."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    environ: dict[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.monkeypatch.setattr(query, "TIMEOUT", TAKES)
        self.monkeypatch.setattr(query, "_BOOTED", self.root)
        self.monkeypatch.setattr(query, "_GROUP", self.root / "cgroup")
        self.monkeypatch.setenv("PATH", str(self.root))
        self.environ["DBUS_SYSTEM_BUS_ADDRESS"] = f"unix:path={self.root}/bus"
        self.group(GROUP)

    def group(self, text: str) -> None:
        (self.root / "cgroup").write_text(text)

    def systemctl(self, script: str) -> None:
        """A systemctl that does this; without it there is none."""
        program = self.root / "systemctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def tells(self, text: str) -> None:
        (self.root / "shown").write_text(text)
        self.systemctl(f"/bin/cat {self.root}/shown")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def deaf(_: socket.socket) -> None:
    """Takes the connection, and says nothing."""


def polite(connection: socket.socket) -> None:
    """Greets, and says nothing more."""
    connection.recv(1024)
    connection.sendall(b"OK 0123\r\n")


def gone(connection: socket.socket) -> None:
    """Greets, and hangs up."""
    polite(connection)
    connection.recv(1024)
    connection.shutdown(socket.SHUT_WR)


def garbage(connection: socket.socket) -> None:
    """Greets, and then speaks another protocol."""
    polite(connection)
    connection.recv(1024)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 4)


@pytest.fixture
def bus(machine: Machine) -> Iterator[Callable[[Callable[[socket.socket], None]], None]]:
    """Puts a bus on the machine that treats each connection in some way."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{machine.root}/bus")
    kept = []

    def serve(treat: Callable[[socket.socket], None]) -> None:
        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                treat(connection)

        listener.listen()
        thread.append(threading.Thread(target=run))
        thread[0].start()

    thread: list[threading.Thread] = []
    yield serve
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for each in thread:
        each.join(5)
    for connection in kept:
        connection.close()


def reason(answer: UnitFacts | UnitUnavailable) -> str:
    assert isinstance(answer, UnitUnavailable)
    return answer.reason


@pytest.mark.parametrize(
    ("treat", "why"),
    [
        (deaf, "D-Bus: "),
        (polite, "D-Bus: "),
        (gone, "D-Bus: the bus closed the connection"),
        (garbage, "D-Bus: "),
    ],
)
def test_a_bus_that_does_not_do_its_part(
    machine: Machine,
    bus: Callable[[Callable[[socket.socket], None]], None],
    treat: Callable[[socket.socket], None],
    why: str,
) -> None:
    """A bus that is silent, hangs up or talks nonsense is the reason, and takes no longer."""
    bus(treat)
    began = time.monotonic()
    assert reason(read_unit(machine.environ)).startswith(why)
    assert time.monotonic() - began < TAKES + 10


@pytest.mark.processes
def test_without_a_bus_systemctl_is_asked(machine: Machine) -> None:
    """Where there is no bus at all, what systemctl shows is taken, of the same unit."""
    machine.tells(SHOWN % os.getpid())
    facts = read_unit(machine.environ)
    assert isinstance(facts, UnitFacts)
    assert (facts.source, facts.name, facts.timeout_stop) == ("systemctl", NAME, 10.0)
    assert read_unit(machine.environ, NAME) == facts


@pytest.mark.processes
@pytest.mark.parametrize("script", ["exec /bin/sleep 60", "echo no >&2; exit 1", "echo nonsense"])
def test_a_systemctl_that_does_not_do_its_part(machine: Machine, script: str) -> None:
    """One that hangs is ended, one that fails or babbles is no answer; nothing is raised."""
    machine.systemctl(script)
    began = time.monotonic()
    assert reason(read_unit(machine.environ)).startswith("D-Bus: ")
    assert time.monotonic() - began < TAKES + 10


def test_what_the_manager_has_told_is_left(machine: Machine) -> None:
    """With nobody to ask, the watchdog that the process was told of is all that is known."""
    facts = read_unit(machine.environ, watchdog=60.0)
    assert facts == UnitFacts(NAME, "environment", watchdog=60.0)


@pytest.mark.processes
def test_a_daemon_started_by_hand_below_a_service_is_not_its_unit(machine: Machine) -> None:
    """The limits of a unit whose main process is another one are not ours."""
    machine.tells(SHOWN % (os.getpid() + 1))
    expected = f"this process is not the main process of {NAME}"
    assert reason(read_unit(machine.environ)) == expected


def test_a_shell_has_no_unit(machine: Machine) -> None:
    """In a control group that is no service's, nobody is asked."""
    machine.group("0::/user.slice/user-0.slice/login-3.scope\n")
    machine.systemctl("echo asked >&2")
    assert reason(read_unit(machine.environ)) == "this process does not belong to a service unit"


def test_a_users_unit_is_asked_of_its_own_manager(machine: Machine) -> None:
    """On the machine's bus a user's unit would be another one: only the user's bus is asked."""
    machine.group("0::/user.slice/user@1000.service/app.slice/reconciled.service\n")
    assert reason(read_unit(machine.environ)) == "this user has no D-Bus of its own"
    machine.group(GROUP)  # where that manager was started by hand, its own variable tells
    machine.environ["MANAGERPID"] = "1"
    assert reason(read_unit(machine.environ)) == "this user has no D-Bus of its own"


def test_without_systemd_nobody_is_asked(machine: Machine, tmp_path: Path) -> None:
    """On a machine that systemd has not booted a unit cannot be there."""
    machine.monkeypatch.setattr(query, "_BOOTED", tmp_path / "none")
    assert reason(read_unit(machine.environ, NAME)) == "this machine was not booted with systemd"


@pytest.mark.processes
def test_a_unit_that_is_not_there_is_told(machine: Machine) -> None:
    """A name that the manager finds no unit for is said to be that."""
    machine.tells("Id=x.service\nLoadState=not-found\n")
    assert reason(read_unit(machine.environ, "x.service")) == "x.service is not loaded: not-found"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("lines", "watchdog"),
    [
        (["WatchdogSec=2min"], 120.0),
        (["WatchdogSec=2min", "WatchdogSec = 0"], 0.0),
        (["WatchdogSec=2min", "#WatchdogSec=0"], 120.0),
        (["Restart=no"], 0.0),
    ],
)
def test_the_watchdog_is_as_written(
    machine: Machine, tmp_path: Path, lines: list[str], watchdog: float
) -> None:
    """For a check the files count, the last one most: what runs may be older than they are."""
    files = [tmp_path / f"{number}.conf" for number in range(len(lines))]
    for file, line in zip(files, lines, strict=True):
        file.write_text(f"[Service]\n{line}\n")
    others = " ".join(map(str, files[1:]))
    told = f"FragmentPath={files[0]}\nDropInPaths={others}\nWatchdogUSec=infinity\n"
    machine.tells(SHOWN % 0 + told)
    facts = read_unit(machine.environ, NAME)
    assert isinstance(facts, UnitFacts)
    assert facts.watchdog == watchdog


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
TOLD = st.dictionaries(st.sampled_from(PROPERTIES), VALUES)


@given(TOLD, st.lists(TOLD, max_size=2), VALUES)
def test_whatever_the_properties_are(
    unit: dict[str, Any], sockets: list[dict[str, Any]], delay: Any
) -> None:
    """Properties of any type are facts that can be compared, or no answer; nothing is raised."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(query, "_own_group", lambda: GROUP)
        answer = ManagerReply("bus", unit | {"MainPID": os.getpid()}, tuple(sockets), delay)
        patched.setattr(query, "_query_bus", lambda *_, **__: answer)
        read = read_unit({})
    if isinstance(read, UnitFacts):
        find_mismatches(read, StopLimits())
