"""Which types of fields there are, what plain data could be one, and what messages call them."""

from __future__ import annotations

import collections.abc
import enum
import types
from collections.abc import Callable
from typing import Any, Literal, NewType, Union, get_origin

import attrs

from reconciled.core.durations import Seconds
from reconciled.service.credentials import Secret

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
    # A bool is an int to Python, never to a person; all else is written as text.
    return type(data) in {float: (int, float), int: (int,), bool: (bool,)}.get(kind, (str,))


def type_name(kind: Any) -> str:
    """*kind* in the words of a message."""
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
