"""Determines which log lines repeat one another, and which are changes.

RepeatFilter (core) decides whether a repetition is written; here a line becomes its input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from reconciled.core.repeat_filter import FAULTS, Line

# Events that are never folded, since each of their equal lines is information. A stop interrupts
# each key once, a thousand of them at once: folding took a fifth of the time to write them.
# Lines of a reload are replies: without a line a repeated request would seem to be ignored.
_ANSWERS = ("reload.", "config.invalid", "removals.")
UNFOLDED = (
    *("tasks.", "stop.", "log.dropped", "fault.recovered", "reconcile.interrupted"),
    *_ANSWERS,
    *("shutdown.announced", "shutdown.drained", "shutdown.overran", "shutdown.cancelled"),
)
# Fields that differ between repetitions; durations, recognised by their ending, do as well.
_VOLATILE = frozenset({"event", "run", "cause", "causes", "attempt", "exc_info"})
_DURATION = "_s"
_REASON = ("reason", "error")
_LONGEST_SUBJECT = 128


def folding_line(level: str, fields: Mapping[str, Any]) -> Line:
    """The input of RepeatFilter for one line. *fields* are plain data and include ``event``."""
    stable = {
        name: value
        for name, value in fields.items()
        if name not in _VOLATILE and not name.endswith(_DURATION)
    }
    key = _series_key(fields)
    if level not in FAULTS:
        return Line(fields["event"], level, _subject(stable), key=key, fields=stable)
    reason = next((str(fields[name]) for name in _REASON if fields.get(name)), "")
    if key is not None:
        # A key has one fault at a time: any other difference is a change of that fault.
        subject, reason = "", reason or _subject(stable)
    else:
        others = {k: v for k, v in stable.items() if k not in (*_REASON, "error_type", "errno")}
        # Lines with no field but their reason are not changes of one another.
        subject = _subject(others or stable)
    return Line(fields["event"], level, subject, reason, key, stable)


def _series_key(fields: Mapping[str, Any]) -> str | None:
    """The name that mark_recovered() and forget() use: the key, or ``CONTROLLER: SOURCE``."""
    key = fields.get("key")
    if isinstance(key, str):
        return key
    if "controller" in fields and "source" in fields:
        return f"{fields['controller']}: {fields['source']}"
    return None


def _subject(fields: Mapping[str, Any]) -> str:
    text = repr(sorted(fields.items()))
    if len(text) <= _LONGEST_SUBJECT:
        return text
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
