"""A blocking D-Bus connection, for a thread or before the event loop runs; it has one deadline.

Rejected: jeepney's own blocking connection, which waits without a limit for the bus to
authenticate it. jeepney serves for the protocol alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import attrs
from jeepney import DBusAddress, Message, Parser, message_bus

from reconciled.service.dbus import (
    END_OF_DIALOGUE,
    MANAGER,
    PROPERTIES,
    authenticator,
    is_reply,
    method_call,
    property_call,
    reply_body,
    socket_path,
)

_CHUNK = 64 * 1024  # bytes of one read


@attrs.define(eq=False)
class BusConnection:
    """One connection; made by connect()."""

    _socket: socket.socket
    _deadline: float
    _parser: Parser = attrs.field(factory=Parser, init=False)
    _serials: Iterator[int] = attrs.field(factory=lambda: itertools.count(1), init=False)

    def call_method(
        self, address: DBusAddress, method: str, signature: str, *arguments: Any
    ) -> Any:
        """Call *method* and return the first value of its reply.

        Raises DBusError, OSError (TimeoutError at the deadline), ValueError.
        """
        return self._call(method_call(address, method, signature, *arguments))

    def get_property(self, address: DBusAddress, name: str) -> Any:
        """One property. Raises as call_method() does."""
        return self._call(property_call(address, name))[1]

    def properties(self, path: str) -> dict[str, Any]:
        """All properties of the manager's object *path*. Raises as call_method() does.

        One call: with a call for each, thirty of them took a tenth of a second.
        """
        address = DBusAddress(path, MANAGER.bus_name, PROPERTIES)
        variants = self.call_method(address, "GetAll", "s", "")
        return {name: value for name, (_, value) in variants.items()}

    def _call(self, message: Message) -> Any:
        serial = next(self._serials)
        self._set_timeout()
        self._socket.sendall(message.serialise(serial=serial))
        while not is_reply(reply := self._receive(), serial):
            pass
        body = reply_body(reply)
        return body[0] if body else None

    def _receive(self) -> Message:
        while (message := self._parser.get_next_message()) is None:
            self._parser.add_data(self._read())
        return message

    def _read(self) -> bytes:
        self._set_timeout()
        data = self._socket.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("the bus closed the connection")
        return data

    def _set_timeout(self) -> None:
        """Limit the next socket call to the time that is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the bus did not answer in time")
        self._socket.settimeout(left)

    def _authenticate(self) -> None:
        dialogue = authenticator()
        for line in dialogue:
            self._set_timeout()
            self._socket.sendall(line)
            dialogue.feed(self._read())
        self._socket.sendall(END_OF_DIALOGUE)
        self._call(message_bus.Hello())


@contextlib.contextmanager
def connect(address: str, deadline: float) -> Iterator[BusConnection]:
    """A connection to the bus at *address*, usable until *deadline* by the monotonic clock.

    Raises OSError, ValueError or RuntimeError where there is none.
    """
    path = socket_path(address)
    with socket.socket(socket.AF_UNIX) as opened:
        bus = BusConnection(opened, deadline)
        bus._set_timeout()  # noqa: SLF001 - the same class, before it is handed out
        opened.connect(os.fsencode(path) if path.startswith("\0") else path)
        bus._authenticate()  # noqa: SLF001
        yield bus
