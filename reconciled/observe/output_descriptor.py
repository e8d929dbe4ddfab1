"""A descriptor that somebody handed us, written without ever waiting for its reader.

O_NONBLOCK is a flag of the open file description, which an inherited descriptor shares with the
shell and with other programs on the same terminal: setting it breaks them. So each kind of file
has a way of its own:

* FIFOs, pipes and terminals are opened again through /proc: a description of our own.
* Sockets take MSG_DONTWAIT with each call.
* Regular files and devices such as /dev/null never wait for a reader. They are written through a
  duplicate, which shares offset and append mode with the original.
* Where opening again is refused (another user's pipe, no /proc), poll() is asked before each
  write of at most PIPE_BUF bytes, which a pipe that polls writable takes at once.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from typing import Protocol

import attrs

_PTMX = (5, 2)  # opening it again makes a new terminal instead


class Descriptor(Protocol):
    """Where bytes go. write() may be called by any thread, one at a time."""

    @property
    def fd(self) -> int:
        """For waiting until it is writable; -1 if there is nothing to wait for."""

    @property
    def is_terminal(self) -> bool:
        """Whether a person reads it."""

    def write(self, data: bytes) -> int:
        """Write what fits right now: the number of bytes, 0 if the reader stalls.

        Raises OSError when nobody will read any more, or the disk is full.
        """

    def close(self) -> None:
        """Give up our own handle; the inherited descriptor stays open."""


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
        except BlockingIOError:  # somebody else made the shared description non-blocking
            return 0

    def close(self) -> None:
        os.close(self.fd)


@attrs.define(eq=False)
class _Closed:
    fd: int = -1
    is_terminal: bool = False

    def write(self, data: bytes) -> int:
        raise BrokenPipeError(f"there is nowhere to write {len(data)} bytes to")

    def close(self) -> None:
        """Nothing is open."""


def open_descriptor(inherited: int) -> Descriptor:
    """A non-blocking way to write to *inherited*, whose flags stay as they are.

    A closed descriptor gives one whose writes all raise BrokenPipeError.
    """
    try:
        status = os.fstat(inherited)
        duplicate = os.dup(inherited)  # non-inheritable, so that no child keeps it
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
