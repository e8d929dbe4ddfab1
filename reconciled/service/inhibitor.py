"""logind's delay lock: a shutdown of the machine waits for whoever holds one, for a few seconds.

One connection to the system bus, for one task: a call sends, and receives until its answer is
there. What comes in between only leaves a mark that something has changed.

1. No signal is believed: every local user can send one to us. It only makes the caller ask
   logind itself, which also tells what was missed while there was no connection. Nor does it
   cost much: what is too long passes by unread, and was 2 s of a loop that stood still.
2. Every call has its bound. After a failure the connection is of no use: close it, make another.
   Who does not speak the protocol can make its parser raise anything: all of it is one error.
3. logind is never started from here: who stopped it has meant it.

Imported late, by whoever connects: a start must not wait for a library that only this needs.
Rejected: jeepney's own opening, which spins when the bus closes in mid-greeting, and its router,
a nursery of its own, whose receiver breaks when a filter is left as the connection ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import trio
from jeepney import (
    DBusErrorResponse,
    HeaderFields,
    MatchRule,
    Message,
    MessageFlag,
    Parser,
)
from jeepney import Properties as PropertiesOf
from jeepney.auth import BEGIN, Authenticator
from jeepney.bus_messages import message_bus
from jeepney.fds import FileDescriptor
from jeepney.io.trio import DBusConnection
from jeepney.low_level import MessageType, calc_msg_size
from jeepney.wrappers import new_method_call, unwrap_msg

from reconciled.core.errors import LogindUnreachable
from reconciled.service.bus import LOGIND, socket_path, system_bus_address

# Bounds in seconds: for what the bus does itself, and for what may wait for another service,
# as a lock waits for polkit to be started.
CONNECT_TIMEOUT = 5.0
CALL_TIMEOUT = 30.0

# Bytes: of a message that is read, which is far more than logind ever has to say, of what tells
# how long a message is, and of one read of what passes by.
LARGEST, _HEAD, _CHUNK = 16 * 1024, 16, 64 * 1024

_DENIED = (
    "org.freedesktop.DBus.Error.AccessDenied",
    "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired",
)
_NOT_RUNNING = (
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.ServiceUnknown",
)


class DelayLock:
    """A lock that is held; for as long as the descriptor is open, and no longer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the shutdown go on; harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@attrs.define(eq=False)
class Logind:
    """A connection to logind; made by connect(), and closed by who made it.

    Every method raises Unreachable where the bus or logind does not do its part.
    """

    _connection: DBusConnection
    _has_changed: bool = attrs.field(default=False, init=False)

    @classmethod
    async def connect(cls) -> Logind:
        """Connect, and hear of every later change. Leaves nothing open when it fails.

        Raises FileNotFoundError where there is no system bus at all, as in most containers.
        """
        try:
            with trio.fail_after(CONNECT_TIMEOUT):
                connection = await _connect()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"this machine has no system bus: {error}") from error
        except trio.TooSlowError as error:
            raise LogindUnreachable(
                f"the system bus does not answer within {CONNECT_TIMEOUT:g} s"
            ) from error
        except Exception as error:
            raise LogindUnreachable(
                f"no connection to the system bus: {_error_text(error)}"
            ) from error
        made = cls(connection)
        try:
            await made._listen()
        except BaseException:
            made.close()
            raise
        return made

    async def is_preparing_for_shutdown(self) -> bool:
        """Whether the machine is about to be shut down or rebooted."""
        return bool(await self._property("PreparingForShutdown"))

    async def delay_max(self) -> float:
        """For how many seconds logind lets itself be delayed at most, as it is configured now."""
        return int(await self._property("InhibitDelayMaxUSec")) / 1_000_000

    async def inhibit(self, who: str, why: str) -> DelayLock:
        """Take a delay lock; ``systemd-inhibit --list`` shows *who* and *why*."""
        asked = new_method_call(LOGIND, "Inhibit", "ssss", ("shutdown", who, why, "delay"))
        (descriptor,) = await self._call(asked)
        number = descriptor.to_raw_fd()
        # A program that inherited it would hold the lock for as long as it runs.
        os.set_inheritable(number, False)  # noqa: FBT003 - it takes no keyword
        return DelayLock(number)

    async def wait_changed(self) -> None:
        """Wait until preparing() may answer something else; sometimes it does not."""
        while not self._has_changed:
            try:
                self._record_signal(await self._connection.receive())
            except trio.EndOfChannel as error:
                raise LogindUnreachable("the system bus has closed the connection") from error
            except Exception as error:
                raise LogindUnreachable(f"the system bus failed: {_error_text(error)}") from error
        self._has_changed = False

    def close(self) -> None:
        """Close the connection. Locks are not concerned: a lock has its own descriptor."""
        self._connection.socket.close()

    async def _listen(self) -> None:
        prepares = MatchRule(
            type="signal",
            sender=LOGIND.bus_name,
            path=LOGIND.object_path,
            interface=LOGIND.interface,
            member="PrepareForShutdown",
        )
        # A logind that comes anew knows nothing of a shutdown that the one before it prepared.
        owners = MatchRule(
            type="signal",
            sender=message_bus.bus_name,
            path=message_bus.object_path,
            interface=message_bus.interface,
            member="NameOwnerChanged",
        )
        owners.add_arg_condition(0, LOGIND.bus_name)
        for rule in (prepares, owners):
            await self._call(message_bus.AddMatch(rule))

    async def _property(self, name: str) -> Any:
        ((_, value),) = await self._call(PropertiesOf(LOGIND).get(name))
        return value

    async def _call(self, message: Message) -> tuple[Any, ...]:
        message.header.flags |= MessageFlag.no_auto_start
        name = message.header.fields[HeaderFields.member]
        try:
            with trio.fail_after(CALL_TIMEOUT):
                answer = await self._answer(message)
            body: tuple[Any, ...] = unwrap_msg(answer)
        except DBusErrorResponse as error:
            raise LogindUnreachable(_describe_dbus_error(name, error)) from error
        except trio.TooSlowError as error:
            raise LogindUnreachable(f"{name} got no answer within {CALL_TIMEOUT:g} s") from error
        except trio.EndOfChannel as error:
            raise LogindUnreachable(
                f"the system bus closed the connection during {name}"
            ) from error
        except Exception as error:
            raise LogindUnreachable(f"{name} failed: {_error_text(error)}") from error
        return body

    async def _answer(self, message: Message) -> Message:
        serial = next(self._connection.outgoing_serial)
        await self._connection.send(message, serial=serial)
        while True:
            received: Message = await self._connection.receive()
            if received.header.fields.get(HeaderFields.reply_serial) == serial:
                return received
            self._record_signal(received)

    def _record_signal(self, message: Message) -> None:
        if message.header.message_type is not MessageType.signal:
            return
        member = message.header.fields.get(HeaderFields.member)
        # The new owner's name comes last: while there is none, there is nobody to ask.
        if member == "PrepareForShutdown" or (
            member == "NameOwnerChanged" and message.body[2:] != ("",)
        ):
            self._has_changed = True


@attrs.define(eq=False)
class _BoundedParser:
    """Around jeepney's: a message that is too long passes by, with the descriptors in it."""

    _parser: Parser = attrs.field(factory=Parser, init=False)
    _bytes_to_skip: int = attrs.field(
        default=0, init=False
    )  # so many bytes of it are still to come

    def get_next_message(self) -> Message | None:
        """The next one that is there as a whole."""
        return self._parser.get_next_message()

    def bytes_desired(self) -> int:
        """How much may be read now: never more than a message, so that none hides in another."""
        return min(self._bytes_to_skip, _CHUNK) or int(self._parser.bytes_desired())

    def add_data(self, data: bytes, fds: Sequence[FileDescriptor] = ()) -> None:
        """Take in what was read."""
        if not self._bytes_to_skip:
            self._parser.add_data(data, fds)
            buffer = self._parser.buf
            if buffer.bytes_buffered != _HEAD or calc_msg_size(buffer.peek(_HEAD)) <= LARGEST:
                return
            data, fds, self._parser.fds = buffer.read(_HEAD), self._parser.fds, []
            self._bytes_to_skip = calc_msg_size(data)
        self._bytes_to_skip -= len(data)
        for each in fds:
            each.close()


async def _connect() -> DBusConnection:
    """A connection on which the bus has said who we are."""
    stream = await trio.open_unix_socket(socket_path(system_bus_address(os.environ)))
    try:
        await _authenticate(stream)
        connection = DBusConnection(stream.socket, enable_fds=True)
        connection.parser = _BoundedParser()
        await connection.send(message_bus.Hello())
        await connection.receive()
    except BaseException:
        stream.socket.close()
        raise
    return connection


async def _authenticate(stream: trio.SocketStream) -> None:
    greeting = Authenticator(enable_fds=True, inc_null_byte=False)
    await stream.send_all(b"\0")
    for line in greeting:
        if line:
            await stream.send_all(line)
        if not (data := await stream.receive_some()):
            raise trio.EndOfChannel("it was closed during the greeting")
        greeting.feed(bytes(data))
    await stream.send_all(BEGIN)


def _describe_dbus_error(call: str, error: DBusErrorResponse) -> str:
    said = ": ".join([str(error.name), *(each for each in error.data if isinstance(each, str))])
    if error.name in _DENIED:
        return (
            f"{call} is refused ({said}): install polkit (Debian: polkitd), whose defaults "
            "allow delay locks, or allow org.freedesktop.login1.inhibit-delay-shutdown"
        )
    if error.name in _NOT_RUNNING:
        return f"systemd-logind does not run ({said}): systemctl start systemd-logind"
    return f"{call} failed: {said}"


def _error_text(error: BaseException) -> str:
    return str(error) or repr(error)
