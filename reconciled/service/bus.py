"""Questions over D-Bus, from a thread or before the loop runs; each ends at one deadline.

jeepney's own blocking connection waits without a limit for the bus to greet it. So here is the
socket, and jeepney only what it is best at: the protocol. Imported late: it takes 9 ms.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageFlag,
    MessageType,
    Parser,
    message_bus,
    new_method_call,
)
from jeepney.auth import BEGIN, Authenticator
from jeepney.bus import get_connectable_addresses

from reconciled.core.errors import DBusError

MANAGER = DBusAddress(
    "/org/freedesktop/systemd1", "org.freedesktop.systemd1", "org.freedesktop.systemd1.Manager"
)
LOGIND = DBusAddress(
    "/org/freedesktop/login1", "org.freedesktop.login1", "org.freedesktop.login1.Manager"
)
_SYSTEM = "unix:path=/run/dbus/system_bus_socket"
_PROPERTIES = "org.freedesktop.DBus.Properties"


def system_bus_address(environ: Mapping[str, str]) -> str:
    """The address of the system's bus."""
    return environ.get("DBUS_SYSTEM_BUS_ADDRESS") or _SYSTEM


def user_bus_address(environ: Mapping[str, str]) -> str:
    """The address of the bus of the user whose processes have *environ*; empty: there is none."""
    written = environ.get("DBUS_SESSION_BUS_ADDRESS", "")
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return written or (f"unix:path={runtime}/bus" if runtime else "")


def socket_path(address: str) -> str:
    """The first unix socket in a bus's *address*; an abstract one begins with NUL.

    Raises ValueError, RuntimeError where there is none.
    """
    return str(next(get_connectable_addresses(address)))


@attrs.define(eq=False)
class Bus:
    """One connection; made by connected()."""

    _socket: socket.socket
    _deadline: float
    _parser: Parser = attrs.field(factory=Parser, init=False)
    _serials: Iterator[int] = attrs.field(factory=lambda: itertools.count(1), init=False)

    def call_method(
        self, address: DBusAddress, method: str, signature: str, *arguments: Any
    ) -> Any:
        """Call *method*; the first value of its answer. Nothing is started for it.

        Raises Refused, OSError (TimeoutError at the deadline), ValueError.
        """
        return self._call(new_method_call(address, method, signature, arguments))

    def get_property(self, address: DBusAddress, name: str) -> Any:
        """One property. Raises as ask() does."""
        properties = DBusAddress(address.object_path, address.bus_name, _PROPERTIES)
        return self.call_method(properties, "Get", "ss", address.interface, name)[1]

    def properties(self, path: str) -> dict[str, Any]:
        """All properties of the manager's object *path*. Raises as ask() does.

        A single answer: with one question for each, thirty of them took a tenth of a second.
        """
        address = DBusAddress(path, MANAGER.bus_name, _PROPERTIES)
        told = self.call_method(address, "GetAll", "s", "")
        return {name: value for name, (_, value) in told.items()}

    def _call(self, message: Message) -> Any:
        message.header.flags = MessageFlag.no_auto_start
        serial = next(self._serials)
        self._set_timeout()
        self._socket.sendall(message.serialise(serial=serial))
        while True:
            answer = self._receive()
            if answer.header.fields.get(HeaderFields.reply_serial) == serial:
                break
        if answer.header.message_type is MessageType.error:
            name = answer.header.fields.get(HeaderFields.error_name, "")
            raise DBusError(str(answer.body[0]) if answer.body else str(name))
        return answer.body[0] if answer.body else None

    def _receive(self) -> Message:
        while (message := self._parser.get_next_message()) is None:
            self._parser.add_data(self._read())
        return message

    def _read(self) -> bytes:
        self._set_timeout()
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionResetError("the bus has closed the connection")
        return data

    def _set_timeout(self) -> None:
        """Let the next call of the socket wait for as long as there is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the bus did not answer in time")
        self._socket.settimeout(left)

    def _authenticate(self) -> None:
        authenticator = Authenticator()
        for data in authenticator:
            self._set_timeout()
            self._socket.sendall(data)
            authenticator.feed(self._read())
        self._socket.sendall(BEGIN)
        self._call(message_bus.Hello())


@contextlib.contextmanager
def connect(address: str, deadline: float) -> Iterator[Bus]:
    """A connection to the bus at *address*, over at *deadline* by the monotonic clock.

    Raises OSError, ValueError, RuntimeError where there is none.
    """
    place = socket_path(address)
    with socket.socket(socket.AF_UNIX) as opened:
        bus = Bus(opened, deadline)
        bus._set_timeout()  # noqa: SLF001 - the same class, before it is handed out
        opened.connect(os.fsencode(place) if place.startswith("\0") else place)
        bus._authenticate()  # noqa: SLF001
        yield bus
