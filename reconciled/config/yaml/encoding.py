"""Decodes the bytes of a file: printable UTF-8, or a problem with its location.

A leading byte order mark and CRLF are accepted, since editors write them and YAML reads both
without loss. Everything else that is not printable UTF-8 is a problem: guessing an encoding
would change names and contents silently.
"""

from __future__ import annotations

import re

from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin

MAX_BYTES = 4 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"
# What YAML 1.2 calls printable, without the byte order mark: inside a text it is invisible, and
# usually comes from joined files.
_UNPRINTABLE = re.compile(
    "[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)


def decode(data: bytes, file: str) -> str:
    """The text of *data*. Raises Invalid with one problem if it is not text.

    *data* may be cut after MAX_BYTES + 1 bytes: it is refused for its size then.
    """
    if len(data) > MAX_BYTES:
        message = f"larger than {MAX_BYTES // 1024**2} MiB: split it into several files"
        raise Invalid([Problem(Origin(file), message)])
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise Invalid([Problem(Origin(file), "encoded as UTF-16: save it as UTF-8")])
    data = data.removeprefix(_BOM)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as exc:
        before = data[: exc.start].decode("utf-8")
        origin = origin_at(before, len(before), file)
        message = f"byte 0x{data[exc.start]:02x} is not UTF-8: save the file as UTF-8"
        raise Invalid([Problem(origin, message)]) from exc
    unprintable = _UNPRINTABLE.search(text)
    if unprintable is not None:
        origin = origin_at(text, unprintable.start(), file)
        raise Invalid([Problem(origin, _describe_unprintable(unprintable[0]))])
    return text


def origin_at(text: str, index: int, file: str) -> Origin:
    """The line and column of the character at *index*."""
    start = text.rfind("\n", 0, index) + 1
    return Origin(file, text.count("\n", 0, index) + 1, index - start + 1)


def _describe_unprintable(character: str) -> str:
    if character == "\0":
        return "a NUL byte: the file is damaged or is not text: write it again"
    if character == "\ufeff":
        return "a byte order mark inside the text: delete this invisible character"
    return (
        f"control character U+{ord(character):04X}: delete it, or write it as an escape "
        f'in double quotes ("\\u{ord(character):04x}")'
    )
