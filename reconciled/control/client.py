"""The side of the verbs: ask the daemon that serves a socket, and wait for its answer.

Plain blocking calls with a deadline each: a verb is one question, and starts in a few
milliseconds without a loop.
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

# For the daemon to say that it has heard; a kept socket may wait for one that is just starting.
ACKNOWLEDGE_TIMEOUT = 5.0
# For the answer itself: below the two minutes that the unit gives a reload, so that what is said
# is ours.
REPLY_TIMEOUT = 100.0


def send_request(
    path: Path, request: ControlRequest, reply_timeout: float = REPLY_TIMEOUT
) -> ControlReply:
    """Ask the daemon at *path*. Raises NoDaemon, NotDone."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        conversation = _Conversation(connection, path)
        conversation.begin(request)
        first = conversation.next(ACKNOWLEDGE_TIMEOUT, acknowledged=False)
        if "accepted" not in first:
            raise RequestNotDone(
                str(first.get("refused", "the daemon answers what nobody understands"))
            )
        last = conversation.next(reply_timeout, acknowledged=True)
    if "refused" in last:
        raise RequestNotDone(str(last["refused"]))
    try:
        return ControlReply(int(last["code"]), tuple(str(line) for line in last.get("lines", ())))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RequestNotDone("the daemon answers what nobody understands") from error


class _Conversation:
    def __init__(self, connection: socket.socket, path: Path) -> None:
        self.connection = connection
        self.path = path
        self.unread = b""

    def begin(self, request: ControlRequest) -> None:
        # The kernel's own limit, in place of settimeout(): with that a full queue of waiting
        # connections is an error at once, and with this it is waited for.
        seconds, rest = divmod(ACKNOWLEDGE_TIMEOUT, 1)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            with address_of(self.path) as address:
                self.connection.connect(address)
            self.connection.sendall(encode_request(request))
        except FileNotFoundError as error:
            raise NoDaemon(f"no daemon answers: there is no {self.path}") from error
        except ConnectionRefusedError as error:
            raise NoDaemon(f"no daemon answers: nobody serves {self.path}") from error
        except BlockingIOError as error:
            raise self._timeout_error() from error
        except PermissionError as error:
            told = f"{self.path} may not be used: be root, or the user of the daemon"
            raise RequestNotDone(told) from error
        except OSError as error:
            raise NoDaemon(
                f"no daemon answers at {self.path}: {error.strerror or error}"
            ) from error

    def next(self, timeout: float, *, acknowledged: bool) -> dict[str, Any]:
        """The next line. Raises NoDaemon or NotDone where none comes."""
        deadline = time.monotonic() + timeout
        try:
            while b"\n" not in self.unread:
                # Not 0, which would be "do not wait", and is no timeout.
                self.connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = self.connection.recv(1 << 16)
                if not data or len(self.unread) > LONGEST_REPLY:
                    raise self._disconnect_error(acknowledged=acknowledged)
                self.unread += data
        except TimeoutError as error:
            if not acknowledged:
                raise self._timeout_error() from error
            told = f"no word of its end within {timeout:g} s: the daemon goes on with it"
            raise RequestNotDone(told) from error
        except OSError as error:
            raise self._disconnect_error(acknowledged=acknowledged) from error
        line, _, self.unread = self.unread.partition(b"\n")
        try:
            return decode(line)
        except MalformedMessage as error:
            raise RequestNotDone("the daemon answers what nobody understands") from error

    def _timeout_error(self) -> NoDaemon:
        return NoDaemon(f"no daemon answers at {self.path} within {ACKNOWLEDGE_TIMEOUT:g} s")

    def _disconnect_error(self, *, acknowledged: bool) -> Exception:
        if acknowledged:
            return RequestNotDone(
                "the daemon ended before it was done: its log says what became of it"
            )
        return NoDaemon(f"no daemon answers: who served {self.path} is gone")
