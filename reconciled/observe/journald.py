"""The way to systemd's journal: one datagram a record, sent without ever waiting.

1. A journal that is stopped, busy or restarted makes write() say "not now", never wait and never
   raise: the sink keeps the record, and sends it when the journal is back.
2. What is too large for a datagram goes as a sealed memory file, of any size.
3. The socket stays the same one whatever happens to its peer, as a task may be waiting for it:
   it is connected again, not opened again.

The manager holds the journal's socket: while the journal itself is restarted, datagrams queue.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Mapping

import attrs

SOCKET = "/run/systemd/journal/socket"
# As systemd's own library has it. The kernel caps it; without it some 160 records fill it.
_BUFFER = 8 << 20
# Bytes. Some machines allow datagrams of megabytes: one of them would keep all others waiting.
_LARGE = 1 << 16
# There is no journal now, as its socket is made anew, say. ENOENT: not even the file of it.
_UNAVAILABLE = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ENOENT}
)
_TOO_LARGE = frozenset({errno.EMSGSIZE, errno.ENOBUFS})
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@attrs.define(eq=False)
class JournaldSocket:
    """A Descriptor (see descriptor) that takes whole records; made by open_journal()."""

    _socket: socket.socket
    _path: str
    is_terminal: bool = False

    @property
    def fd(self) -> int:
        """For waiting until it is writable."""
        return self._socket.fileno()

    def write(self, data: bytes) -> int:
        """Send *data* as one record: its length, or 0 if the journal cannot take it now.

        Raises OSError for what is wrong with this record, or with us (no memory left for it).
        """
        try:
            return self._send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _UNAVAILABLE:
                raise
        try:
            self._socket.connect(self._path)
            return self._send(data)
        except OSError:
            return 0

    def close(self) -> None:
        """What was sent stays in the journal's queue."""
        self._socket.close()

    def _send(self, data: bytes) -> int:
        if len(data) <= _LARGE:
            try:
                return self._socket.send(data, socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno not in _TOO_LARGE:
                    raise
        file = os.memfd_create("reconciled-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            socket.send_fds(self._socket, [b""], [file], socket.MSG_NOSIGNAL)
        finally:
            os.close(file)
        return len(data)


def open_journald(
    environment: Mapping[str, str], descriptor: int, *, force: bool, path: str
) -> JournaldSocket | None:
    """A way to the journal where *descriptor* leads there by the manager's hand; None elsewhere.

    insist: also where it does not. None then means that there is no journal.
    """
    if not force and environment.get("JOURNAL_STREAM") != _identity(descriptor):
        return None
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        opened.settimeout(0)
        opened.connect(path)
    except OSError:
        opened.close()
        return None
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return JournaldSocket(opened, path)


def _identity(descriptor: int) -> str:
    """As JOURNAL_STREAM names it: a program that inherits the variable may write elsewhere."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
