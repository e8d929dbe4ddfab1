"""The control socket, both sides: who is answered, what is bounded, and when nothing is done."""

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
class Desk:
    """A server at a path, and what its verbs were asked for."""

    path: Path
    server: ControlServer
    asked: list[Any]
    go_on: trio.Event
    third: trio.Event
    log: Any

    async def connect(self) -> trio.SocketStream:
        return await trio.open_unix_socket(str(self.path))

    async def lines(self, sent: bytes) -> list[dict[str, Any]]:
        """What is answered to *sent*, until the server has nothing more to say."""
        with trio.fail_after(server.IO_TIMEOUT / 2):  # at once, and not at the end of its patience
            async with await self.connect() as stream:
                await stream.send_all(sent)
                data = b"".join([part async for part in stream])
        return [json.loads(line) for line in data.splitlines()]

    async def ask(self, verb: str, **arguments: Any) -> ControlReply:
        """As a command asks."""
        return await trio.to_thread.run_sync(
            send_request, self.path, ControlRequest(verb, arguments)
        )


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with serving(tmp_path / "s") as made:
        yield made


@asynccontextmanager
async def serving(path: Path, trusted: frozenset[int] | None = None) -> AsyncIterator[Desk]:
    asked: list[Any] = []
    go_on, third = trio.Event(), trio.Event()

    async def tell(_: Any, *, loudly: bool = False) -> ControlReply:
        asked.append(loudly)
        return ControlReply(78, ("one", "two"))

    async def wait(_: Any) -> ControlReply:
        asked.append("wait")
        if asked.count("wait") == 3:
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
        "tell": Verb(tell, {"loudly": bool}),
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
            yield Desk(path, made, asked, go_on, third, log)
            nursery.cancel_scope.cancel(reason="the test is over")


# -- what is asked and answered ----------------------------------------------------------------


async def test_an_acknowledgement_comes_before_the_effect(desk: Desk) -> None:
    """Accepted at once, the answer when it is done."""
    async with await desk.connect() as stream:
        await stream.send_all(b'{"verb": "wait"}\n')
        with trio.fail_after(5):
            await trio.lowlevel.wait_readable(stream.socket)
        first = json.loads(await stream.receive_some())
        assert first["accepted"] == "wait"
        await trio.testing.wait_all_tasks_blocked()
        assert desk.asked == ["wait"]
        desk.go_on.set()
        assert json.loads(await stream.receive_some()) == {"code": 0, "lines": ["done"]}


async def test_a_command_gets_code_and_lines(desk: Desk) -> None:
    """What a verb answers arrives as it was given, and arguments as they were meant."""
    assert await desk.ask("tell", loudly=True) == ControlReply(78, ("one", "two"))
    assert await desk.ask("tell") == ControlReply(78, ("one", "two"))
    assert desk.asked == [True, False]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            ControlRequest("sing"),
            "unknown verb sing: use one of fail, much, refuse, tell,",
        ),
        (ControlRequest("tell", {"loudly": 1}), "tell does not accept loudly=1"),
        (ControlRequest("tell", {"softly": True}), "tell does not accept softly=True"),
        (ControlRequest("refuse"), "not now"),
    ],
)
async def test_what_is_refused_says_why(desk: Desk, request_: ControlRequest, why: str) -> None:
    """An unknown verb, a wrong argument, a verb that will not: nothing is done, and why is told."""
    with pytest.raises(RequestNotDone, match=why):
        await trio.to_thread.run_sync(send_request, desk.path, request_)
    assert desk.asked == []


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
async def test_what_is_no_request(desk: Desk, sent: bytes, why: str) -> None:
    """Garbage of any kind and size is refused with a sentence; the next one is served."""
    (line,) = await desk.lines(sent)
    assert why in line["refused"]
    assert (await desk.ask("tell")).code == 78


async def test_a_long_answer_is_cut(desk: Desk) -> None:
    """An answer has a bounded size; what was left out is counted."""
    answer = await desk.ask("much")
    assert 300 < len(answer.lines) < 1000
    assert answer.lines[-1] == f"… and {2000 - len(answer.lines) + 1} more: the log has them"


async def test_a_fault_of_one_answer_harms_no_other(desk: Desk) -> None:
    """A verb that raises ends its own connection, with a line in the log; others go on."""
    with pytest.raises(RequestNotDone, match="closed the connection before it was done"):
        await desk.ask("fail")
    assert [line["event"] for line in desk.log if line["log_level"] == "error"] == [
        "control.failed"
    ]
    assert (await desk.ask("tell")).code == 78


# -- who may ask -------------------------------------------------------------------------------


async def test_others_are_not_answered(tmp_path: Path) -> None:
    """Neither root nor the daemon's own user: refused before a word is read, and logged."""
    async with serving(tmp_path / "s", trusted=frozenset({12345})) as desk:
        with pytest.raises(RequestNotDone, match="is not authorised: use root or uid"):
            await desk.ask("tell")
        assert desk.asked == []
        assert [line["event"] for line in desk.log] == ["control.refused"]


def test_root_and_the_own_user_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those two and nobody else."""
    monkeypatch.setattr(server.os, "geteuid", lambda: 995)
    assert ControlServer({}, structlog.get_logger()).allowed_uids == {0, 995}


# -- what is dropped ---------------------------------------------------------------------------


async def test_who_has_left_is_not_served(tmp_path: Path) -> None:
    """A request that waited for a dead daemon, whose sender has given up, has no effect."""
    path = tmp_path / "s"
    async with serving(path) as first:
        first.server.connections.limit = 0  # it hears nobody, as a dead one
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(path))
            gone.sendall(b'{"verb": "tell"}\n')
        await trio.testing.wait_all_tasks_blocked()
        first.server.connections.limit = 10
        first.server.connections._ended.set()
        assert (await first.ask("tell", loudly=True)).code == 78
        assert first.asked == [True]


async def test_who_says_nothing_is_dropped(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    """A connection without a request is closed after 5 s; half a request is none."""
    for sent in (b"", b'{"verb":'):
        began = trio.current_time()
        async with await desk.connect() as stream:
            if sent:
                await stream.send_all(sent)
            assert await stream.receive_some() == b""
        assert trio.current_time() - began == pytest.approx(server.IO_TIMEOUT)
    assert desk.log == []


async def test_one_more_than_the_limit_waits(desk: Desk) -> None:
    """Nobody who asks is thrown out for another: the next is served when one has ended."""
    desk.server.connections.limit = 3
    answers: list[ControlReply] = []

    async def one() -> None:
        answers.append(await desk.ask("wait"))

    async with trio.open_nursery() as nursery:
        for _ in range(12):
            nursery.start_soon(one)
        with trio.fail_after(10):
            await desk.third.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert desk.server.connections.count == 3
        desk.go_on.set()
    assert answers == [ControlReply(0, ("done",))] * 12


async def test_without_descriptors_it_goes_on_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process at its limit takes in nobody for a while, says so, and then goes on."""
    monkeypatch.setattr(connections, "PAUSE", 0.01)
    real, failures = trio.SocketListener.accept, 3

    async def accept(self: trio.SocketListener) -> trio.SocketStream:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await real(self)

    monkeypatch.setattr(trio.SocketListener, "accept", accept)
    assert (await desk.ask("tell")).code == 78  # by the accept() that was under way
    assert (await desk.ask("tell")).code == 78
    assert [line["event"] for line in desk.log if line["log_level"] == "warning"] == [
        "control.exhausted"
    ] * 3


# -- whatever comes -----------------------------------------------------------------------------

WORDS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
REQUESTS = st.builds(
    lambda verb, arguments: json.dumps({**arguments, "verb": verb}).encode() + b"\n",
    st.sampled_from(["tell", "sing", "\ud800"]) | WORDS,
    st.dictionaries(st.sampled_from(["loudly", "self", "peer", "verb", "_"]), WORDS, max_size=3),
)
SENT = st.lists(
    st.binary(max_size=60) | REQUESTS | st.builds(lambda data, n: data * n, st.binary(min_size=1),
    st.integers(1, 3 * LONGEST_REQUEST)), max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(parts=SENT, leaves=st.sampled_from(["stays", "shuts", "closes"]))
def test_whatever_is_sent(parts: list[bytes], leaves: str) -> None:
    """Any bytes, from whoever leaves at any time: at most two lines come back, each a mapping.

    A verb is carried out for a whole request alone; the log has no fault.
    """
    asked: list[bool] = []

    async def tell(_: Any, *, loudly: bool = False) -> ControlReply:
        asked.append(loudly)
        return ControlReply(0)

    async def converse() -> bytes:
        ours, theirs = socket.socketpair()
        ours.settimeout(0)
        theirs.settimeout(0)
        made = ControlServer({"tell": Verb(tell, {"loudly": bool})}, structlog.get_logger())
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
        said = trio.run(converse, clock=trio.testing.MockClock(autojump_threshold=0))
    lines = [json.loads(line) for line in said.splitlines()]
    assert {line["event"] for line in log} <= {"control.accepted"}
    assert len(lines) <= 2
    assert all(isinstance(line, dict) for line in lines)
    assert len(asked) == len(log) <= 1
    assert all(type(each) is bool for each in asked)


# -- the side of the commands ------------------------------------------------------------------


def test_no_daemon(tmp_path: Path) -> None:
    """No file, or one that nobody serves: said at once, with the path."""
    path = tmp_path / "s"
    with pytest.raises(NoDaemon, match=f"{path} does not exist"):
        send_request(path, ControlRequest("tell"))
    open_control(path).close()
    with pytest.raises(NoDaemon, match=f"no process serves {path}"):
        send_request(path, ControlRequest("tell"))


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
            send_request(path, ControlRequest("tell"))


@pytest.mark.parametrize("queue", ["empty", "full"])
def test_a_daemon_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: str) -> None:
    """A kept socket takes connections that nobody answers: no daemon, after the time that is told.

    Also where so many wait already that not even the connection is taken.
    """
    monkeypatch.setattr(client, "ACKNOWLEDGE_TIMEOUT", 0.3)
    path = tmp_path / "s"
    with open_control(path) as kept, socket.socket(socket.AF_UNIX) as other:
        if queue == "full":
            kept.listen(0)
            other.connect(str(path))
        with pytest.raises(NoDaemon, match=r"no daemon answers at .* within 0.3 s"):
            send_request(path, ControlRequest("tell"))


async def test_a_daemon_that_takes_long(desk: Desk) -> None:
    """After the acknowledgement the answer has a time of its own, and its end is told."""
    with pytest.raises(
        RequestNotDone, match=r"no reply within 0.05 s: the daemon is still working"
    ):
        await trio.to_thread.run_sync(send_request, desk.path, ControlRequest("wait"), 0.05)


@pytest.mark.parametrize(
    ("said", "error", "why"),
    [
        (b"", NoDaemon, "was closed without a reply"),
        (b"hello\n", RequestNotDone, "malformed response"),
        (b'{"odd": 1}\n', RequestNotDone, "malformed response"),
        (b'{"accepted": "tell"}\n', RequestNotDone, "closed the connection before it was done"),
        (b'{"accepted": "tell"}\n{"code": "x"}\n', RequestNotDone, "malformed response"),
        (b'{"accepted": "tell"}\n{"code": 1e999}\n', RequestNotDone, "malformed response"),
        (b'{"accepted": "tell"}\n{"code": 0, "new": 1}\n', None, ""),
    ],
)
async def test_answers_of_another_version(
    tmp_path: Path, said: bytes, error: type[Exception] | None, why: str
) -> None:
    """What is new in an answer is passed over; what is none is told, never a traceback."""
    path = tmp_path / "s"
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(open_control(path)))
    outcome: list[Any] = []

    async def asks() -> None:
        try:
            outcome.append(
                await trio.to_thread.run_sync(send_request, path, ControlRequest("tell"))
            )
        except (NoDaemon, RequestNotDone) as raised:
            outcome.append(raised)

    async with listener, trio.open_nursery() as nursery:
        nursery.start_soon(asks)
        async with await listener.accept() as stream:
            await stream.receive_some()
            if said:
                await stream.send_all(said)
    if error is None:
        assert outcome == [ControlReply(0)]
    else:
        with pytest.raises(error, match=why):
            raise outcome[0]
