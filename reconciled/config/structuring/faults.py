"""What does not fit a type, relative to the value that was to be read; positions come later."""

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
    """*message* about the value at *path*; about its key where at_key is set."""

    path: Path
    message: str
    at_key: bool = False


class Faults(Exception):
    """Everything that keeps one value from being read."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("; ".join(fault.message for fault in faults))
        self.faults = faults


def fault(message: str) -> Faults:
    """The exception for a value that is wrong as a whole."""
    return Faults([Fault((), message)])


@attrs.define(eq=False)
class FaultCollector:
    """Gathers the faults of a value's parts, so that all are reported at once."""

    faults: list[Fault] = attrs.Factory(list)

    @contextmanager
    def inside(self, step: str | int) -> Iterator[None]:
        """Catch the Faults raised in the body: they are of the part *step*."""
        try:
            yield
        except Faults as exc:
            for part in exc.faults:
                self.faults.append(Fault((step, *part.path), part.message, part.at_key))

    def add(self, step: str | int, message: str, *, at_key: bool = False) -> None:
        """Note a fault of the part *step* itself."""
        self.faults.append(Fault((step,), message, at_key))

    def raise_any(self) -> None:
        """Raise Faults if there are any."""
        if self.faults:
            raise Faults(self.faults)


def guess(word: str, known: Iterable[str]) -> str | None:
    """Which of *known* was probably meant by *word*."""
    names = list(known)
    # A wrong form of the right word (camelCase, dashes) is nearer than its letters tell.
    folded = {name.replace("_", "").lower(): name for name in names}
    same = folded.get(word.replace("_", "").replace("-", "").lower())
    if same is not None:
        return same
    # Words far longer than any name have no near one, and comparing costs their length.
    close = difflib.get_close_matches(word, names, 1, 0.6) if len(word) <= _LONGEST_NAME else []
    return close[0] if close else None


def unknown_message(what: str, word: str, known: Iterable[str]) -> str:
    """The message for a *word* that is none of *known*: with the nearest one, or with all."""
    names = sorted(known)
    shown = word if len(word) <= _LONGEST_NAME else word[: _LONGEST_NAME - 1] + "…"
    close = guess(word, names)
    if close is not None:
        return f"unknown {what} {shown}: did you mean {close}?"
    if not names:
        return f"unknown {what} {shown}: none is taken here"
    return f"unknown {what} {shown}: it can be {', '.join(names)}"


def describe(value: Any) -> str:
    """*value* in the words of a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return "text"  # it may be a secret, and its place is told anyway
    return "a list" if isinstance(value, list) else "a mapping"


Hook = Callable[[Any, Any], Any]
