"""Faults: how a value does not fit its type, by path relative to the value, and their texts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from reconciled.config.yaml.positions import Path

_LONGEST_NAME = 80  # of keys in messages


@attrs.frozen
class Fault:
    """*message* about the value at *path*, or about its key if at_key is set."""

    path: Path
    message: str
    at_key: bool = False


class Faults(Exception):
    """All faults of one value."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


def fault(message: str) -> Faults:
    """The exception for a value that does not fit as a whole."""
    return Faults([Fault((), message)])


@attrs.define(eq=False)
class FaultCollector:
    """Collects the faults of a value's parts, so that all are reported at once."""

    faults: list[Fault] = attrs.Factory(list)

    @contextmanager
    def inside(self, step: str | int) -> Iterator[None]:
        """Catch the Faults that the body raises, and record them as faults of the part *step*."""
        try:
            yield
        except Faults as exc:
            for part in exc.faults:
                self.faults.append(Fault((step, *part.path), part.message, part.at_key))

    def add(self, step: str | int, message: str, *, at_key: bool = False) -> None:
        """Record a fault of the part *step*."""
        self.faults.append(Fault((step,), message, at_key))

    def raise_any(self) -> None:
        """Raise Faults if any were recorded."""
        if self.faults:
            raise Faults(self.faults)


def guess(word: str, known: Iterable[str]) -> str | None:
    """The name of *known* that *word* probably stands for; None: none is close."""
    names = list(known)
    # The right word in another form (camelCase, dashes) is closer than its edit distance.
    folded = {name.replace("_", "").lower(): name for name in names}
    same = folded.get(word.replace("_", "").replace("-", "").lower())
    if same is not None:
        return same
    # A word far longer than any name has no close match, and comparing costs its length.
    close = difflib.get_close_matches(word, names, 1, 0.6) if len(word) <= _LONGEST_NAME else []
    return close[0] if close else None


def unknown_message(what: str, word: str, known: Iterable[str]) -> str:
    """The message for a *word* that is not in *known*: with the closest name, or with all."""
    names = sorted(known)
    shown = word if len(word) <= _LONGEST_NAME else word[: _LONGEST_NAME - 1] + "…"
    close = guess(word, names)
    if close is not None:
        return f"unknown {what} {shown}: did you mean {close}?"
    if not names:
        return f"unknown {what} {shown}: no {what} is valid here"
    return f"unknown {what} {shown}: it can be {', '.join(names)}"


def describe(value: Any) -> str:
    """*value* as messages name it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "text"  # it may be a secret, and the message has its location
    return "a list" if isinstance(value, list) else "a mapping"


Hook = Callable[[Any, Any], Any]
