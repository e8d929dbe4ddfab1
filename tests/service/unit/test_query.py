"""Queries for a unit end within their timeout and never raise, for any reply."""

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
# In place of 2 s, to keep the tests short.
TAKES = 0.3
SHOWN = f"Id={NAME}\nLoadState=loaded\nMainPID=%d\nTimeoutStopUSec=10s\nExecStart=\n"


@attrs.define(eq=False)
class Machine:
    """A machine on which systemd seems to run."""

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
        """Install a systemctl that runs *script*; otherwise there is none."""
        program = self.root / "systemctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    def systemctl_prints(self, text: str) -> None:
        (self.root / "shown").write_text(text)
        self.systemctl(f"/bin/cat {self.root}/shown")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def silent(_: socket.socket) -> None:
    """Accept the connection, and send nothing."""


def greeting_only(connection: socket.socket) -> None:
    """Greet, and send nothing more."""
    connection.recv(1024)
    connection.sendall(b"OK 0123\r\n")


def disconnecting(connection: socket.socket) -> None:
    """Greet, and close the connection."""
    greeting_only(connection)
    connection.recv(1024)
    connection.shutdown(socket.SHUT_WR)


def garbage(connection: socket.socket) -> None:
    """Greet, and send malformed data."""
    greeting_only(connection)
    connection.recv(1024)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 4)


@pytest.fixture
def bus(machine: Machine) -> Iterator[Callable[[Callable[[socket.socket], None]], None]]:
    """Starts a bus on the machine that handles each connection with a function."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{machine.root}/bus")
    kept = []

    def serve(handle: Callable[[socket.socket], None]) -> None:
        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                handle(connection)

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
    ("handle", "why"),
    [
        (silent, "D-Bus: "),
        (greeting_only, "D-Bus: "),
        (disconnecting, "D-Bus: the bus closed the connection"),
        (garbage, "D-Bus: "),
    ],
)
def test_a_faulty_bus_is_the_reason(
    machine: Machine,
    bus: Callable[[Callable[[socket.socket], None]], None],
    handle: Callable[[socket.socket], None],
    why: str,
) -> None:
    """A bus that is silent, disconnects or sends garbage is the reason, within the timeout."""
    bus(handle)
    began = time.monotonic()
    assert reason(read_unit(machine.environ)).startswith(why)
    assert time.monotonic() - began < TAKES + 10


@pytest.mark.processes
def test_without_a_bus_systemctl_is_asked(machine: Machine) -> None:
    """Without a bus the facts of the same unit are read from systemctl."""
    machine.systemctl_prints(SHOWN % os.getpid())
    facts = read_unit(machine.environ)
    assert isinstance(facts, UnitFacts)
    assert (facts.source, facts.name, facts.timeout_stop) == ("systemctl", NAME, 10.0)
    assert read_unit(machine.environ, NAME) == facts


@pytest.mark.processes
@pytest.mark.parametrize("script", ["exec /bin/sleep 60", "echo no >&2; exit 1", "echo nonsense"])
def test_a_faulty_systemctl_gives_no_facts(machine: Machine, script: str) -> None:
    """A systemctl that hangs is killed; after any failure the reason is that of the bus."""
    machine.systemctl(script)
    began = time.monotonic()
    assert reason(read_unit(machine.environ)).startswith("D-Bus: ")
    assert time.monotonic() - began < TAKES + 10


def test_the_watchdog_of_the_process_is_the_last_fact(machine: Machine) -> None:
    """Without bus and systemctl the only known fact is the watchdog of the process."""
    facts = read_unit(machine.environ, watchdog=60.0)
    assert facts == UnitFacts(NAME, "environment", watchdog=60.0)


@pytest.mark.processes
def test_a_daemon_started_by_hand_below_a_service_is_not_its_unit(machine: Machine) -> None:
    """The limits of a unit do not apply to a process other than its main one."""
    machine.systemctl_prints(SHOWN % (os.getpid() + 1))
    expected = f"this process is not the main process of {NAME}"
    assert reason(read_unit(machine.environ)) == expected


def test_a_shell_has_no_unit(machine: Machine) -> None:
    """In a control group that belongs to no service, no query is sent."""
    machine.group("0::/user.slice/user-0.slice/login-3.scope\n")
    machine.systemctl("echo queried >&2")
    assert reason(read_unit(machine.environ)) == "this process does not belong to a service unit"


def test_a_user_unit_is_queried_at_the_user_manager(machine: Machine) -> None:
    """A user unit is queried on the user's bus: the system bus could have another one."""
    machine.group("0::/user.slice/user@1000.service/app.slice/reconciled.service\n")
    assert reason(read_unit(machine.environ)) == "this user has no D-Bus of its own"
    machine.group(GROUP)  # if that manager was started by hand, its own variable decides
    machine.environ["MANAGERPID"] = "1"
    assert reason(read_unit(machine.environ)) == "this user has no D-Bus of its own"


def test_without_systemd_no_query_is_sent(machine: Machine, tmp_path: Path) -> None:
    """On a machine that was not booted with systemd there is no unit."""
    machine.monkeypatch.setattr(query, "_BOOTED", tmp_path / "none")
    assert reason(read_unit(machine.environ, NAME)) == "this machine was not booted with systemd"


@pytest.mark.processes
def test_an_unknown_unit_is_a_reason(machine: Machine) -> None:
    """A unit that the manager cannot find is reported as not loaded."""
    machine.systemctl_prints("Id=x.service\nLoadState=not-found\n")
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
def test_the_watchdog_is_read_from_the_files(
    machine: Machine, tmp_path: Path, lines: list[str], watchdog: float
) -> None:
    """A check reads WatchdogSec= from the files, the last one wins, not from the process."""
    files = [tmp_path / f"{number}.conf" for number in range(len(lines))]
    for file, line in zip(files, lines, strict=True):
        file.write_text(f"[Service]\n{line}\n")
    others = " ".join(map(str, files[1:]))
    written = f"FragmentPath={files[0]}\nDropInPaths={others}\nWatchdogUSec=infinity\n"
    machine.systemctl_prints(SHOWN % 0 + written)
    facts = read_unit(machine.environ, NAME)
    assert isinstance(facts, UnitFacts)
    assert facts.watchdog == watchdog


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)
REPLIED = st.dictionaries(st.sampled_from(PROPERTIES), VALUES)


@given(REPLIED, st.lists(REPLIED, max_size=2), VALUES)
def test_any_properties_give_facts_or_a_reason(
    unit: dict[str, Any], sockets: list[dict[str, Any]], delay: Any
) -> None:
    """Properties of any type give comparable facts or a reason; nothing is raised."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(query, "_own_group", lambda: GROUP)
        answer = ManagerReply("bus", unit | {"MainPID": os.getpid()}, tuple(sockets), delay)
        patched.setattr(query, "_query_bus", lambda *_, **__: answer)
        read = read_unit({})
    if isinstance(read, UnitFacts):
        find_mismatches(read, StopLimits())
