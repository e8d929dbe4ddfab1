"""The client of the control socket: sends a request to the daemon and waits for its reply.

Blocking calls, each with a deadline: a verb is one request, and without an event loop it starts in
a few milliseconds.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path
from typing import Any

from reconciled.control.protocol import (
    LONGEST_REPLY,
    ControlReply,
    ControlRequest,
    address_of,
    decode,
    encode_request,
)
from reconciled.core.errors import MalformedMessage, NoDaemon, RequestNotDone

# Seconds until the acknowledgement; behind a kept socket a daemon may be just starting.
ACKNOWLEDGE_TIMEOUT = 5.0
# Seconds until the reply. Below the two minutes that the unit allows a reload, so that the error
# is this client's and not the service manager's.
REPLY_TIMEOUT = 100.0
_MALFORMED = "malformed response of the daemon: compare the versions of verb and daemon"


def send_request(
    path: Path, request: ControlRequest, reply_timeout: float = REPLY_TIMEOUT
) -> ControlReply:
    """Send *request* to the daemon at *path*. Raises NoDaemon, RequestNotDone."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        conversation = _Conversation(connection, path)
        conversation.begin(request)
        first = conversation.next(ACKNOWLEDGE_TIMEOUT, acknowledged=False)
        if "accepted" not in first:
            raise RequestNotDone(str(first.get("refused", _MALFORMED)))
        last = conversation.next(reply_timeout, acknowledged=True)
    if "refused" in last:
        raise RequestNotDone(str(last["refused"]))
    try:
        return ControlReply(int(last["code"]), tuple(str(line) for line in last.get("lines", ())))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RequestNotDone(_MALFORMED) from error


class _Conversation:
    def __init__(self, connection: socket.socket, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.unread = b""

    def begin(self, request: ControlRequest) -> None:
        # The kernel's timeout, in place of settimeout(): with that a full queue of waiting
        # connections is an error at once, and with this connect() waits.
        seconds, rest = divmod(ACKNOWLEDGE_TIMEOUT, 1)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            with address_of(self.path) as address:
                self.connection.connect(address)
            # A server that refuses a client without reading its request may have replied and
            # closed the connection already: the reply is still to be read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.connection.sendall(encode_request(request))
        except FileNotFoundError as error:
            raise NoDaemon(f"no daemon answers: {self.path} does not exist") from error
        except ConnectionRefusedError as error:
            raise NoDaemon(f"no daemon answers: no process serves {self.path}") from error
        except BlockingIOError as error:
            raise self._timeout_error() from error
        except PermissionError as error:
            denied = f"{self.path}: permission denied: run as root, or as the daemon's user"
            raise RequestNotDone(denied) from error
        except OSError as error:
            raise NoDaemon(
                f"no daemon answers at {self.path}: {error.strerror or error}"
            ) from error

    def next(self, timeout: float, *, acknowledged: bool) -> dict[str, Any]:
        """The next line. Raises NoDaemon or RequestNotDone where none arrives."""
        deadline = time.monotonic() + timeout
        try:
            while b"\n" not in self.unread:
                # Not 0, which would make the socket non-blocking.
                self.connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = self.connection.recv(1 << 16)
                if not data or len(self.unread) > LONGEST_REPLY:
                    raise self._disconnect_error(acknowledged=acknowledged)
                self.unread += data
        except TimeoutError as error:
            if not acknowledged:
                raise self._timeout_error() from error
            late = f"no reply within {timeout:g} s: the daemon is still working on it"
            raise RequestNotDone(late) from error
        except OSError as error:
            raise self._disconnect_error(acknowledged=acknowledged) from error
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            return decode(line)
        except MalformedMessage as error:
            raise RequestNotDone(_MALFORMED) from error

    def _timeout_error(self) -> NoDaemon:
        return NoDaemon(f"no daemon answers at {self.path} within {ACKNOWLEDGE_TIMEOUT:g} s")

    def _disconnect_error(self, *, acknowledged: bool) -> Exception:
        if acknowledged:
            return RequestNotDone(
                "the daemon closed the connection before it was done: its log has the outcome"
            )
        return NoDaemon(f"no daemon answers: {self.path} was closed without a reply")
