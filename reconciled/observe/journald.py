"""systemd's journal: one log line as an entry of its native protocol, and the socket it is sent by.

The entry:

1. MESSAGE is for people: ``EVENT KEY: REASON (FIELD=VALUE …)``. The journal shows time and unit
   before it, and the priority as a colour, so that MESSAGE contains none of them.
2. Each field of the line is also a field of the entry, by which entries can be filtered:
   ``RECONCILED_`` and its name. A field that the journal has a name for takes that name.
3. Nothing in a value can end the value or begin another field: a value with a newline is sent
   with its length before it.

The code location of a log call is left out: most events are logged at one location, and finding
it costs as much as the entry.

The socket: one datagram a record, sent without ever waiting.

4. A journal that is stopped, busy or restarting makes write() return 0; it never waits and never
   raises: the sink keeps the record and sends it when the journal is back.
5. A record that is too large for a datagram is sent as a sealed memory file, of any size.
6. The socket object stays the same whatever happens to its peer, as a task may be waiting for it:
   it is connected again, not opened again.

The manager holds the journal's socket: while the journal itself is restarted, datagrams queue.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any

import attrs

from reconciled.observe.line_format import NUMBERS, encoded, escaped, format_value
from reconciled.observe.message_ids import MESSAGE_IDS

PREFIX = "RECONCILED_"
IDENTIFIER = "reconciled"
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_LONGEST_NAME = 64  # the journal drops a field with a longer one
_KNOWN = {"traceback": "TRACEBACK", "errno": "ERRNO"}
_NO_NAME = re.compile("[^A-Z0-9_]")
# Characters of one field and of the reason in MESSAGE; the entry's own field is complete.
_LONGEST, _LONGEST_WHY = 200, 1000
_REASON_FIELDS = ("reason", "error")
# Fields with their own lines in MESSAGE: to be copied, or read as a list.
_OWN_LINE_FIELDS = ("evidence", "where", "commands", "report")
_MULTILINE_FIELDS = (*_OWN_LINE_FIELDS, "traceback")
# Fields that MESSAGE shows elsewhere, or that have another field of the entry.
_SHOWN_ELSEWHERE = frozenset({"key", *_REASON_FIELDS, *_OWN_LINE_FIELDS, "traceback", "errno"})
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
SOCKET = "/run/systemd/journal/socket"
# Bytes of the send buffer, as in systemd's own library. The kernel caps it; with the kernel's
# default some 160 records fill it.
_BUFFER = 8 << 20
# Bytes. Some machines allow datagrams of megabytes: one of them would delay all others.
_LARGE = 1 << 16
# The journal is not there now, for example while its socket is created again. ENOENT: the file of
# the socket is missing.
_UNAVAILABLE = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ENOENT}
)
_TOO_LARGE = frozenset({errno.EMSGSIZE, errno.ENOBUFS})
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


# -- entries --------------------------------------------------------------------------------


def syslog_identifier(environment: Mapping[str, str]) -> str:
    """``reconciled``, or ``reconciled-NAME`` for an instance.

    The manager does not pass SyslogIdentifier= to the process; in the shipped units the runtime
    directory has the same name.
    """
    directory = environment.get("RUNTIME_DIRECTORY", "").partition(":")[0]
    name = directory.rpartition("/")[2]
    return name if name.startswith(f"{IDENTIFIER}-") else IDENTIFIER


@attrs.frozen
class JournaldRenderer:
    """Renders lines as entries of *identifier*, by which ``journalctl -t`` finds them."""

    identifier: str = IDENTIFIER
    _heads: Mapping[str, str] = attrs.field(init=False)

    @_heads.default
    def _make_heads(self) -> Mapping[str, str]:
        named = f"SYSLOG_IDENTIFIER={self.identifier}\n"
        return {level: f"PRIORITY={number}\n{named}" for level, number in PRIORITIES.items()}

    def __call__(self, _moment: str, level: str, event: str, fields: Mapping[str, Any]) -> bytes:
        """The datagram of an event. *fields* are plain data; None values are left out."""
        head = self._heads[level]
        if event in MESSAGE_IDS:
            head = f"{head}MESSAGE_ID={MESSAGE_IDS[event]}\n"
        pairs = [("MESSAGE", message(event, fields)), (f"{PREFIX}EVENT", event)]
        for name, value in fields.items():
            if value is not None:
                kind = type(value)
                text = value if kind is str else str(value) if kind in NUMBERS else _ENCODE(value)
                pairs.append((field_name(name), text))
        rows = [f"{name}={text}\n" for name, text in pairs if "\n" not in text]
        entry = encoded(head + "".join(rows))
        if len(rows) == len(pairs):
            return entry
        return entry + b"".join(_binary_field(name, text) for name, text in pairs if "\n" in text)


def message(event: str, fields: Mapping[str, Any]) -> str:
    """The text for people: one line, followed by lists and a traceback, if there are any."""
    text = _plain_name(event)
    key = fields.get("key")
    if key is not None:
        text += f" {_format_value(key, _LONGEST)}"
    for name in _REASON_FIELDS:
        if fields.get(name):
            text += f": {_format_value(fields[name], _LONGEST_WHY)}"
    rest = [
        f"{_plain_name(name)}={_cut(format_value(value), _LONGEST)}"
        for name, value in fields.items()
        if value is not None and name not in _SHOWN_ELSEWHERE
    ]
    if rest:
        text += f" ({' '.join(rest)})"
    if fields.keys().isdisjoint(_MULTILINE_FIELDS):
        return text
    for name in _OWN_LINE_FIELDS:
        if name in fields:
            text += "".join(f"\n  {name}: {row}" for row in _rows(fields[name]))
    traceback = fields.get("traceback")
    if isinstance(traceback, str):
        rows = traceback.rstrip("\n").split("\n")
        text += "".join(f"\n  {escaped(row)}" for row in rows)
    return text


def _rows(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [_format_value(each, _LONGEST_WHY) for each in values if each is not None]


def _format_value(value: Any, longest: int) -> str:
    return _cut(escaped(value) if isinstance(value, str) else format_value(value), longest)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]}…"


def _binary_field(name: str, text: str) -> bytes:
    data = encoded(text)
    return b"%b\n%b%b\n" % (name.encode(), struct.pack("<Q", len(data)), data)


# Memoized pure functions: every line has the same few names.
@functools.lru_cache(maxsize=1024)
def _plain_name(name: str) -> str:
    return escaped(name)


@functools.lru_cache(maxsize=1024)
def field_name(name: str) -> str:
    """The journal's name of the field *name*: capitals, digits and underscores only."""
    known = _KNOWN.get(name)
    return known or (PREFIX + _NO_NAME.sub("_", name.upper()))[:_LONGEST_NAME]


# -- the socket -----------------------------------------------------------------------------


@attrs.define(eq=False)
class JournaldSocket:
    """A Descriptor (see output_descriptor) for whole records; made by open_journald()."""

    _socket: socket.socket
    _path: str
    is_terminal: bool = False

    @property
    def fd(self) -> int:
        """The descriptor to wait for until it is writable."""
        return self._socket.fileno()

    def write(self, data: bytes) -> int:
        """Send *data* as one record, and return its length; 0 if the journal cannot accept it now.

        Raises OSError if this record cannot be sent at all, or this process has no memory for it.
        """
        try:
            return self._send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            if error.errno not in _UNAVAILABLE:
                raise
        try:
            self._socket.connect(self._path)
            return self._send(data)
        except OSError:
            return 0

    def close(self) -> None:
        """Close the socket. Records that were sent stay in the journal's queue."""
        self._socket.close()

    def _send(self, data: bytes) -> int:
        if len(data) <= _LARGE:
            try:
                return self._socket.send(data, socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno not in _TOO_LARGE:
                    raise
        file = os.memfd_create("reconciled-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            socket.send_fds(self._socket, [b""], [file], socket.MSG_NOSIGNAL)
        finally:
            os.close(file)
        return len(data)


def open_journald(
    environment: Mapping[str, str], descriptor: int, *, force: bool, path: str
) -> JournaldSocket | None:
    """The socket of the journal if the manager connected *descriptor* to the journal; else None.

    *force*: also if it did not. None then means that there is no journal.
    """
    if not force and environment.get("JOURNAL_STREAM") != _identity(descriptor):
        return None
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        opened.settimeout(0)
        opened.connect(path)
    except OSError:
        opened.close()
        return None
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    return JournaldSocket(opened, path)


def _identity(descriptor: int) -> str:
    """*descriptor* in the form of JOURNAL_STREAM.

    The variable alone proves nothing: a program that inherits it may write elsewhere.
    """
    try:
        status = os.fstat(descriptor)
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"
