"""One log line as an entry of systemd's journal, in the journal's native protocol.

1. MESSAGE is what a person reads: ``EVENT KEY: REASON (FIELD=VALUE …)``. The journal shows time
   and unit before it, and the priority as a colour, so that none of them stands in it.
2. Each field of the line is a field of the entry as well, by which entries can be looked for:
   ``RECONCILED_`` and its name. Those that the journal has names for take them.
3. Nothing in a value can end it or begin a field of its own: what has a newline goes with its
   length before it.

Where in the code a line comes from is left out: an event is logged in one place, mostly, and to
look for that place costs as much as the entry.
"""

from __future__ import annotations

import functools
import json
import re
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
# Of one field, and of the words that say why; the field of the entry has it whole.
_LONGEST, _LONGEST_WHY = 200, 1000
_REASON_FIELDS = ("reason", "error")
# A line for each of them: to be copied, or to be read as a list.
_OWN_LINE_FIELDS = ("evidence", "where", "settle", "report", "look_at")
_MULTILINE_FIELDS = (*_OWN_LINE_FIELDS, "traceback")
# Told by the message in a way of its own, or by another field of it.
_SHOWN_ELSEWHERE = frozenset({"key", *_REASON_FIELDS, *_OWN_LINE_FIELDS, "traceback", "errno"})
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode


def syslog_identifier(environment: Mapping[str, str]) -> str:
    """``reconciled``, or ``reconciled-NAME`` for an instance.

    The manager tells nobody what SyslogIdentifier= is; in the shipped units the runtime directory
    has the same name.
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
        """The datagram of an event. *fields* are plain data; those that are None are left out."""
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
    """What a person reads of it: one line, and below it lists and a traceback, if there are any."""
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


# Memos of pure functions: the same few names come with every line.
@functools.lru_cache(maxsize=1024)
def _plain_name(name: str) -> str:
    return escaped(name)


@functools.lru_cache(maxsize=1024)
def field_name(name: str) -> str:
    """What the journal calls the field *name*: capitals, digits and underscores alone."""
    known = _KNOWN.get(name)
    return known or (PREFIX + _NO_NAME.sub("_", name.upper()))[:_LONGEST_NAME]
