"""The server of the control socket: authorises clients, and runs verbs.

1. Clients with the daemon's uid, and root, are authorised; the kernel supplies the uid. The mode
   of the file enforces the same rule, but an activated socket may be open to a group: a client
   that can connect is not yet authorised.
2. Every request is acknowledged before it takes effect (see protocol), and gets a reply.
3. Bounded: the size of a request, the time for it to arrive and for each line to be sent, and the
   number of connections; one more waits, since it may be root's.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import trio

from reconciled.control.connections import Connections
from reconciled.control.listening_sockets import Peer, peer_of
from reconciled.control.protocol import (
    LONGEST_REQUEST,
    ControlReply,
    ControlRequest,
    decode_request,
    encode,
    encode_reply,
)
from reconciled.core.errors import MalformedMessage, RequestRefused
from reconciled.observe.bound_log import BoundLog

CONNECTIONS = 256
# Seconds for a request to arrive, and for each line of the reply to be sent.
IO_TIMEOUT = 5.0


@attrs.frozen
class Verb:
    """A verb that clients can request.

    handler    runs it; gets the peer, and the arguments by name. Raises RequestRefused.
    arguments  the type of each argument; all are optional
    """

    handler: Callable[..., Awaitable[ControlReply]]
    arguments: Mapping[str, type] = attrs.Factory(dict)


@attrs.define(eq=False)
class ControlServer:
    """Serves the table of *verbs* to authorised clients."""

    verbs: Mapping[str, Verb]
    log: BoundLog
    allowed_uids: frozenset[int] = attrs.field(factory=lambda: frozenset({0, os.geteuid()}))
    connections: Connections = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.connections = Connections(
            "control socket", self.log, self._handle, CONNECTIONS, evict=False
        )

    async def _handle(self, stream: trio.SocketStream) -> None:
        peer = peer_of(stream.socket)
        if peer.uid not in self.allowed_uids:
            self.log.warning("control.refused", uid=peer.uid, pid=peer.pid)
            own = os.geteuid()
            text = f"uid {peer.uid} is not authorised: use root or uid {own}"
            await _send(stream, encode({"refused": text}))
            return
        try:
            line = await _read_line(stream)
            if line is None:
                return  # a client that only tested whether the socket is served
            request = decode_request(line)
            verb = self._verb(request)
        except (MalformedMessage, RequestRefused) as error:
            await _send(stream, encode({"refused": str(error)}))
            return
        accepted = encode({"accepted": request.verb, "pid": os.getpid()})
        # If this fails, the request is dropped: its sender may have ended long ago.
        await _send(stream, accepted)
        self.log.info("control.accepted", verb=request.verb, uid=peer.uid, pid=peer.pid)
        await _send(stream, await self._answer(verb, peer, request.arguments))

    def _verb(self, request: ControlRequest) -> Verb:
        verb = self.verbs.get(request.verb)
        if verb is None:
            known = ", ".join(sorted(self.verbs))
            raise RequestRefused(f"unknown verb {request.verb}: use one of {known}")
        for name, value in request.arguments.items():
            if type(value) is not verb.arguments.get(name):
                raise RequestRefused(f"{request.verb} does not accept {name}={value!r}")
        return verb

    async def _answer(self, verb: Verb, peer: Peer, arguments: Mapping[str, Any]) -> bytes:
        try:
            return encode_reply(await verb.handler(peer, **arguments))
        except RequestRefused as error:
            return encode({"refused": str(error)})


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    """The first line; None: the client closed, or was too slow. Raises MalformedMessage."""
    data = b""
    with trio.move_on_after(IO_TIMEOUT):
        while b"\n" not in data and len(data) <= LONGEST_REQUEST:
            received = await stream.receive_some(LONGEST_REQUEST)
            if not received:
                return None
            data += received
    if len(data) > LONGEST_REQUEST:
        raise MalformedMessage(f"the request is longer than {LONGEST_REQUEST} bytes")
    line, newline, _ = data.partition(b"\n")
    return line if newline else None


async def _send(stream: trio.SocketStream, line: bytes) -> None:
    with trio.move_on_after(IO_TIMEOUT) as scope:
        await stream.send_all(line)
    if scope.cancelled_caught:
        raise trio.BrokenResourceError("the client does not read its reply")
