"""Structures plain data into attrs classes: configuration, options and specs alike.

cattrs finds the hook for a type. The hooks are defined here, because those of cattrs coerce
("abc" to a list of letters, 5 to "5"), stop at the first fault of a kind, and know no positions.

1. Nothing is coerced, except that a float field takes a whole number.
2. All faults are reported at once, each at its location.
3. A class may come from a plugin: what its validators and converters raise is a fault of the
   value, SystemExit and KeyboardInterrupt included.
"""

from __future__ import annotations

import contextlib
import operator
import types
from functools import partial
from typing import Any, TypeVar, cast, get_args, get_origin

import attrs
import cattrs

from reconciled.config.structuring.faults import (
    Fault,
    FaultCollector,
    Faults,
    Hook,
    describe,
    fault,
    guess,
    unknown_message,
)
from reconciled.config.structuring.field_types import (
    SEQUENCES,
    is_enum,
    is_literal,
    is_mapping,
    is_sequence,
    is_union,
    shape_fits,
    type_name,
)
from reconciled.config.structuring.primitives import (
    COERCED,
    SIMPLE,
    enum_hook,
    literal_hook,
    quote_hint,
)
from reconciled.config.yaml.positions import Path, Positions
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem

T = TypeVar("T")


@attrs.define(eq=False, init=False)
class Structurer:
    """Structures plain data. Reuse one instance: it caches how to read each class."""

    _converter: cattrs.Converter

    def __init__(self) -> None:
        # Without detailed validation, since faults are collected here. What cattrs structures by
        # its own hooks (dataclasses) is refused at the first fault, and not coerced either.
        self._converter = cattrs.Converter(detailed_validation=False, forbid_extra_keys=True)
        factory = self._converter.register_structure_hook_factory
        # cattrs tries hooks that are registered later first.
        factory(attrs.has, self._class_hook)
        factory(is_mapping, self._mapping_hook)
        factory(is_sequence, self._sequence_hook)
        factory(is_union, self._union_hook)
        factory(is_literal, literal_hook)
        for kind, hook in SIMPLE.items():
            if kind in COERCED:
                # It must replace the hook of cattrs itself, which is tried first and coerces.
                self._converter.register_structure_hook(kind, hook)
            else:
                self._converter.register_structure_hook_func(partial(operator.is_, kind), hook)

    def structure(self, cls: type[T], data: Any, positions: Positions, path: Path = ()) -> T:
        """*data*, written at *path* of *positions*, as a *cls*.

        Raises Invalid with a problem for each fault.
        """
        try:
            return cast("T", self._read(data, cls))
        except Faults as exc:
            problems = [_to_problem(part, positions, path) for part in exc.faults]
            raise Invalid(problems) from exc

    def _read(self, data: Any, kind: Any) -> Any:
        try:
            if is_enum(kind):
                # cattrs would treat an enumeration of strings as a string.
                return enum_hook(kind)(data, kind)
            return self._converter.get_structure_hook(kind)(data, kind)
        except Faults:
            raise
        except Exception as exc:
            raise fault(f"cannot be read as {type_name(kind)}: {exc}") from exc

    def _class_hook(self, cls: Any) -> Hook:
        attrs.resolve_types(get_origin(cls) or cls)
        fields = {
            field.alias or field.name: field
            for field in attrs.fields(get_origin(cls) or cls)
            if field.init
        }

        def hook(data: Any, _: Any) -> Any:
            if not isinstance(data, dict):
                raise fault(f"takes a mapping of {_join_names(fields)}, got {describe(data)}")
            found = FaultCollector()
            meant = _collect_unknown_keys(data, fields, found)
            values = {}
            for name, field in fields.items():
                if name in data:
                    with found.inside(name):
                        values[name] = self._read(data[name], field.type)
                elif field.default is attrs.NOTHING and name not in meant:
                    found.faults.append(Fault((), f"{name} is missing: add {name}"))
            _collect_invalid_values(values, fields, found)
            found.raise_any()
            return _construct(cls, values)

        return hook

    def _mapping_hook(self, kind: Any) -> Hook:
        arguments = get_args(kind) or (str, Any)

        def hook(data: Any, _: Any) -> Any:
            if not isinstance(data, dict):
                raise fault(f"takes a mapping, got {describe(data)}{_empty_hint(data, '{}')}")
            found = FaultCollector()
            result = {}
            for key, value in data.items():
                with found.inside(key):
                    result[key] = self._read(value, arguments[1])
            found.raise_any()
            return result

        return hook

    def _sequence_hook(self, kind: Any) -> Hook:
        made = SEQUENCES[get_origin(kind) or kind]
        arguments = get_args(kind)
        fixed = made is tuple and arguments and arguments[-1] is not ...
        fixed = fixed and get_origin(kind) is tuple

        def hook(data: Any, _: Any) -> Any:
            if not isinstance(data, list):
                near = ": put [ ] around it" if isinstance(data, str) else ""
                raise fault(f"takes a list, got {describe(data)}{near}{_empty_hint(data, '[]')}")
            if fixed and len(data) != len(arguments):
                raise fault(f"takes a list of {len(arguments)} elements, got {len(data)}")
            found = FaultCollector()
            result = []
            for index, element in enumerate(data):
                with found.inside(index):
                    inner = arguments[index if fixed else 0] if arguments else Any
                    result.append(self._read(element, inner))
            found.raise_any()
            try:
                return made(result)
            except TypeError as exc:
                raise fault("takes a list of simple values") from exc

        return hook

    def _union_hook(self, kind: Any) -> Hook:
        members = [member for member in get_args(kind) if member is not types.NoneType]
        optional = types.NoneType in get_args(kind)

        def hook(data: Any, _: Any) -> Any:
            if data is None and optional:
                return None
            fitting = [member for member in members if shape_fits(data, member)]
            # With one candidate, its own faults; with none or several, the list of types.
            if len(fitting) == 1 or len(members) == 1:
                return self._read(data, (fitting or members)[0])
            for member in fitting:
                try:
                    return self._read(data, member)
                except Faults:
                    continue
            near = quote_hint(data) if str in members else ""
            raise fault(f"takes {' or '.join(map(type_name, members))}, got {describe(data)}{near}")

        return hook


def _collect_unknown_keys(
    data: dict[str, Any], fields: dict[str, Any], found: FaultCollector
) -> set[str]:
    """Record the keys that are not fields; return the fields that they probably stand for.

    One mistake gives one message: a misspelt field is not reported as missing too.
    """
    meant = set()
    for key in data:
        if key not in fields:
            free = [name for name in fields if name not in data]
            found.add(key, unknown_message("key", key, free or fields), at_key=True)
            meant.add(guess(key, free) or "")
    return meant


def _collect_invalid_values(
    values: dict[str, Any], fields: dict[str, Any], found: FaultCollector
) -> None:
    """Record what the validator of each part that could be read raises.

    Constructing the object would report only the first, and none while a part is missing.
    """
    partly = types.SimpleNamespace(**{fields[key].name: values[key] for key in values})
    for key, value in values.items():
        if fields[key].validator is None:
            continue
        # Another error may be caused by a missing part: constructing the object reports it.
        with contextlib.suppress(Exception, SystemExit, KeyboardInterrupt):
            try:
                fields[key].validator(partly, fields[key], value)
            except ValueError as exc:
                found.add(key, str(exc.args[0]) if exc.args else "is not valid")


def _construct(cls: Any, values: dict[str, Any]) -> Any:
    try:
        return cls(**values)
    except (Exception, SystemExit, KeyboardInterrupt) as exc:
        # Signal handlers never raise here, so the last two come from the class as well.
        # The message is the first of args; the validators of attrs and ours add the attribute.
        message = str(exc.args[0]) if exc.args else type(exc).__name__
        named = [arg.alias for arg in exc.args[1:] if isinstance(arg, attrs.Attribute)]
        path = (named[0],) if named and named[0] is not None else ()
        raise Faults([Fault(path, message)]) from exc


def _to_problem(part: Fault, positions: Positions, path: Path) -> Problem:
    if part.at_key:
        return positions.problem_at_key((*path, *part.path), part.message)
    return positions.problem((*path, *part.path), part.message)


def _join_names(fields: dict[str, Any]) -> str:
    return ", ".join(fields) if fields else "nothing"


def _empty_hint(data: Any, empty: str) -> str:
    return f": write {empty} for an empty one" if data is None else ""
