"""A journal for tests: the socket that the real one listens on, and a reader of its protocol."""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
import struct
from pathlib import Path

import attrs

Entry = dict[str, list[str]]


def decoded(datagram: bytes) -> Entry:
    """The fields of an entry, each with its values in order, read as the journal reads it."""
    fields: Entry = {}
    while datagram:
        row, _, rest = datagram.partition(b"\n")
        name, equals, value = row.partition(b"=")
        if not equals:
            (length,) = struct.unpack_from("<Q", rest)
            value, end, datagram = rest[8 : 8 + length], rest[8 + length :][:1], rest[9 + length :]
            assert len(value) == length
            assert end == b"\n"
        else:
            datagram = rest
        fields.setdefault(name.decode(), []).append(value.decode())
    return fields


@attrs.define(eq=False)
class Receiver:
    """Listens at *path* like the journal, whose queue holds a few datagrams."""

    path: Path
    _socket: socket.socket = attrs.field(init=False)
    # The seals of the memory files that came.
    seals: list[int] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Listen (again), at a socket made anew."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))

    def close(self) -> None:
        """Go away, with what is queued, as a manager does that stops the journal's socket."""
        self._socket.close()
        self.path.unlink()

    def datagram(self) -> bytes | None:
        """The next one, out of its memory file where it came in one; None: nothing is queued."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if not poller.poll(0):
            return None
        descriptors = array.array("i")
        room = socket.CMSG_SPACE(descriptors.itemsize)
        data, ancillary, _, _ = self._socket.recvmsg(1 << 20, room)
        for _, _, passed in ancillary:
            descriptors.frombytes(passed)
        for file in descriptors:
            self.seals.append(fcntl.fcntl(file, fcntl.F_GET_SEALS))
            data += os.pread(file, os.fstat(file).st_size, 0)
            os.close(file)
        return data

    def datagrams(self) -> list[bytes]:
        """All that is queued."""
        return list(iter(self.datagram, None))

    def entries(self) -> list[Entry]:
        """All that is queued, decoded."""
        return [decoded(datagram) for datagram in self.datagrams()]
