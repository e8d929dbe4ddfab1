"""The control socket, server and client: authorisation, limits, replies and errors."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciled.control import client, connections, server
from reconciled.control.client import send_request
from reconciled.control.listening_sockets import open_control
from reconciled.control.protocol import LONGEST_REQUEST, ControlReply, ControlRequest
from reconciled.control.server import ControlServer, Verb
from reconciled.core.errors import NoDaemon, RequestNotDone, RequestRefused


@attrs.define(eq=False)
class Harness:
    """A server at a path, and the calls of its verbs."""

    path: Path
    server: ControlServer
    calls: list[Any]
    go_on: trio.Event
    third: trio.Event
    log: Any

    async def connect(self) -> trio.SocketStream:
        return await trio.open_unix_socket(str(self.path))

    async def lines(self, sent: bytes) -> list[dict[str, Any]]:
        """The lines of the reply to *sent*, until the server closes the connection."""
        with trio.fail_after(server.IO_TIMEOUT / 2):  # at once, not after its timeout
            async with await self.connect() as stream:
                await stream.send_all(sent)
                data = b"".join([part async for part in stream])
        return [json.loads(line) for line in data.splitlines()]

    async def request(self, verb: str, **arguments: Any) -> ControlReply:
        """Send a request with the client of the verbs."""
        return await trio.to_thread.run_sync(
            send_request, self.path, ControlRequest(verb, arguments)
        )


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with serving(tmp_path / "s") as made:
        yield made


@asynccontextmanager
async def serving(path: Path, trusted: frozenset[int] | None = None) -> AsyncIterator[Harness]:
    calls: list[Any] = []
    go_on, third = trio.Event(), trio.Event()

    async def probe(_: Any, *, loudly: bool = False) -> ControlReply:
        calls.append(loudly)
        return ControlReply(78, ("one", "two"))

    async def wait(_: Any) -> ControlReply:
        calls.append("wait")
        if calls.count("wait") == 3:
            third.set()
        await go_on.wait()
        return ControlReply(0, ("done",))

    async def refuse(_: Any) -> ControlReply:
        raise RequestRefused("not now")

    async def fail(_: Any) -> ControlReply:
        raise ZeroDivisionError

    async def much(_: Any) -> ControlReply:
        return ControlReply(1, tuple(f"{number:<1000}" for number in range(2000)))

    verbs = {
        "probe": Verb(probe, {"loudly": bool}),
        "wait": Verb(wait),
        "refuse": Verb(refuse),
        "fail": Verb(fail),
        "much": Verb(much),
    }
    with structlog.testing.capture_logs() as log:
        made = ControlServer(verbs, structlog.get_logger())
        if trusted is not None:
            made.allowed_uids = trusted
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(open_control(path)))
        # The listener is closed after accept() has ended, so that the failure of a test is the
        # only exception that it raises.
        async with listener, trio.open_nursery() as nursery:
            nursery.start_soon(made.connections.accept, listener, nursery)
            yield Harness(path, made, calls, go_on, third, log)
            nursery.cancel_scope.cancel(reason="the test is over")


# -- requests and replies ------------------------------------------------------------------------


async def test_an_acknowledgement_comes_before_the_effect(harness: Harness) -> None:
    """The acknowledgement is sent at once, the reply when the verb is done."""
    async with await harness.connect() as stream:
        await stream.send_all(b'{"verb": "wait"}\n')
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(stream.socket)
        first = json.loads(await stream.receive_some())
        assert first["accepted"] == "wait"
        await trio.testing.wait_all_tasks_blocked()
        assert harness.calls == ["wait"]
        harness.go_on.set()
        assert json.loads(await stream.receive_some()) == {"code": 0, "lines": ["done"]}


async def test_a_reply_has_code_and_lines(harness: Harness) -> None:
    """Arguments reach the verb, and its code and lines reach the client, unchanged."""
    assert await harness.request("probe", loudly=True) == ControlReply(78, ("one", "two"))
    assert await harness.request("probe") == ControlReply(78, ("one", "two"))
    assert harness.calls == [True, False]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            ControlRequest("sing"),
            "unknown verb sing: use one of fail, much, probe, refuse,",
        ),
        (ControlRequest("probe", {"loudly": 1}), "probe does not accept loudly=1"),
        (ControlRequest("probe", {"softly": True}), "probe does not accept softly=True"),
        (ControlRequest("refuse"), "not now"),
    ],
)
async def test_a_refusal_has_a_reason(harness: Harness, request_: ControlRequest, why: str) -> None:
    """An unknown verb, a wrong argument or a refusing verb has no effect and gives a reason."""
    with pytest.raises(RequestNotDone, match=why):
        await trio.to_thread.run_sync(send_request, harness.path, request_)
    assert harness.calls == []


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"reload\n", "invalid JSON"),
        (b"[1]\n", "the JSON is not a mapping"),
        (b'{"now": true}\n', "the request has no verb"),
        (b"[" * 4000 + b"\n", "invalid JSON"),
        (b"\xff\xfe\n", "invalid JSON"),
        (b"x" * (LONGEST_REQUEST + 1), "longer than 4096 bytes"),
    ],
)
async def test_a_malformed_request_is_refused(harness: Harness, sent: bytes, why: str) -> None:
    """Malformed data of any size is refused with a reason; the next request is served."""
    (line,) = await harness.lines(sent)
    assert why in line["refused"]
    assert (await harness.request("probe")).code == 78


async def test_a_long_reply_is_cut(harness: Harness) -> None:
    """A reply has a bounded size; lines left out are counted."""
    answer = await harness.request("much")
    assert 300 < len(answer.lines) < 1000
    assert answer.lines[-1] == f"… and {2000 - len(answer.lines) + 1} more: the log has them"


async def test_a_verb_that_raises_ends_its_own_connection(harness: Harness) -> None:
    """A verb that raises ends its own connection and is logged; others are served."""
    with pytest.raises(RequestNotDone, match="closed the connection before it was done"):
        await harness.request("fail")
    assert [line["event"] for line in harness.log if line["log_level"] == "error"] == [
        "control.failed"
    ]
    assert (await harness.request("probe")).code == 78


# -- authorisation ---------------------------------------------------------------------------------


async def test_an_unauthorised_client_is_refused(tmp_path: Path) -> None:
    """A client that is neither root nor the daemon's user is refused unread, and logged."""
    async with serving(tmp_path / "s", trusted=frozenset({12345})) as harness:
        with pytest.raises(RequestNotDone, match="is not authorised: use root or uid"):
            await harness.request("probe")
        assert harness.calls == []
        assert [line["event"] for line in harness.log] == ["control.refused"]


def test_root_and_the_daemons_user_are_authorised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server authorises root and its own user, and no other uid."""
    monkeypatch.setattr(server.os, "geteuid", lambda: 995)
    assert ControlServer({}, structlog.get_logger()).allowed_uids == {0, 995}


# -- dropped requests ----------------------------------------------------------------------------


async def test_a_request_of_a_disconnected_client_is_dropped(tmp_path: Path) -> None:
    """A request whose sender has disconnected before it was read has no effect."""
    path = tmp_path / "s"
    async with serving(path) as first:
        first.server.connections.limit = 0  # it accepts no connection, like a daemon that has ended
        with socket.socket(socket.AF_UNIX) as sender:
            sender.connect(str(path))
            sender.sendall(b'{"verb": "probe"}\n')
        await trio.testing.wait_all_tasks_blocked()
        first.server.connections.limit = 10
        first.server.connections._ended.set()
        assert (await first.request("probe", loudly=True)).code == 78
        assert first.calls == [True]


async def test_a_silent_client_is_disconnected(
    harness: Harness, autojump_clock: trio.testing.MockClock
) -> None:
    """A connection without a complete request is closed after 5 s."""
    for sent in (b"", b'{"verb":'):
        began = trio.current_time()
        async with await harness.connect() as stream:
            if sent:
                await stream.send_all(sent)
            assert await stream.receive_some() == b""
        assert trio.current_time() - began == pytest.approx(server.IO_TIMEOUT)
    assert harness.log == []


async def test_a_connection_above_the_limit_waits(harness: Harness) -> None:
    """No client is disconnected for another: the next one is served when one has ended."""
    harness.server.connections.limit = 3
    answers: list[ControlReply] = []

    async def one() -> None:
        answers.append(await harness.request("wait"))

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(one)
        with trio.fail_after(10):
            await harness.third.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert harness.server.connections.count == 3
        harness.go_on.set()
    assert answers == [ControlReply(0, ("done",))] * 12


async def test_accepting_pauses_without_descriptors(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its descriptor limit logs it, pauses accepting, and then continues."""
    monkeypatch.setattr(connections, "PAUSE", 0.01)
    real, failures = trio.SocketListener.accept, 3

    async def accept(self: trio.SocketListener) -> trio.SocketStream:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(self)

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    assert (await harness.request("probe")).code == 78  # by the accept() already waiting
    assert (await harness.request("probe")).code == 78
    assert [line["event"] for line in harness.log if line["log_level"] == "warning"] == [
        "control.exhausted"
    ] * 3


# -- random input -------------------------------------------------------------------------------

WORDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
REQUESTS = st.builds(
    lambda verb, arguments: json.dumps({**arguments, "verb": verb}).encode() + b"\n",
    st.sampled_from(["probe", "sing", "\ud800"]) | WORDS,
    st.dictionaries(st.sampled_from(["loudly", "self", "peer", "verb", "_"]), WORDS, max_size=3),
)
SENT = st.lists(
    st.binary(max_size=60) | REQUESTS | st.builds(lambda data, n: data * n, st.binary(min_size=1),
    st.integers(1, 3 * LONGEST_REQUEST)), max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(parts=SENT, leaves=st.sampled_from(["open", "shuts", "closes"]))
def test_any_bytes_get_at_most_two_lines(parts: list[bytes], leaves: str) -> None:
    """Any bytes, and a disconnect at any time, get at most two lines, each a mapping.

    A verb runs only for a complete request; no fault is logged.
    """
    calls: list[bool] = []

    async def probe(_: Any, *, loudly: bool = False) -> ControlReply:
        calls.append(loudly)
        return ControlReply(0)

    async def converse() -> bytes:
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        theirs.settimeout(0)
        made = ControlServer({"probe": Verb(probe, {"loudly": bool})}, structlog.get_logger())
        for part in parts:
            with contextlib.suppress(BlockingIOError):
                theirs.send(part)
        if leaves == "shuts":
            theirs.shutdown(socket.SHUT_WR)
        elif leaves == "closes":
            theirs.close()
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        await made.connections._serve(stream, trio.CancelScope())
        assert ours.fileno() == -1
        with contextlib.closing(theirs), contextlib.suppress(ConnectionResetError):
            return b"" if leaves == "closes" else theirs.recv(1 << 20)
        return b""

    with structlog.testing.capture_logs() as log:
        received = trio.run(converse, clock=trio.testing.MockClock(autojump_threshold=0))
    lines = [json.loads(line) for line in received.splitlines()]
    assert {line["event"] for line in log} <= {"control.accepted"}
    assert len(lines) <= 2
    assert all(isinstance(line, dict) for line in lines)
    assert len(calls) == len(log) <= 1
    assert all(type(each) is bool for each in calls)


# -- the client --------------------------------------------------------------------------------


def test_an_unserved_socket_is_reported_as_no_daemon(tmp_path: Path) -> None:
    """A missing or unserved socket is reported at once, with its path."""
    path = tmp_path / "s"
    with pytest.raises(NoDaemon, match=f"{path} does not exist"):
        send_request(path, ControlRequest("probe"))
    open_control(path).close()
    with pytest.raises(NoDaemon, match=f"no process serves {path}"):
        send_request(path, ControlRequest("probe"))


def test_a_refusal_that_precedes_the_request_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses and closes before the request is sent is not reported as absent."""
    path = tmp_path / "s"
    encode_request = client.encode_request
    with open_control(path) as listener:

        def refuse_first(request: ControlRequest) -> bytes:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"refused": "uid 1000 is not authorised"}\n')
            return encode_request(request)

        listener.settimeout(5)
        monkeypatch.setattr(client, "encode_request", refuse_first)
        with pytest.raises(RequestNotDone, match="uid 1000 is not authorised"):
            send_request(path, ControlRequest("probe"))


@pytest.mark.parametrize("queue", ["empty", "full"])
def test_a_kept_socket_without_a_daemon_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    """A kept socket that no daemon serves is reported after the timeout, which is named.

    The same holds if its queue is full and the connection itself waits.
    """
    monkeypatch.setattr(client, "ACKNOWLEDGE_TIMEOUT", 0.3)
    path = tmp_path / "s"
    with open_control(path) as kept, socket.socket(socket.AF_UNIX) as other:
        if queue == "full":
            kept.listen(0)
            other.connect(str(path))
        with pytest.raises(NoDaemon, match=r"no daemon answers at .* within 0.3 s"):
            send_request(path, ControlRequest("probe"))


async def test_a_late_reply_times_out(harness: Harness) -> None:
    """After the acknowledgement the reply has a timeout, whose end is reported."""
    with pytest.raises(
        RequestNotDone, match=r"no reply within 0.05 s: the daemon is still working"
    ):
        await trio.to_thread.run_sync(send_request, harness.path, ControlRequest("wait"), 0.05)


@pytest.mark.parametrize(
    ("received", "error", "why"),
    [
        (b"", NoDaemon, "was closed without a reply"),
        (b"hello\n", RequestNotDone, "malformed response"),
        (b'{"odd": 1}\n', RequestNotDone, "malformed response"),
        (b'{"accepted": "probe"}\n', RequestNotDone, "closed the connection before it was done"),
        (b'{"accepted": "probe"}\n{"code": "x"}\n', RequestNotDone, "malformed response"),
        (b'{"accepted": "probe"}\n{"code": 1e999}\n', RequestNotDone, "malformed response"),
        (b'{"accepted": "probe"}\n{"code": 0, "new": 1}\n', None, ""),
    ],
)
async def test_replies_of_another_version(
    tmp_path: Path, received: bytes, error: type[Exception] | None, why: str
) -> None:
    """Unknown fields of a reply are ignored; a malformed reply is an error with a reason."""
    path = tmp_path / "s"
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(open_control(path)))
    outcome: list[Any] = []

    async def request() -> None:
        try:
            outcome.append(
                await trio.to_thread.run_sync(send_request, path, ControlRequest("probe"))
            )
        except (NoDaemon, RequestNotDone) as raised:
            outcome.append(raised)

    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(request)
        async with await listener.accept() as stream:
            await stream.receive_some()
            if received:
                await stream.send_all(received)
    if error is None:
        assert outcome == [ControlReply(0)]
    else:
        with pytest.raises(error, match=why):
            raise outcome[0]
