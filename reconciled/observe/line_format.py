"""Formats one log line: as text for a terminal, or as one JSON object.

1. A line stays one line: nothing in a value can end it, begin another one, or control the
   terminal (newlines, escape sequences, text direction).
2. time, level and event come first, in this order, then key and run, then the others as given.
3. Only a traceback has further lines on a terminal; each is indented and marked.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

_FIRST = ("key", "run")
# C1 controls, line separators and direction marks: JSON and repr do not escape them.
_UNSAFE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff]")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\\\\]")
_BARE = re.compile(r"[^\s\"'=\\\x00-\x1f]+")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
# Created once: json.dumps() creates an encoder for each call that has options.
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_SPACED = json.JSONEncoder(ensure_ascii=False).encode
# Except for infinities JSON writes them as str() does, and its encoder takes ten times as long.
NUMBERS = frozenset({int, float})
_EVENT_WIDTH = 24  # most names are shorter: fields start in one column
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"
_COLOURS = {
    "debug": "\x1b[2m",
    "info": "\x1b[32m",
    "warning": "\x1b[33m",
    "error": "\x1b[31m",
    "critical": "\x1b[1;31m",
}

# Converts moment, level, event and fields into one record of the sink.
Renderer = Callable[[str, str, str, Mapping[str, Any]], bytes]


@attrs.define(eq=False)
class TimestampFormatter:
    """RFC 3339 times in UTC with milliseconds. Threads may share it."""

    # The latest second and its text: formatting it costs more than the rest of a short line.
    _last: tuple[int, str] = attrs.field(default=(-1, ""), init=False)

    def format(self, seconds: float) -> str:
        """*seconds* since the epoch, as ``2026-01-31T23:59:59.999Z``."""
        # Rounded: a computed time may be slightly below the intended value.
        whole, milliseconds = divmod(round(seconds * 1000), 1000)
        last = self._last
        if whole != last[0]:
            last = (whole, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)))
            self._last = last
        return f"{last[1]}.{milliseconds:03d}Z"


def json_line(moment: str, level: str, event: str, fields: Mapping[str, Any]) -> bytes:
    """One JSON object. *fields* are plain data."""
    line = {"time": moment, "level": level, "event": event}
    for name in _FIRST:
        if name in fields:
            line[name] = fields[name]
    for name, value in fields.items():
        if name not in line:
            line[name] = value
    text = _ENCODE(line)
    # isascii() is cheap, and such characters occur within JSON strings only.
    if not text.isascii() or "\x7f" in text:
        text = _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return encoded(text + "\n")


def text_line(moment: str, level: str, event: str, fields: Mapping[str, Any]) -> bytes:
    """Aligned text without colour."""
    return _text(moment, level, event, fields, colour=False)


def colour_line(moment: str, level: str, event: str, fields: Mapping[str, Any]) -> bytes:
    """Aligned text with colour, for a terminal."""
    return _text(moment, level, event, fields, colour=True)


def encoded(text: str) -> bytes:
    """*text* as UTF-8; a lone surrogate, from a name that was not UTF-8, becomes a JSON escape."""
    return text.encode("utf-8", "backslashreplace")


def format_value(value: Any) -> str:
    """A field's plain *value* for a person: bare where that is unambiguous, otherwise quoted."""
    if isinstance(value, str):
        if _BARE.fullmatch(value) and not _CONTROL.search(value):
            return value
        return '"' + escaped(value).replace('"', '\\"') + '"'
    if value is None:
        return "-"
    if type(value) in NUMBERS:
        return str(value)
    return _UNSAFE.sub(_escape, _SPACED(value))


def escaped(text: str) -> str:
    """*text* with every control character, and the backslash, shown as an escape."""
    return _CONTROL.sub(_escape, text)


def _text(moment: str, level: str, event: str, fields: Mapping[str, Any], *, colour: bool) -> bytes:
    dim, bold, reset = (_DIM, _BOLD, _RESET) if colour else ("", "", "")
    shade = _COLOURS.get(level, "") if colour else ""
    traceback = fields.get("traceback")
    names = [name for name in _FIRST if name in fields]
    names += [name for name in fields if name not in _FIRST and name != "traceback"]
    shown = " ".join(f"{dim}{escaped(name)}={reset}{format_value(fields[name])}" for name in names)
    head = f"{dim}{moment}{reset} {shade}{level:<8}{reset} {bold}{escaped(event):<{_EVENT_WIDTH}}"
    line = f"{head}{reset} {shown}".rstrip()
    if isinstance(traceback, str):
        # split, not splitlines: the latter also splits at characters that escaped() escapes.
        rows = traceback.rstrip("\n").split("\n")
        line += "".join(f"\n    {dim}|{reset} {escaped(row)}" for row in rows)
    return encoded(line + "\n")


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in _NAMED:
        return _NAMED[character]
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"  # noqa: PLR2004 - one byte
