"""The delay lock over D-Bus, against a simulated bus and logind."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageFlag,
    new_error,
    new_method_return,
    new_signal,
)
from jeepney.io.trio import DBusConnection

from reconciled.core.errors import LogindUnreachable
from reconciled.service import inhibitor
from reconciled.service.inhibitor import Logind

MANAGER = DBusAddress(
    "/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.login1.Manager"
)
BUS = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
GREETING = {b"AUTH": b"OK 0123\r\n", b"NEGO": b"AGREE_UNIX_FD\r\n"}

Answer = Callable[["Peer", Message], Awaitable[None]]


@attrs.define(eq=False)
class Peer:
    """A simulated bus with logind; serve() handles one connection."""

    address: Path
    preparing: bool = False
    # The replies to the greeting, by its first letters; None: no reply.
    greeting: dict[bytes, bytes | None] = attrs.field(factory=lambda: dict(GREETING))
    # Replies that replace usual(), by the member of the call.
    answers: dict[str, Answer] = attrs.field(factory=dict)
    calls: list[Message] = attrs.field(factory=list)
    # The other ends of the locks sent.
    ends: list[int] = attrs.field(factory=list)
    connection: DBusConnection | None = None
    # The descriptor of its end of the newest connection.
    number: int = -1

    async def serve(self, stream: trio.SocketStream) -> None:
        self.number = stream.socket.fileno()
        async with stream:
            if not await self._greet(stream):
                return
            self.connection = DBusConnection(stream.socket, enable_fds=True)
            try:
                while True:
                    call = await self.connection.receive()
                    self.calls.append(call)
                    answer = self.answers.get(member_of(call), Peer.usual)
                    await answer(self, call)
            except (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
                return

    async def _greet(self, stream: trio.SocketStream) -> bool:
        line = b""
        while byte := await stream.receive_some(1):
            line += bytes(byte)
            if not line.endswith(b"\r\n"):
                continue
            word, line = line.lstrip(b"\0")[:4], b""
            if word == b"BEGI":
                return True
            answer = self.greeting[word]
            if answer is None:
                await trio.sleep_forever()
            elif not answer:
                return False
            else:
                await stream.send_all(answer)
        return False

    async def send(self, message: Message) -> None:
        assert self.connection is not None
        await self.connection.send(message)

    async def reply(self, call: Message, signature: str | None = None, *body: Any) -> None:
        await self.send(new_method_return(call, signature, body))

    async def usual(self, call: Message) -> None:
        """Reply as the bus and logind do."""
        member = member_of(call)
        if member == "Hello":
            await self.reply(call, "s", ":1.7")
        elif member == "AddMatch":
            await self.reply(call)
        elif member == "Inhibit":
            ours, theirs = os.pipe()
            self.ends.append(ours)
            await self.reply(call, "h", theirs)
            os.close(theirs)
        elif call.body[1] == "PreparingForShutdown":
            await self.reply(call, "v", ("b", self.preparing))
        else:
            await self.reply(call, "v", ("t", 5_000_000))

    async def prepare_signal(self, *, coming: bool) -> None:
        await self.send(new_signal(MANAGER, "PrepareForShutdown", "b", (coming,)))

    def released(self) -> bool:
        """Whether no process holds the last lock any more."""
        os.set_blocking(self.ends[-1], False)
        try:
            return os.read(self.ends[-1], 1) == b""
        except BlockingIOError:
            return False


def member_of(message: Message) -> str:
    return str(message.header.fields[HeaderFields.member])


@pytest.fixture
async def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peer]:
    """A bus at the address of the system bus."""
    monkeypatch.setattr(inhibitor, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setattr(inhibitor, "CALL_TIMEOUT", 0.5)
    address = tmp_path / "bus"
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={address}")
    made = Peer(address)
    with trio.socket.socket(trio.socket.AF_UNIX) as listening:
        await listening.bind(str(address))
        listening.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, made.serve, [trio.SocketListener(listening)])
            yield made
            nursery.cancel_scope.cancel(reason="the test is over")
    for end in made.ends:
        os.close(end)


def open_files() -> set[int]:
    """The numbers of the descriptors of this process."""
    listed = [str(each) for each in Path("/proc/self/fd").iterdir()]
    # The listing itself had one.
    return {int(Path(each).name) for each in listed if Path(each).is_symlink()}


async def test_a_lock_delays_a_shutdown(peer: Peer) -> None:
    """The lock delays a shutdown only, and ends when it is released, not before."""
    logind = await Logind.connect()
    lock = await logind.inhibit("reconciled", "why")
    assert peer.calls[-1].body == ("shutdown", "reconciled", "why", "delay")
    assert not peer.released()
    logind.close()
    assert not peer.released()
    lock.release()
    lock.release()
    assert peer.released()


async def test_programs_do_not_inherit_a_lock(peer: Peer) -> None:
    """The descriptor of a lock is closed in every program that is started."""
    logind = await Logind.connect()
    before = open_files()
    lock = await logind.inhibit("reconciled", "why")
    assert len(peer.ends) == 1
    assert not os.get_inheritable(lock._descriptor)
    assert lock._descriptor in open_files() - before
    lock.release()
    logind.close()


async def test_properties_are_read_without_activation(peer: Peer) -> None:
    """State and delay are the properties of logind, read without activating it."""
    logind = await Logind.connect()
    assert await logind.is_preparing_for_shutdown() is False
    peer.preparing = True
    assert await logind.is_preparing_for_shutdown() is True
    assert await logind.delay_max() == 5.0
    flags = [call.header.flags for call in peer.calls if member_of(call) != "Hello"]
    assert all(flag & MessageFlag.no_auto_start for flag in flags)
    logind.close()


async def test_a_signal_is_verified(peer: Peer) -> None:
    """A signal from any sender ends the wait, but its content is not used: logind is asked."""
    logind = await Logind.connect()
    await peer.prepare_signal(coming=True)
    await logind.wait_changed()
    assert await logind.is_preparing_for_shutdown() is False
    with trio.move_on_after(0.05) as waiting:
        await logind.wait_changed()
    assert waiting.cancelled_caught
    logind.close()


async def test_a_signal_during_a_call_is_kept(peer: Peer) -> None:
    """A signal that arrives before the reply of a call ends the next wait."""

    async def after_a_signal(peer: Peer, call: Message) -> None:
        await peer.prepare_signal(coming=True)
        await peer.usual(call)

    logind = await Logind.connect()
    peer.answers["Get"] = after_a_signal
    await logind.is_preparing_for_shutdown()
    with trio.fail_after(1):
        await logind.wait_changed()
    logind.close()


@pytest.mark.parametrize("size", [inhibitor.LARGEST, 4 << 20])
async def test_a_huge_message_is_skipped(peer: Peer, size: int) -> None:
    """A huge signal, which any local user can send, is skipped, and its descriptors closed."""
    logind = await Logind.connect()
    ours, theirs = os.pipe()
    huge = new_signal(MANAGER, "PrepareForShutdown", "ayh", (b"x" * size, theirs))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peer.send, huge)
        assert await logind.is_preparing_for_shutdown() is False
    os.close(theirs)
    os.set_blocking(ours, False)
    assert os.read(ours, 1) == b""
    os.close(ours)
    with trio.move_on_after(0.05) as waiting:
        await logind.wait_changed()
    assert waiting.cancelled_caught
    await peer.prepare_signal(coming=True)
    with trio.fail_after(1):
        await logind.wait_changed()
    logind.close()


@pytest.mark.parametrize(
    ("body", "ends_the_wait"),
    [
        (("org.freedesktop.login1", ":1.2", ""), False),
        (("org.freedesktop.login1", "", ":1.3"), True),
        ((), True),
    ],
)
async def test_a_restart_of_logind_ends_the_wait(
    peer: Peer, body: tuple[str, ...], *, ends_the_wait: bool
) -> None:
    """The start of logind ends the wait, its end does not; a malformed signal ends it too."""
    logind = await Logind.connect()
    await peer.send(new_signal(BUS, "NameOwnerChanged", "s" * len(body) or None, body))
    with trio.move_on_after(0.1) as waiting:
        await logind.wait_changed()
    assert waiting.cancelled_caught is not ends_the_wait
    logind.close()


async def test_signals_are_subscribed_by_connect(peer: Peer) -> None:
    """Both signals are subscribed when connect() returns: no later one is missed."""
    logind = await Logind.connect()
    rules = [str(call.body[0]) for call in peer.calls if member_of(call) == "AddMatch"]
    assert len(rules) == 2
    assert "member='PrepareForShutdown'" in rules[0]
    assert "arg0='org.freedesktop.login1'" in rules[1]
    logind.close()


# -- errors ------------------------------------------------------------------------------------


def failing(name: str, text: str) -> Answer:
    async def answer(peer: Peer, call: Message) -> None:
        await peer.send(new_error(call, f"org.freedesktop.{name}", "s", (text,)))

    return answer


async def closing(peer: Peer, _: Message) -> None:
    assert peer.connection is not None
    peer.connection.socket.close()


async def garbling(peer: Peer, _: Message) -> None:
    assert peer.connection is not None
    await peer.connection.socket.send(b"\0" * 64)


async def silent(_: Peer, __: Message) -> None:
    return None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failing("DBus.Error.AccessDenied", "Permission denied"), "install polkit"),
        (failing("DBus.Error.InteractiveAuthorizationRequired", "no"), "install polkit"),
        (failing("DBus.Error.NameHasNoOwner", "no"), "systemctl start systemd-logind"),
        (failing("login1.OperationInProgress", "busy"), "login1.OperationInProgress: busy"),
        (closing, "closed the connection during Inhibit"),
        (garbling, "Inhibit failed"),
        (silent, "no answer within 0.5 s"),
    ],
    ids=["denied", "ask", "absent", "busy", "closing", "garbling", "silent"],
)
async def test_a_failed_call_is_one_error_with_a_reason(
    peer: Peer, answer: Answer, reason: str
) -> None:
    """Each failure of a call is LogindUnreachable with a reason, within the timeout."""
    before = open_files()
    logind = await Logind.connect()
    peer.answers["Inhibit"] = answer
    with trio.fail_after(2), pytest.raises(LogindUnreachable, match=reason):
        await logind.inhibit("reconciled", "why")
    logind.close()
    await trio.testing.wait_all_tasks_blocked()
    assert open_files() - before <= {peer.number}


async def test_a_connection_that_ends_ends_the_wait(peer: Peer) -> None:
    """The end of the connection ends a wait for a change with an error."""
    logind = await Logind.connect()
    assert peer.connection is not None
    peer.connection.socket.close()
    with trio.fail_after(1), pytest.raises(LogindUnreachable, match="closed the connection"):
        await logind.wait_changed()
    logind.close()


@pytest.mark.parametrize(
    ("word", "answer", "reason"),
    [
        (b"AUTH", b"REJECTED EXTERNAL\r\n", "REJECTED"),
        (b"AUTH", b"", "closed the connection during the authentication"),
        (b"AUTH", None, "does not answer within 0.5 s"),
        (b"NEGO", b"ERROR\r\n", "descriptor"),
        (b"NEGO", b"", "closed the connection during the authentication"),
    ],
)
async def test_a_failed_greeting_is_one_error_with_a_reason(
    peer: Peer, word: bytes, answer: bytes | None, reason: str
) -> None:
    """Each failure of the greeting is one error, within the timeout, and closes the socket."""
    peer.greeting[word] = answer
    before = open_files()
    with trio.fail_after(2), pytest.raises(LogindUnreachable, match=reason):
        await Logind.connect()
    peer.greeting.update(GREETING)
    await trio.testing.wait_all_tasks_blocked()
    assert open_files() - before <= {peer.number}


async def test_hello_times_out(peer: Peer) -> None:
    """A bus that does not reply to Hello is an error after the timeout."""
    peer.answers["Hello"] = silent
    with trio.fail_after(2), pytest.raises(LogindUnreachable, match="does not answer"):
        await Logind.connect()


async def test_a_missing_bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing socket means that there is no bus; an unserved one is an error."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/bus")
    with pytest.raises(FileNotFoundError, match="no system bus"):
        await Logind.connect()
    with trio.socket.socket(trio.socket.AF_UNIX) as dead:
        await dead.bind(f"{tmp_path}/bus")
    with pytest.raises(LogindUnreachable, match="refused"):
        await Logind.connect()


@pytest.mark.parametrize("address", ["tcp:host=x,port=1", "nonsense", "unix:tmpdir=/x"])
async def test_an_unusable_address_is_an_error(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address that cannot be used is one error with a reason."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
    with pytest.raises(LogindUnreachable, match="no connection to the system bus"):
        await Logind.connect()
