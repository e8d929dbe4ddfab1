"""A journal for tests: a socket like journald's, and a reader of its native protocol."""

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
    """The fields of an entry, each with its values in order, parsed as journald parses them."""
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
    # The seals of the memory files received.
    seals: list[int] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Listen on a new socket."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))

    def close(self) -> None:
        """Close and unlink the socket with its queue, as a stop of systemd-journald.socket does."""
        self._socket.close()
        self.path.unlink()

    def datagram(self) -> bytes | None:
        """The next datagram, read from its memory file if it has one; None: the queue is empty."""
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
        """All queued datagrams."""
        return list(iter(self.datagram, None))

    def entries(self) -> list[Entry]:
        """All queued datagrams, decoded."""
        return [decoded(datagram) for datagram in self.datagrams()]
