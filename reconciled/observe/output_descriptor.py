"""Writes to an inherited descriptor without ever waiting for its reader.

O_NONBLOCK is a flag of the open file description, which an inherited descriptor shares with the
shell and with other programs on the same terminal: setting it breaks them. So each kind of file
is written differently:

* FIFOs, pipes and terminals are opened again through /proc, which makes a new description.
* Sockets are written with MSG_DONTWAIT.
* Regular files and devices such as /dev/null never wait for a reader. They are written through a
  duplicate, which shares offset and append mode with the original.
* Where opening again is refused (another user's pipe, no /proc), poll() is called before each
  write of at most PIPE_BUF bytes, which a pipe that polls writable accepts at once.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from typing import Protocol

import attrs

_PTMX = (5, 2)  # opening /dev/ptmx again makes a new terminal


class Descriptor(Protocol):
    """A destination of bytes. Any thread may call write(), one at a time."""

    @property
    def fd(self) -> int:
        """The descriptor to wait for until it is writable; -1 if it is closed."""

    @property
    def is_terminal(self) -> bool:
        """Whether it is a terminal."""

    def write(self, data: bytes) -> int:
        """Write what fits now, and return the number of bytes; 0 if the reader stalls.

        Raises OSError when the reader has closed its end, or the disk is full.
        """

    def close(self) -> None:
        """Close this object's own descriptor; the inherited one stays open."""


@attrs.define(eq=False)
class _Reopened:
    fd: int
    is_terminal: bool

    def write(self, data: bytes) -> int:
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        os.close(self.fd)


@attrs.define(eq=False)
class _Socket:
    _socket: socket.socket
    is_terminal: bool = False

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def write(self, data: bytes) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        self._socket.close()


@attrs.define(eq=False)
class _FileOrDevice:
    fd: int
    is_terminal: bool = False

    def write(self, data: bytes) -> int:
        return os.write(self.fd, data)

    def close(self) -> None:
        os.close(self.fd)


@attrs.define(eq=False)
class _Polled:
    fd: int
    is_terminal: bool

    def write(self, data: bytes) -> int:
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        if not poller.poll(0):
            return 0
        try:
            return os.write(self.fd, data[: select.PIPE_BUF])
        except BlockingIOError:  # another process made the shared description non-blocking
            return 0

    def close(self) -> None:
        os.close(self.fd)


@attrs.define(eq=False)
class _Closed:
    fd: int = -1
    is_terminal: bool = False

    def write(self, data: bytes) -> int:
        raise BrokenPipeError(f"the descriptor is closed: cannot write {len(data)} bytes")

    def close(self) -> None:
        """Do nothing: it is closed already."""


def open_descriptor(inherited: int) -> Descriptor:
    """A non-blocking Descriptor that writes to *inherited*, whose flags stay as they are.

    A closed descriptor gives one whose writes all raise BrokenPipeError.
    """
    try:
        status = os.fstat(inherited)
        duplicate = os.dup(inherited)  # non-inheritable: children do not keep it open
    except OSError:
        return _Closed()
    terminal = os.isatty(duplicate)
    if stat.S_ISSOCK(status.st_mode):
        return _Socket(socket.socket(fileno=duplicate))
    if not stat.S_ISFIFO(status.st_mode) and not terminal:
        return _FileOrDevice(duplicate)
    reopened = _reopen(duplicate, status)
    if reopened is None:
        return _Polled(duplicate, terminal)
    os.close(duplicate)
    return _Reopened(reopened, terminal)


def _reopen(duplicate: int, status: os.stat_result) -> int | None:
    if (os.major(status.st_rdev), os.minor(status.st_rdev)) == _PTMX:
        return None
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        reopened = os.open(f"/proc/self/fd/{duplicate}", flags)
    except OSError:
        return None
    # A terminal's path may lead elsewhere in another mount namespace.
    if os.path.samestat(os.fstat(reopened), status):
        return reopened
    os.close(reopened)
    return None
