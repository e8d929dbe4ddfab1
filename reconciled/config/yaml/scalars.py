"""The value of an unquoted YAML scalar; one that YAML readers interpret differently is refused.

1. Null is an empty scalar, ``~`` or ``null``; the booleans are ``true`` and ``false`` alone.
2. Numbers are decimal, ``0x…`` or ``0o…``, of 64 bits. A fraction is accepted only in the form
   in which it would be written back (``1.10`` would become 1.1, ``1e3`` 1000.0).
3. A scalar that YAML 1.1 and 1.2 read differently (``no``, ``0755``, ``22:22``, ``1_000``) is
   refused, with both ways to write it. A date is text: 1.2 has no dates, and text loses nothing.
"""

from __future__ import annotations

import re

Scalar = str | int | float | bool | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEAN = re.compile(r"(yes|on|true)|no|off|false", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_HEX_OR_OCTAL = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_BINARY_OR_GROUPED = re.compile(r"[-+]?(?:0b[01_]+|[0-9][0-9_]*_[0-9_]*)")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")
_FRACTION = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|nan)", re.IGNORECASE)
_LARGEST = 2**63
# An integer of more digits is refused unparsed: parsing costs the square of its length.
_DIGITS = 20


def parse_plain(text: str) -> Scalar:
    """The value of the unquoted *text*. Raises ValueError that says what to write instead."""
    if text in _NULL:
        return None
    if text == "true":
        return True
    if text == "false":
        return False
    first = text[0]
    if first.isdigit() or first in "-+.":
        return _number(text)
    boolean = _BOOLEAN.fullmatch(text)
    if boolean is not None:
        meant = "true" if boolean[1] else "false"
        raise ValueError(
            f'{text} is a boolean to some YAML readers: write {meant}, or "{text}" for the text'
        )
    return text


def _number(text: str) -> Scalar:
    if _INTEGER.fullmatch(text) or _HEX_OR_OCTAL.fullmatch(text):
        return _integer(text)
    if _LEADING_ZERO.fullmatch(text):
        digits = text.lstrip("-+0_") or "0"
        octal = f"0o{digits} (octal) or " if re.fullmatch("[0-7]+", digits) else ""
        raise ValueError(
            f"{text} is octal to some YAML readers and decimal to others: "
            f'write {octal}{digits} for the number, or "{text}" for the text'
        )
    if _SEXAGESIMAL.fullmatch(text):
        raise ValueError(f'{text} is a base-60 number to some YAML readers: write "{text}"')
    if _BINARY_OR_GROUPED.fullmatch(text):
        raise ValueError(
            f"{text} is a number to some YAML readers and text to others: "
            f'write it in plain digits, or "{text}" for the text'
        )
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f'{text} is not a finite number: write a number, or "{text}" for the text')
    if _FRACTION.fullmatch(text):
        return _fraction(text)
    return text


def _integer(text: str) -> int:
    value = int(text, 0) if len(text) <= _DIGITS else _LARGEST
    if not -_LARGEST <= value < _LARGEST:
        raise ValueError(f'{_short(text)} does not fit into 64 bits: write "{_short(text)}"')
    return value


def _fraction(text: str) -> float:
    value = float(text)
    canonical = repr(value)
    if canonical == text:
        return value
    if "inf" in canonical:
        raise ValueError(f'{_short(text)} is too large: write "{_short(text)}" for the text')
    raise ValueError(
        f"{_short(text)} would be read as the number {canonical} and lose its form: "
        f'write "{_short(text)}" for the text, or {canonical} for the number'
    )


def _short(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
