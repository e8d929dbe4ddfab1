"""What a process tells its service manager: one datagram a message, sd_notify(3).

1. Silent without a manager: every method then answers False, and nobody has to ask first.
2. No method raises or waits. A socket that is full refuses the message, and the caller, who
   knows whether it still matters, sends it again.
3. The manager's variables leave the environment as they are read: a program that inherited them
   could speak for the daemon, or take itself for watched.
4. Text never breaks the protocol: it is one line, valid UTF-8, and short enough for the manager,
   which ignores a message above 4 KiB as a whole.

Rejected: libsystemd and its bindings (C code, for what a socket does), and a connected socket
(after the manager has replaced its own, it would speak to nobody).
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import MutableMapping

import attrs

# The longest value of one field, in bytes.
LONGEST = 1024
# Digits of 64 bits: more is nothing that a manager wrote.
_LONGEST_NUMBER = 20
# Of the name of a kept descriptor, as sd_pid_notify_with_fds(3) has it.
_LONGEST_NAME = 255
# To connect to the host of a virtual machine is all that may wait: once, at the start.
_CONNECT_TIMEOUT = 0.25


@attrs.define(eq=False)
class Notifier:
    """The way to the service manager; made by taken(). Any thread may use it.

    Each method answers whether the message was sent, which is all that can be known: the
    manager confirms nothing.
    """

    # The manager ends this process when it hears no WATCHDOG=1 for so many seconds; None: it
    # does not watch.
    watchdog_s: float | None = None
    _socket: socket.socket | None = None
    # None: the socket is connected.
    _address: str | None = None

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Take the manager's variables out of *environ*; silent where there are none."""
        written = environ.pop("NOTIFY_SOCKET", "")
        watchdog = _watchdog(environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", ""))
        try:
            if written.startswith("vsock:"):
                return cls(watchdog, _vsock(written))
            if written.startswith(("/", "@")):
                opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                # A leading "@" stands for the byte 0 of an abstract name.
                address = "\0" + written[1:] if written.startswith("@") else written
                return cls(watchdog, opened, address)
        except (OSError, ValueError):
            # An address family that the sandbox refuses, a host that does not answer: as without.
            return cls()
        return cls()

    def __repr__(self) -> str:
        where = repr(self._address or "connected") if self.present else "nobody"
        return f"<Notifier to {where}, watchdog {self.watchdog_s}>"

    @property
    def present(self) -> bool:
        """Whether there is somebody to tell."""
        return self._socket is not None

    def notify(self, **fields: object) -> bool:
        """Send *fields* as one message: ``tell(READY=1, STATUS="ready: 3 keys")``."""
        return self._send(fields)

    def set_status(self, text: str) -> bool:
        """What ``systemctl status`` shows."""
        return self.notify(STATUS=text)

    def extend_timeout(self, seconds: float) -> bool:
        """Ask for *seconds* from now: for the present start, stop, or process after a stop.

        It never shortens what the unit allows. Once sent, the next one has to come in time.
        """
        return self.notify(EXTEND_TIMEOUT_USEC=microseconds(seconds))

    def store_fd(self, name: str, fd: int) -> bool:
        """Have the manager keep *fd* for the next start, which finds it as *name*."""
        if not _is_name(name):
            return False
        return self._send({"FDSTORE": 1, "FDNAME": name}, fd)

    def remove_fd(self, name: str) -> bool:
        """Have the manager close everything that it keeps as *name*."""
        return _is_name(name) and self._send({"FDSTOREREMOVE": 1, "FDNAME": name})

    def close(self) -> None:
        """Nothing more is told."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, fields: dict[str, object], fd: int | None = None) -> bool:
        if self._socket is None:
            return False
        lines = "".join(f"{name}={_line(value)}\n" for name, value in fields.items())
        rights = []
        if fd is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        where = () if self._address is None else (self._address,)
        try:
            self._socket.sendmsg([lines.encode()], rights, flags, *where)
        except (OSError, ValueError):  # a name with a NUL in it, or one that is too long
            return False
        return True


def microseconds(seconds: float) -> int:
    """*seconds* as the protocol writes them; never below 0."""
    return max(0, round(seconds * 1_000_000))


def _watchdog(microseconds_written: str, pid: str) -> float | None:
    """Seconds, where it is this process that is watched."""
    if pid and pid != str(os.getpid()):
        return None
    written = microseconds_written
    if not written.isascii() or not written.isdecimal() or len(written) > _LONGEST_NUMBER:
        return None
    return int(written) / 1_000_000 or None


def _vsock(written: str) -> socket.socket:
    """A connection to the host of this virtual machine, for ``vsock:CID:PORT``."""
    cid, port = written.removeprefix("vsock:").split(":")
    opened = socket.socket(socket.AF_VSOCK, socket.SOCK_SEQPACKET)
    try:
        opened.settimeout(_CONNECT_TIMEOUT)
        opened.connect((int(cid), int(port)))
    except BaseException:
        opened.close()
        raise
    opened.settimeout(0)
    return opened


def _line(value: object) -> str:
    """*value* as one line of valid UTF-8, cut where it is too long."""
    # Neither line ends nor halves of surrogate pairs are printable.
    text = "".join(each if each.isprintable() else " " for each in str(value))
    data = text.encode()
    if len(data) <= LONGEST:
        return text
    return data[: LONGEST - 3].decode("utf-8", "ignore") + "…"


def _is_name(name: str) -> bool:
    printable = name.isascii() and name.isprintable() and ":" not in name
    return printable and 0 < len(name) <= _LONGEST_NAME
