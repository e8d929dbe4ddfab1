"""logind's delay lock: a shutdown of the machine waits a few seconds while a process holds one.

One connection to the system bus, for one task: a call sends, then receives until its reply is
there. A signal that arrives in between only records that something has changed.

1. No signal is trusted: every local user can send one to this connection. A signal only makes the
   caller query logind, which also reports what was missed while there was no connection. Nor does
   a signal cost much: a message that is too long is skipped unread. Before, one blocked the event
   loop for 2 s.
2. Every call has its timeout. After a failure the connection is of no use: close it and make
   another. A peer that does not speak the protocol can make the parser raise anything: all of it
   becomes LogindUnreachable.
3. Nothing here starts logind: it was stopped on purpose.

Imported late, when the first connection is made: a start must not wait for a library that only
this needs. Rejected: jeepney's own opening, which spins when the bus closes during the
authentication, and its router, a nursery whose receiver breaks when a filter is left as the
connection ends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import attrs
import trio
from jeepney import HeaderFields, MatchRule, Message, MessageType, Parser
from jeepney.bus_messages import message_bus
from jeepney.fds import FileDescriptor
from jeepney.io.trio import DBusConnection
from jeepney.low_level import calc_msg_size

from reconciled.core.errors import DBusError, LogindUnreachable
from reconciled.service.dbus import (
    END_OF_DIALOGUE,
    LOGIND,
    authenticator,
    is_reply,
    method_call,
    property_call,
    reply_body,
    socket_path,
    system_bus_address,
)

# Timeouts in seconds: for what the bus does itself, and for what may wait for another service,
# as a lock waits for polkit to be started.
CONNECT_TIMEOUT = 5.0
CALL_TIMEOUT = 30.0

# Bytes: the longest message that is read, far more than logind ever sends; the part of a message
# that contains its length; and one read while a message is skipped.
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
    """A lock that is held for as long as its descriptor is open, and no longer."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the shutdown go on; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@attrs.define(eq=False)
class Logind:
    """A connection to logind; made by connect(), closed by its caller.

    Every method raises LogindUnreachable where the bus or logind fails. A cancelled call leaves
    the connection unusable: close it.
    """

    _connection: DBusConnection
    _has_changed: bool = attrs.field(default=False, init=False)

    @classmethod
    async def connect(cls) -> Logind:
        """Connect and subscribe to every later change. Leaves nothing open when it fails.

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
            await made._subscribe()
        except BaseException:
            made.close()
            raise
        return made

    async def is_preparing_for_shutdown(self) -> bool:
        """Whether the machine is about to be shut down or rebooted."""
        return bool(await self._property("PreparingForShutdown"))

    async def delay_max(self) -> float:
        """The longest delay that logind grants, in seconds, as configured now."""
        return int(await self._property("InhibitDelayMaxUSec")) / 1_000_000

    async def inhibit(self, who: str, why: str) -> DelayLock:
        """Take a delay lock; ``systemd-inhibit --list`` shows *who* and *why*."""
        call = method_call(LOGIND, "Inhibit", "ssss", "shutdown", who, why, "delay")
        (descriptor,) = await self._call(call)
        number = descriptor.to_raw_fd()
        # A program that inherited it would hold the lock for as long as it runs.
        os.set_inheritable(number, False)  # noqa: FBT003 - it takes no keyword
        return DelayLock(number)

    async def wait_changed(self) -> None:
        """Wait until is_preparing_for_shutdown() may have changed; false alarms occur."""
        while not self._has_changed:
            try:
                self._record_signal(await self._connection.receive())
            except trio.EndOfChannel as error:
                raise LogindUnreachable("the system bus closed the connection") from error
            except Exception as error:
                raise LogindUnreachable(f"the system bus failed: {_error_text(error)}") from error
        self._has_changed = False

    def close(self) -> None:
        """Close the connection. Locks stay held: each has its own descriptor."""
        self._connection.socket.close()

    async def _subscribe(self) -> None:
        prepares = MatchRule(
            type="signal",
            sender=LOGIND.bus_name,
            path=LOGIND.object_path,
            interface=LOGIND.interface,
            member="PrepareForShutdown",
        )
        # A restarted logind does not know of a shutdown that its predecessor prepared.
        owners = MatchRule(
            type="signal",
            sender=message_bus.bus_name,
            path=message_bus.object_path,
            interface=message_bus.interface,
            member="NameOwnerChanged",
        )
        owners.add_arg_condition(0, LOGIND.bus_name)
        for rule in (prepares, owners):
            await self._call(method_call(message_bus, "AddMatch", "s", rule.serialise()))

    async def _property(self, name: str) -> Any:
        ((_, value),) = await self._call(property_call(LOGIND, name))
        return value

    async def _call(self, message: Message) -> tuple[Any, ...]:
        name = message.header.fields[HeaderFields.member]
        try:
            with trio.fail_after(CALL_TIMEOUT):
                return reply_body(await self._reply(message))
        except DBusError as error:
            raise LogindUnreachable(_describe_dbus_error(name, error)) from error
        except trio.TooSlowError as error:
            raise LogindUnreachable(f"{name} got no answer within {CALL_TIMEOUT:g} s") from error
        except trio.EndOfChannel as error:
            raise LogindUnreachable(
                f"the system bus closed the connection during {name}"
            ) from error
        except Exception as error:
            raise LogindUnreachable(f"{name} failed: {_error_text(error)}") from error

    async def _reply(self, message: Message) -> Message:
        serial = next(self._connection.outgoing_serial)
        await self._connection.send(message, serial=serial)
        while True:
            received: Message = await self._connection.receive()
            if is_reply(received, serial):
                return received
            self._record_signal(received)

    def _record_signal(self, message: Message) -> None:
        if message.header.message_type is not MessageType.signal:
            return
        member = message.header.fields.get(HeaderFields.member)
        # The new owner's name comes last; it is empty when logind ended and cannot be queried.
        if member == "PrepareForShutdown" or (
            member == "NameOwnerChanged" and message.body[2:] != ("",)
        ):
            self._has_changed = True


@attrs.define(eq=False)
class _BoundedParser:
    """jeepney's parser, except that a message that is too long is skipped, descriptors included."""

    _parser: Parser = attrs.field(factory=Parser, init=False)
    _bytes_to_skip: int = attrs.field(default=0, init=False)

    def get_next_message(self) -> Message | None:
        """The next complete message; None: there is none yet."""
        return self._parser.get_next_message()

    def bytes_desired(self) -> int:
        """How many bytes to read now: never beyond one message, so that each length is checked."""
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
    """An authenticated connection."""
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
    dialogue = authenticator(pass_descriptors=True)
    for line in dialogue:
        if line:
            await stream.send_all(line)
        if not (data := await stream.receive_some()):
            raise trio.EndOfChannel("the bus closed the connection during the authentication")
        dialogue.feed(bytes(data))
    await stream.send_all(END_OF_DIALOGUE)


def _describe_dbus_error(call: str, error: DBusError) -> str:
    text = f"{error.name}: {error.text}" if error.text else error.name
    if error.name in _DENIED:
        return (
            f"{call} is refused ({text}): install polkit (Debian: polkitd), whose defaults "
            "allow delay locks, or allow org.freedesktop.login1.inhibit-delay-shutdown"
        )
    if error.name in _NOT_RUNNING:
        return f"systemd-logind does not run ({text}): systemctl start systemd-logind"
    return f"{call} failed: {text}"


def _error_text(error: BaseException) -> str:
    return str(error) or repr(error)
