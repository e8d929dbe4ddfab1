"""Hooks for scalars: numbers, text, durations, choices, references to secrets; none coerces."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, get_args

from reconciled.config.structuring.faults import (
    Fault,
    FaultCollector,
    Faults,
    Hook,
    describe,
    fault,
    unknown_message,
)
from reconciled.config.structuring.field_types import Share, parse_share
from reconciled.core.durations import Seconds, parse_duration
from reconciled.service.credentials import Secret

_LONGEST_INTEGER = 18  # digits that are certain to fit into 64 bits
_REFERENCE = "credential"


def _text(data: Any, _: Any) -> str:
    if isinstance(data, str):
        return data
    raise fault(f"takes text, got {describe(data)}{quote_hint(data)}")


def quote_hint(data: Any) -> str:
    """What to write if the field takes text and *data* is a number or a boolean."""
    if isinstance(data, bool | int | float):
        shown = describe(data).removeprefix("the number ")
        return f': write "{shown}"'
    return ""


def _integer(data: Any, _: Any) -> int:
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    raise fault(f"takes a whole number, got {describe(data)}{_unquote_hint(data)}")


def _float(data: Any, _: Any) -> float:
    if isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    raise fault(f"takes a number, got {describe(data)}{_unquote_hint(data)}")


def _unquote_hint(data: Any) -> str:
    if isinstance(data, str) and data.isdecimal() and len(data) <= _LONGEST_INTEGER:
        return f": write {data} without quotes"
    return ""


def _boolean(data: Any, _: Any) -> bool:
    if isinstance(data, bool):
        return data
    raise fault(f"takes true or false, got {describe(data)}")


def _seconds(data: Any, _: Any) -> float:
    if isinstance(data, str):
        return _parse_or_fault(parse_duration, data)
    near = ""
    if isinstance(data, int | float) and not isinstance(data, bool):
        near = f", or {data}s if seconds are meant"
    raise fault(f"takes a duration with a unit, got {describe(data)}: write 1m30s{near}")


def _share(data: Any, _: Any) -> float:
    if isinstance(data, str):
        return _parse_or_fault(parse_share, data)
    raise fault(f"takes a percentage, got {describe(data)}: write it as in 50%")


def _parse_or_fault(parse: Callable[[str], float], text: str) -> float:
    try:
        return parse(text)
    except ValueError as exc:
        raise fault(str(exc)) from exc


def _path(data: Any, _: Any) -> FilePath:
    if isinstance(data, str) and "\0" in data:
        raise fault("takes a path, and no path has the character NUL in it: remove it")
    if isinstance(data, str) and data:
        return FilePath(data)
    raise fault(f"takes a path, got {describe(data)}")


def _secret(data: Any, _: Any) -> Secret:
    if not isinstance(data, dict):
        # It may be the secret itself, so the message does not describe it.
        raise fault(
            "takes a reference to a secret and never the secret itself: write {credential: NAME},"
            " and LoadCredential=NAME:… in the unit"
        )
    found = FaultCollector()
    for key in data:
        if key != _REFERENCE:
            found.add(key, unknown_message("key", key, [_REFERENCE]), at_key=True)
    if _REFERENCE not in data and not found.faults:
        raise fault("names no credential: write {credential: NAME}")
    found.raise_any()
    try:
        return Secret(data[_REFERENCE])
    except ValueError as exc:
        raise Faults([Fault((_REFERENCE,), exc.args[0])]) from exc


def _anything(data: Any, _: Any) -> Any:
    return data


def _nothing(data: Any, _: Any) -> None:
    if data is not None:
        raise fault(f"takes nothing, got {describe(data)}")


# Types for which cattrs has its own hooks, which coerce.
COERCED = (str, int, float, bool, FilePath)
SIMPLE: dict[Any, Hook] = {
    str: _text,
    int: _integer,
    float: _float,
    bool: _boolean,
    FilePath: _path,
    Seconds: _seconds,
    Share: _share,
    Secret: _secret,
    Any: _anything,
    object: _anything,
    None: _anything,  # the type of a field without an annotation
    types.NoneType: _nothing,
}


def literal_hook(kind: Any) -> Hook:
    """The hook of a Literal: one of its values, of the same type."""
    return _choice_hook({value: value for value in get_args(kind)})


def enum_hook(kind: Any) -> Hook:
    """The hook of an enumeration: the value of one of its members."""
    return _choice_hook({member.value: member for member in kind})


def _choice_hook(choices: dict[Any, Any]) -> Hook:
    def hook(data: Any, _: Any) -> Any:
        for value, choice in choices.items():
            if type(value) is type(data) and value == data:
                return choice
        names = [str(value) for value in choices]
        if isinstance(data, str):
            raise fault(unknown_message("value", data, names))
        raise fault(f"takes one of {', '.join(names)}, got {describe(data)}")

    return hook
