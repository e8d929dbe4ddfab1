"""Health over HTTP: ``/livez``, the event loop responds, and ``/readyz``, the daemon does its work.

Small on purpose, and bounded: GET and HEAD alone, no body is read, a request has a few seconds to
arrive, and when too many connections are open, the oldest is closed. That is a slow client, since
a response takes no time: a flood of connections does not keep a probe from its response (case R4).

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
# Seconds for a whole request, also for the next one on the same connection.
REQUEST_TIMEOUT = 5.0
# Bytes of a request's first line and headers.
LONGEST_HEAD = 16 * 1024
# What is still read of a request after its response, in seconds and in bytes.
LINGER = 1.0
LONGEST_REST = 1 << 20
_METHODS = (b"GET", b"HEAD")
_NO_METRICS = "/metrics is not built yet in this version: use /livez or /readyz\n"


@attrs.frozen
class Response:
    """The response to one request."""

    status: int
    text: str
    headers: tuple[tuple[str, str], ...] = ()


@attrs.define(eq=False)
class Health:
    """Serves HTTP. *unready_reasons* returns why the daemon is not ready; empty: it is ready."""

    log: BoundLog
    unready_reasons: Callable[[], list[str]]
    connections: Connections = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.connections = Connections("http", self.log, self._handle, CONNECTIONS, evict=True)

    def respond(self, method: bytes, target: bytes) -> Response:
        """The response to one request."""
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
        return Response(404, "not found: use /livez or /readyz\n")

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
                    http, stream, Response(408, f"no request within {REQUEST_TIMEOUT:g} s\n")
                )
                return
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint
                await _refuse(http, stream, Response(status, "malformed HTTP request\n"))
                return
            if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
                await _close_gracefully(stream)
                return
            http.start_next_cycle()

    async def _answer(
        self, http: h11.Connection, stream: trio.SocketStream, request: h11.Request
    ) -> None:
        page = self.respond(request.method, request.target)
        # A request with a body ends the connection: a client could use it to keep the daemon busy.
        keep = isinstance(http.next_event(), h11.EndOfMessage)
        body = page.text if request.method != b"HEAD" else ""
        await _send(http, stream, page, body, keep=keep)


_READY = Response(200, "ready\n")


async def _request(http: h11.Connection, stream: trio.SocketStream) -> h11.Request | None:
    """The next request; None: the client closed the connection. Raises RemoteProtocolError."""
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
    """Send *page* and close, if a response can still be sent."""
    if http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    with trio.move_on_after(REQUEST_TIMEOUT):
        await _send(http, stream, page, page.text, keep=False)
        await _close_gracefully(stream)


async def _close_gracefully(stream: trio.SocketStream) -> None:
    """Let the response arrive: a close with unread data would discard it."""
    with trio.move_on_after(LINGER):
        await stream.send_eof()
        for _ in range(LONGEST_REST // LONGEST_HEAD):
            if not await stream.receive_some(LONGEST_HEAD):
                return
