"""The types that a field may have: their names in messages, their own notation, their ranges.

A field whose type has its own notation (a duration, a share) holds a plain float once it is read;
the type only says which notation to expect.
"""

from __future__ import annotations

import collections.abc
import enum
import re
import types
from collections.abc import Callable
from typing import Any, Literal, NewType, Union, get_origin

import attrs

from reconciled.core.durations import Seconds
from reconciled.service.credentials import Secret

Share = NewType("Share", float)  # 0 to 1, written as a percentage: 50%

_PERCENTAGE = re.compile(r"([1-9]?[0-9](?:\.[0-9]+)?|100)%")

SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {
    list: list,
    tuple: tuple,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: tuple,
    collections.abc.Set: frozenset,
}
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def is_union(kind: Any) -> bool:
    """Whether *kind* is a union, optional ones included."""
    return get_origin(kind) in (Union, types.UnionType)


def is_literal(kind: Any) -> bool:
    """Whether *kind* is a Literal."""
    return get_origin(kind) is Literal


def is_enum(kind: Any) -> bool:
    """Whether *kind* is an enumeration."""
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def is_mapping(kind: Any) -> bool:
    """Whether *kind* is a mapping type."""
    return (get_origin(kind) or kind) in _MAPPINGS


def is_sequence(kind: Any) -> bool:
    """Whether *kind* is a type of list, tuple or set."""
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and origin in SEQUENCES


def shape_fits(data: Any, kind: Any) -> bool:
    """Whether *data* could be a *kind*, by its outermost type alone."""
    if kind in (Any, object):
        return True
    if attrs.has(get_origin(kind) or kind) or is_mapping(kind):
        return isinstance(data, dict)
    if is_sequence(kind):
        return isinstance(data, list)
    if is_literal(kind) or is_enum(kind):
        return isinstance(data, str | int)
    # In Python a bool is an int; in a file it is not. Every other type is written as text.
    return type(data) in {float: (int, float), int: (int,), bool: (bool,)}.get(kind, (str,))


def type_name(kind: Any) -> str:
    """*kind* as messages name it."""
    if isinstance(kind, NewType):
        return "a duration" if kind is Seconds else f"a {kind.__name__.lower()}"
    names = {
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        Secret: "{credential: NAME}",
    }
    if kind in names:
        return names[kind]
    if is_sequence(kind):
        return "a list"
    if is_mapping(kind):
        return "a mapping"
    return str(getattr(kind, "__name__", kind))


def parse_share(text: str) -> float:
    """The share that *text*, as in ``50%``, means: 0 to 1. Raises ValueError with a remedy."""
    match = _PERCENTAGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a share: write a percentage from 0% to 100%, as in 50%")
    return float(match[1]) / 100


def at_least(least: float) -> Callable[[Any, Any, Any], None]:
    """An attrs validator: the number is *least* or more."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value < least:
            # With the attribute, the fault is reported at the field, not at its mapping.
            raise ValueError(f"must be at least {least}, got {value}", attribute)

    return check


def positive(_: Any, attribute: Any, value: Any) -> None:
    """Refuse a duration that is zero (an attrs validator)."""
    if value <= 0:
        raise ValueError("must be longer than 0s", attribute)
