"""The control socket's server: who may ask, what may be asked, and the answer.

1. Whoever has the uid of the daemon or is root may ask; the kernel says who it is. The mode of
   the file is the same rule once more, and an activated socket may be open to a group: to
   connect is not yet to be heard.
2. Every request is acknowledged before it takes effect (see protocol), and has an answer.
3. Bounded: the size of a request, the time it may take to arrive and to be answered to, and the
   number of connections; one more waits, as it may be root who needs it.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import trio

from reconciled.control.addresses import Peer, peer_of
from reconciled.control.connections import Connections
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
# For a request to arrive, and for each line to be taken.
IO_TIMEOUT = 5.0


@attrs.frozen
class Verb:
    """What may be asked.

    act        does it; gets who asks, and the arguments by their names. Raises Refused.
    arguments  the type of each argument; none is needed
    """

    handler: Callable[..., Awaitable[ControlReply]]
    arguments: Mapping[str, type] = attrs.Factory(dict)


@attrs.define(eq=False)
class ControlServer:
    """Serves the table of *verbs* to those who may ask."""

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
            mine = os.geteuid()
            text = f"only root and uid {mine} may ask this daemon, you are uid {peer.uid}"
            await _send(stream, encode({"refused": text}))
            return
        try:
            line = await _read_line(stream)
            if line is None:
                return  # somebody who only looked whether we are here
            request = decode_request(line)
            verb = self._verb(request)
        except (MalformedMessage, RequestRefused) as error:
            await _send(stream, encode({"refused": str(error)}))
            return
        accepted = encode({"accepted": request.verb, "pid": os.getpid()})
        # Where it cannot be sent nothing is done: whoever asked is gone, it may be since long.
        await _send(stream, accepted)
        self.log.info("control.accepted", verb=request.verb, uid=peer.uid, pid=peer.pid)
        await _send(stream, await self._answer(verb, peer, request.arguments))

    def _verb(self, request: ControlRequest) -> Verb:
        verb = self.verbs.get(request.verb)
        if verb is None:
            known = ", ".join(sorted(self.verbs))
            raise RequestRefused(f"this daemon does not know {request.verb}: it knows {known}")
        for name, value in request.arguments.items():
            if type(value) is not verb.arguments.get(name):
                raise RequestRefused(f"{request.verb} does not take {name}={value!r}")
        return verb

    async def _answer(self, verb: Verb, peer: Peer, arguments: Mapping[str, Any]) -> bytes:
        try:
            return encode_reply(await verb.handler(peer, **arguments))
        except RequestRefused as error:
            return encode({"refused": str(error)})


async def _read_line(stream: trio.SocketStream) -> bytes | None:
    """The first line; None where the other end leaves, or takes too long. Raises Malformed."""
    data = b""
    with trio.move_on_after(IO_TIMEOUT):
        while b"\n" not in data and len(data) <= LONGEST_REQUEST:
            received = await stream.receive_some(LONGEST_REQUEST)
            if not received:
                return None
            data += received
    if len(data) > LONGEST_REQUEST:
        raise MalformedMessage(f"a request has {LONGEST_REQUEST} bytes at most")
    line, newline, _ = data.partition(b"\n")
    return line if newline else None


async def _send(stream: trio.SocketStream, line: bytes) -> None:
    with trio.move_on_after(IO_TIMEOUT) as scope:
        await stream.send_all(line)
    if scope.cancelled_caught:
        raise trio.BrokenResourceError("nobody takes the answer")
