"""Messages to the service manager, received at its end of the socket."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import attrs
import pytest

from reconciled.service.notify import LONGEST, Notifier


@attrs.define(eq=False)
class Manager:
    """The manager's end of the socket."""

    written: str
    socket: socket.socket
    made: list[Notifier] = attrs.field(factory=list)

    @classmethod
    def at(cls, written: str) -> Manager:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        bound.bind(written.replace("@", "\0", 1) if written.startswith("@") else written)
        return cls(written, bound)

    def notifier(self, **more: str) -> Notifier:
        self.made.append(Notifier.from_environ({"NOTIFY_SOCKET": self.written, **more}))
        return self.made[-1]

    def received(self) -> list[str]:
        """All messages in the queue, each once."""
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(1 << 16).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        for each in self.made:
            each.close()
        self.socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager.at(str(tmp_path / "notify"))
    yield made
    made.close()


def test_messages_are_lines_of_one_datagram(manager: Manager) -> None:
    """Each call is one message, and each field one line, as in sd_notify(3)."""
    notifier = manager.notifier()
    assert notifier.notify(READY=1, STATUS="ready: 3 keys → done")
    assert notifier.set_status("draining")
    assert notifier.extend_timeout(29.5)
    assert manager.received() == [
        "READY=1\nSTATUS=ready: 3 keys → done\n",
        "STATUS=draining\n",
        "EXTEND_TIMEOUT_USEC=29500000\n",
    ]


def test_an_abstract_socket_is_reached() -> None:
    """A name that begins with @ is an abstract socket, without a file."""
    manager = Manager.at(f"@reconciled-{os.getpid()}-{time.monotonic_ns()}")
    assert manager.notifier().notify(READY=1)
    assert manager.received() == ["READY=1\n"]
    manager.close()


def test_an_at_sign_within_a_path_is_literal(tmp_path: Path) -> None:
    """An @ is special only as the first character: a directory may be named user@1."""
    (tmp_path / "user@1").mkdir()
    manager = Manager.at(str(tmp_path / "user@1/notify"))
    assert manager.notifier().notify(READY=1)
    assert manager.received() == ["READY=1\n"]
    manager.close()


@pytest.mark.parametrize(
    "written",
    ["", "/nowhere/notify", "relative", "@", "/" + "x" * 300, "/a\0b", "vsock:", "vsock:a:b"],
)
def test_without_a_manager_no_message_is_sent(written: str) -> None:
    """Without a usable socket each method returns False, and none raises."""
    with contextlib.closing(Notifier.from_environ({"NOTIFY_SOCKET": written})) as notifier:
        assert not notifier.notify(READY=1)
        assert not notifier.store_fd("http", 0)
        assert not notifier.remove_fd("http")


def test_without_variables_there_is_no_manager() -> None:
    """A process that no manager has started finds no manager."""
    assert not Notifier.from_environ({}).present


def test_a_message_to_a_host_that_does_not_reply_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connecting to the host of a virtual machine has a timeout, and a failure is ignored."""
    seen: list[object] = []

    class TimingOut(socket.socket):
        def __new__(cls, *_: object) -> Self:  # the kernel need not support the family
            return super().__new__(cls)

        def __init__(self, family: int, kind: int) -> None:
            seen.append((family, kind))
            super().__init__(socket.AF_UNIX, socket.SOCK_STREAM)

        def connect(self, address: object) -> None:
            seen.append((address, self.gettimeout()))
            raise TimeoutError

    monkeypatch.setattr(socket, "socket", TimingOut)
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": "vsock:2:1234"})
    assert seen == [(socket.AF_VSOCK, socket.SOCK_SEQPACKET), ((2, 1234), 0.25)]
    assert not notifier.present


def test_the_variables_leave_the_environment(manager: Manager) -> None:
    """The manager's variables are removed from the environment; all others are kept."""
    environ = {"NOTIFY_SOCKET": manager.written, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    environ |= {"PATH": "/bin"}
    Notifier.from_environ(environ).close()
    assert environ == {"PATH": "/bin"}


OURS, OTHERS = str(os.getpid()), "1"
WATCHED = {
    "this process": ("60000000", OURS, 60.0),
    "no process is named": ("500000", "", 0.5),
    "another process": ("60000000", OTHERS, None),
    "no time": ("0", "", None),
    "no number": ("soon", "", None),
    "less than nothing": ("-5", "", None),
    "nothing": ("", OURS, None),
    "more than any manager writes": ("9" * 5000, OURS, None),
}


@pytest.mark.parametrize("case", WATCHED)
def test_the_watchdog_applies_to_its_process_only(manager: Manager, case: str) -> None:
    """WATCHDOG_USEC applies only to the process that WATCHDOG_PID names."""
    usec, pid, expected = WATCHED[case]
    assert manager.notifier(WATCHDOG_USEC=usec, WATCHDOG_PID=pid).watchdog_s == expected


@pytest.mark.parametrize(
    "text", ["a\nREADY=1", "a\rb", "a\0b", "a\x1b[1mb", "a\u2028b", "half \ud800 pair"]
)
def test_text_stays_one_line(manager: Manager, text: str) -> None:
    """No text can add a field to its message or end the message."""
    assert manager.notifier().set_status(text)
    (message,) = manager.received()
    assert message.count("\n") == 1
    assert message[-1] == "\n"
    assert message.startswith(f"STATUS={text[0]}")


def test_long_text_is_cut_between_characters(manager: Manager) -> None:
    """The manager ignores messages above 4 KiB: a long text is cut, and stays valid UTF-8."""
    assert manager.notifier().set_status("ü→" * 4000)
    value = manager.received()[0].removeprefix("STATUS=").removesuffix("\n")
    assert len(value.encode()) <= LONGEST
    assert value.startswith("ü→ü→")
    assert value.endswith("…")


def test_a_full_socket_refuses_without_waiting(manager: Manager) -> None:
    """A message to a manager that does not read is dropped without blocking: False."""
    notifier = manager.notifier()
    sent = 0
    while notifier.notify(WATCHDOG=1):
        sent += 1
        assert sent < 100_000
    assert not notifier.notify(READY=1)
    assert len(manager.received()) == sent
    assert notifier.notify(READY=1)


def test_a_descriptor_is_kept_by_name(manager: Manager) -> None:
    """The descriptor itself is sent with FDSTORE and its name; FDSTOREREMOVE has the name."""
    read, write = os.pipe()
    notifier = manager.notifier()
    assert notifier.store_fd("http", write)
    data, ancillary, _, _ = manager.socket.recvmsg(4096, socket.CMSG_SPACE(4))
    assert data.decode() == "FDSTORE=1\nFDNAME=http\n"
    kept = array.array("i", ancillary[0][2])[0]
    os.write(kept, b"x")
    assert os.read(read, 1) == b"x"
    for descriptor in (read, write, kept):
        os.close(descriptor)
    assert notifier.remove_fd("http")
    assert manager.received() == ["FDSTOREREMOVE=1\nFDNAME=http\n"]


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "ü", "x" * 256])
def test_names_that_the_manager_ignores_are_not_sent(manager: Manager, name: str) -> None:
    """A name that the manager would silently ignore is refused by the notifier."""
    assert not manager.notifier().store_fd(name, 0)
    assert not manager.notifier().remove_fd(name)
    assert manager.received() == []


def test_a_closed_descriptor_is_refused(manager: Manager) -> None:
    """A descriptor that does not exist is refused without an exception."""
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    assert not manager.notifier().store_fd("http", write)


def test_programs_do_not_inherit_the_socket(manager: Manager) -> None:
    """The socket is closed in every program that is executed."""
    notifier = manager.notifier()
    assert notifier._socket is not None
    assert not notifier._socket.get_inheritable()
