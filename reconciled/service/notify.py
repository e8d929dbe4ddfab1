"""Notifications to the service manager: one datagram a message, sd_notify(3).

1. Without a manager every method returns False; callers need not check first.
2. No method raises or waits. A full socket refuses the message, and the caller, which knows whether
   the message still matters, sends it again.
3. The manager's variables are removed from the environment as they are read: a program that
   inherited them could send notifications for the daemon, or assume that a watchdog watches it.
4. Text never breaks the protocol: it is one line, valid UTF-8, and short enough for the manager,
   which ignores a message above 4 KiB as a whole.

Rejected: libsystemd and its bindings (C code, for what a socket does), and a connected socket
(when the manager replaces its socket, messages would be lost).
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import MutableMapping

import attrs

# The longest value of one field, in bytes.
LONGEST = 1024
# Digits of a 64-bit number: a longer one was not written by a manager.
_LONGEST_NUMBER = 20
# Bytes of the name of a stored descriptor, see sd_pid_notify_with_fds(3).
_LONGEST_NAME = 255
# Seconds. Only a connection to the host of a virtual machine waits, once, at the start.
_CONNECT_TIMEOUT = 0.25


@attrs.define(eq=False)
class Notifier:
    """Sends notifications; made by from_environ(). Any thread may use it.

    Each method returns whether the message was sent; the manager does not acknowledge messages.
    """

    # The manager kills this process after this many seconds without WATCHDOG=1; None: there is
    # no watchdog.
    watchdog_s: float | None = None
    _socket: socket.socket | None = None
    # None: the socket is connected.
    _address: str | None = None

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Notifier:
        """Remove the manager's variables from *environ*; without them nothing is ever sent."""
        written = environ.pop("NOTIFY_SOCKET", "")
        watchdog = _watchdog(environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", ""))
        try:
            if written.startswith("vsock:"):
                return cls(watchdog, _vsock(written))
            if written.startswith(("/", "@")):
                opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                # A leading "@" means the NUL byte of an abstract name.
                address = "\0" + written[1:] if written.startswith("@") else written
                return cls(watchdog, opened, address)
        except (OSError, ValueError):
            # The sandbox refuses the address family, or the host does not respond.
            return cls()
        return cls()

    def __repr__(self) -> str:
        where = repr(self._address or "connected") if self.present else "no manager"
        return f"<Notifier to {where}, watchdog {self.watchdog_s}>"

    @property
    def present(self) -> bool:
        """Whether there is a manager to notify."""
        return self._socket is not None

    def notify(self, **fields: object) -> bool:
        """Send *fields* as one message: ``notify(READY=1, STATUS="ready: 3 keys")``."""
        return self._send(fields)

    def set_status(self, text: str) -> bool:
        """Set the text that ``systemctl status`` shows."""
        return self.notify(STATUS=text)

    def extend_timeout(self, seconds: float) -> bool:
        """Request *seconds* from now: for the present start, stop or ExecStopPost= process.

        It never shortens the unit's own limit. Once sent, the next one has to arrive in time.
        """
        return self.notify(EXTEND_TIMEOUT_USEC=microseconds(seconds))

    def store_fd(self, name: str, fd: int) -> bool:
        """Store *fd* in the manager for the next start, under *name*."""
        if not _is_name(name):
            return False
        return self._send({"FDSTORE": 1, "FDNAME": name}, fd)

    def remove_fd(self, name: str) -> bool:
        """Make the manager close all descriptors that it stores under *name*."""
        return _is_name(name) and self._send({"FDSTOREREMOVE": 1, "FDNAME": name})

    def close(self) -> None:
        """Close the socket: later messages are not sent."""
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
        except (OSError, ValueError):  # ValueError: the name contains NUL or is too long
            return False
        return True


def microseconds(seconds: float) -> int:
    """*seconds* in the unit of the protocol; never below 0."""
    return max(0, round(seconds * 1_000_000))


def _watchdog(microseconds_written: str, pid: str) -> float | None:
    """The watchdog's seconds; None where it does not watch this process."""
    if pid and pid != str(os.getpid()):
        return None
    written = microseconds_written
    if not written.isascii() or not written.isdecimal() or len(written) > _LONGEST_NUMBER:
        return None
    return int(written) / 1_000_000 or None


def _vsock(written: str) -> socket.socket:
    """A connection to the virtual machine's host, for ``vsock:CID:PORT``."""
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
    """*value* as one line of valid UTF-8, truncated to LONGEST bytes."""
    # isprintable() excludes line ends and halves of surrogate pairs.
    text = "".join(each if each.isprintable() else " " for each in str(value))
    data = text.encode()
    if len(data) <= LONGEST:
        return text
    return data[: LONGEST - 3].decode("utf-8", "ignore") + "…"


def _is_name(name: str) -> bool:
    printable = name.isascii() and name.isprintable() and ":" not in name
    return printable and 0 < len(name) <= _LONGEST_NAME
