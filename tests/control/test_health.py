"""Health over HTTP: replies, malformed requests, and limits for each client (R4)."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import attrs
import pytest
import structlog
import trio
import trio.testing

from reconciled.control import health
from reconciled.control.health import CONNECTIONS, LONGEST_HEAD, Health


@attrs.define(eq=False)
class Site:
    """A server at a free port, and the reasons why it is not ready."""

    port: int
    health: Health
    reasons: list[str]

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def get(self, target: str, method: str = "GET") -> tuple[int, str]:
        """Status and body of one request."""
        async with await self.connect() as stream:
            request = f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            await stream.send_all(request.encode())
            return _parsed(await rest_of(stream))


def _parsed(data: bytes) -> tuple[int, str]:
    head, _, body = data.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


async def rest_of(stream: trio.SocketStream) -> bytes:
    return b"".join([part async for part in stream])


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    reasons: list[str] = []
    made = Health(structlog.get_logger(), lambda: reasons)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listener.socket.getsockname()[1]
    # The listener is closed after accept() has ended.
    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(made.connections.accept, listener, nursery)
        yield Site(port, made, reasons)
        nursery.cancel_scope.cancel(reason="the test is over")


async def test_alive_and_ready(site: Site) -> None:
    """/livez is 200 while the loop runs; /readyz is 503 with each reason, else 200."""
    assert await site.get("/livez") == (200, "ok\n")
    assert await site.get("/readyz?verbose") == (200, "ready\n")
    site.reasons += ["starting: one", "paused: two"]
    assert await site.get("/livez") == (200, "ok\n")
    assert await site.get("/readyz") == (503, "starting: one\npaused: two\n")


@pytest.mark.parametrize(
    ("method", "target", "status", "part"),
    [
        ("GET", "/metrics", 404, "/metrics is not built yet in this version"),
        ("GET", "/", 404, "not found: use /livez or /readyz"),
        ("GET", "/livez/x", 404, "not found: use /livez or /readyz"),
        ("POST", "/livez", 405, "GET and HEAD only"),
        ("DELETE", "/nowhere", 405, "GET and HEAD only"),
    ],
)
async def test_unknown_targets_and_methods(
    site: Site, method: str, target: str, status: int, part: str
) -> None:
    """A target that does not exist, or not yet, and a wrong method get a reason."""
    code, body = await site.get(target, method)
    assert (code, part in body) == (status, True)


async def test_head_has_no_body(site: Site) -> None:
    """HEAD has the status and the headers of GET."""
    site.reasons.append("starting")
    async with await site.connect() as stream:
        await stream.send_all(b"HEAD /readyz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        data = await rest_of(stream)
    assert data.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"content-length: 9\r\n" in data
    assert data.endswith(b"\r\n\r\n")


async def test_a_connection_serves_many_requests(site: Site) -> None:
    """One connection serves several requests, also pipelined ones."""
    async with await site.connect() as stream:
        for _ in range(3):
            await stream.send_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await stream.receive_some()).endswith(b"\r\n\r\nok\n")
        await stream.send_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
        await stream.send_eof()
        assert (await rest_of(stream)).count(b"200 OK") == 3


async def test_a_client_of_http_1_0(site: Site) -> None:
    """A request of HTTP/1.0 without a host, as simple probes send it, is served."""
    async with await site.connect() as stream:
        await stream.send_all(b"GET /livez HTTP/1.0\r\n\r\n")
        assert _parsed(await rest_of(stream)) == (200, "ok\n")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00" + b"\x00" * 200 + b"\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\n\r\n", 400),  # without a host
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"x" * LONGEST_HEAD * 4 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2000000000\r\n\r\n" + b"x" * 70000, 405),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\ntransfer-encoding: odd\r\n\r\n", 501),
    ],
)
async def test_r04_a_bad_request_gets_an_error(site: Site, sent: bytes, status: int) -> None:
    """R4: malformed data, a huge header or a huge body gets an error, and a disconnect."""
    async with await site.connect() as stream:
        await stream.send_all(sent)
        with trio.fail_after(5):
            await stream.send_eof()
            code, _ = _parsed(await rest_of(stream))
    assert code == status
    assert await site.get("/livez") == (200, "ok\n")


async def test_r04_a_slow_request_times_out(
    site: Site, autojump_clock: trio.testing.MockClock
) -> None:
    """R4: a request that is incomplete after 5 s gets 408; a silent client is disconnected."""
    began = trio.current_time()
    async with (
        await site.connect() as silent,
        await site.connect() as slow,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(_drip, slow)
        assert await rest_of(silent) == b""
        assert trio.current_time() - began == pytest.approx(health.REQUEST_TIMEOUT)
        assert _parsed(await rest_of(slow))[0] == 408
        nursery.cancel_scope.cancel(reason="answered")
    assert trio.current_time() - began <= health.REQUEST_TIMEOUT + health.LINGER + 0.1


async def _drip(stream: trio.SocketStream) -> None:
    for byte in b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 100:
        await stream.send_all(bytes([byte]))
        await trio.sleep(1)


async def test_r04_a_flood_does_not_block_other_clients(site: Site) -> None:
    """R4: above the limit the oldest connection is closed, and a new request is served."""
    streams: list[Any] = []
    try:
        for _ in range(CONNECTIONS + 50):
            streams.append(await site.connect())
            await streams[-1].send_all(b"GET /livez")
        with trio.fail_after(5):
            assert await site.get("/livez") == (200, "ok\n")
        assert site.health.connections.count <= CONNECTIONS
        with trio.fail_after(5):  # the oldest was closed
            assert await streams[0].receive_some() == b""
    finally:
        for stream in streams:
            await trio.aclose_forcefully(stream)
