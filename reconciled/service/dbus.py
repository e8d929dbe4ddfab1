"""D-Bus without I/O: addresses, authentication, calls and replies.

Two connections use it: a blocking one in a thread (``unit/bus_connection.py``) and
an asynchronous one in the event loop (``inhibitor.py``).

1. A call activates no service: every message has the flag NO_AUTO_START.
2. An error reply raises DBusError, whether the bus or the peer sent it.

Imported late: jeepney takes 9 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jeepney import (
    DBusAddress,
    HeaderFields,
    Message,
    MessageFlag,
    MessageType,
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
PROPERTIES = "org.freedesktop.DBus.Properties"
END_OF_DIALOGUE: bytes = BEGIN
_SYSTEM = "unix:path=/run/dbus/system_bus_socket"


def system_bus_address(environ: Mapping[str, str]) -> str:
    """The address of the system bus."""
    return environ.get("DBUS_SYSTEM_BUS_ADDRESS") or _SYSTEM


def user_bus_address(environ: Mapping[str, str]) -> str:
    """The address of the bus of the user whose processes have *environ*; empty: there is none."""
    written = environ.get("DBUS_SESSION_BUS_ADDRESS", "")
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return written or (f"unix:path={runtime}/bus" if runtime else "")


def socket_path(address: str) -> str:
    """The first unix socket in a bus *address*; an abstract one begins with NUL.

    Raises ValueError or RuntimeError where there is none.
    """
    return str(next(get_connectable_addresses(address)))


def authenticator(*, pass_descriptors: bool = False) -> Authenticator:
    """The authentication dialogue: write each line that it yields, and feed it the bytes read then.

    It yields empty lines while a reply is incomplete. When it is exhausted, write END_OF_DIALOGUE,
    to which the bus sends no reply. feed() raises AuthenticationError on an unexpected reply.
    """
    return Authenticator(enable_fds=pass_descriptors)


def method_call(address: DBusAddress, method: str, signature: str = "", *arguments: Any) -> Message:
    """A call of *method*, without service activation."""
    message = new_method_call(address, method, signature or None, arguments)
    message.header.flags |= MessageFlag.no_auto_start
    return message


def property_call(address: DBusAddress, name: str) -> Message:
    """A call whose reply is one variant: the property *name* of *address*."""
    properties = DBusAddress(address.object_path, address.bus_name, PROPERTIES)
    return method_call(properties, "Get", "ss", address.interface, name)


def is_reply(message: Message, serial: int) -> bool:
    """Whether *message* is the reply to the call *serial*."""
    return bool(message.header.fields.get(HeaderFields.reply_serial) == serial)


def reply_body(reply: Message) -> tuple[Any, ...]:
    """The values of *reply*. Raises DBusError where it is an error."""
    if reply.header.message_type is MessageType.error:
        name = str(reply.header.fields.get(HeaderFields.error_name, ""))
        raise DBusError(name, "; ".join(each for each in reply.body if isinstance(each, str)))
    body: tuple[Any, ...] = reply.body
    return body
