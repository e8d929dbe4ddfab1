"""Health over HTTP: ``/livez``, that the loop answers, and ``/readyz``, that work is done.

Small on purpose, and bounded: GET and HEAD alone, no body is read, a few seconds for a request
to arrive, and when too many connections are open the oldest goes, which is one that dawdles:
an answer takes no time. So whoever floods it keeps no probe from its answer (case R4).

Only a daemon whose configuration has ``http.listen`` imports this, and h11 with it.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

import attrs
import h11
import trio

from reconciled.control.connections import Connections
from reconciled.observe.bound_log import BoundLog

CONNECTIONS = 128
# For a whole request, also the next one on the same connection.
REQUEST_TIMEOUT = 5.0
# Of its first line and its headers.
LONGEST_HEAD = 16 * 1024
# What is still taken of a request that was answered already, in seconds and in bytes.
LINGER = 1.0
LONGEST_REST = 1 << 20
_METHODS = (b"GET", b"HEAD")
_NO_METRICS = "/metrics is not built yet in this version: there are /livez and /readyz\n"


@attrs.frozen
class Response:
    """What is answered."""

    status: int
    text: str
    headers: tuple[tuple[str, str], ...] = ()


@attrs.define(eq=False)
class Health:
    """Answers over HTTP. *unready* gives the reasons why the daemon is not ready; none: it is."""

    log: BoundLog
    unready_reasons: Callable[[], list[str]]
    connections: Connections = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.connections = Connections("http", self.log, self._handle, CONNECTIONS, evict=True)

    def respond(self, method: bytes, target: bytes) -> Response:
        """The answer to one request."""
        if method not in _METHODS:
            return Response(405, "GET and HEAD only\n", (("allow", "GET, HEAD"),))
        path = target.partition(b"?")[0]
        if path == b"/livez":
            return Response(200, "ok\n")
        if path == b"/readyz":
            reasons = self.unready_reasons()
            return Response(503, "".join(f"{each}\n" for each in reasons)) if reasons else _READY
        if path == b"/metrics":
            return Response(404, _NO_METRICS)
        return Response(404, "there are /livez and /readyz\n")

    async def _handle(self, stream: trio.SocketStream) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=LONGEST_HEAD)
        while True:
            try:
                with trio.fail_after(REQUEST_TIMEOUT):
                    request = await _request(http, stream)
                    if request is None:
                        return
                    await self._answer(http, stream, request)
            except trio.TooSlowError:
                if http.their_state is h11.IDLE and not http.trailing_data[0]:
                    return  # between two requests
                await _refuse(
                    http, stream, Response(408, f"a request takes {REQUEST_TIMEOUT:g} s at most\n")
                )
                return
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint
                await _refuse(
                    http, stream, Response(status, "that is no request that is taken here\n")
                )
                return
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                await _close_gracefully(stream)
                return
            http.start_next_cycle()

    async def _answer(
        self, http: h11.Connection, stream: trio.SocketStream, request: h11.Request
    ) -> None:
        page = self.respond(request.method, request.target)
        # What has a body ends the connection: reading it would only be a way to be kept busy.
        keep = isinstance(http.next_event(), h11.EndOfMessage)
        body = page.text if request.method != b"HEAD" else ""
        await _send(http, stream, page, body, keep=keep)


_READY = Response(200, "ready\n")


async def _request(http: h11.Connection, stream: trio.SocketStream) -> h11.Request | None:
    """The next request; None where the other end leaves. Raises RemoteProtocolError."""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await stream.receive_some(LONGEST_HEAD))
        elif isinstance(event, h11.Request):
            return event
        else:
            return None


async def _send(
    http: h11.Connection, stream: trio.SocketStream, page: Response, body: str, *, keep: bool
) -> None:
    headers = [
        ("content-type", "text/plain; charset=utf-8"),
        ("content-length", str(len(page.text.encode()))),
        ("cache-control", "no-store"),
        *page.headers,
    ]
    if not keep:
        headers.append(("connection", "close"))
    reason = HTTPStatus(page.status).phrase.encode()
    head = http.send(h11.Response(status_code=page.status, headers=headers, reason=reason)) or b""
    data = (http.send(h11.Data(body.encode())) or b"") if body else b""
    await stream.send_all(head + data + (http.send(h11.EndOfMessage()) or b""))


async def _refuse(http: h11.Connection, stream: trio.SocketStream, page: Response) -> None:
    """Say why this connection ends, where it can still be said."""
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    with trio.move_on_after(REQUEST_TIMEOUT):
        await _send(http, stream, page, page.text, keep=False)
        await _close_gracefully(stream)


async def _close_gracefully(stream: trio.SocketStream) -> None:
    """Let the answer arrive: to close with something unread would take it back."""
    with trio.move_on_after(LINGER):
        await stream.send_eof()
        for _ in range(LONGEST_REST // LONGEST_HEAD):
            if not await stream.receive_some(LONGEST_HEAD):
                return
