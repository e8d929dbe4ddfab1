"""What a log line speaks of: which lines are repetitions of one another, and which are changes.

core.folding decides what becomes of a repetition; here a line is made into what it looks at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from reconciled.core.repeat_filter import FAULTS, Line

# Events whose equal lines each say something: never folded. A stop interrupts each key once, and a
# thousand of them at once: to look for repetitions took a fifth of the time until they are out.
# Those of a reload are answers: who asks again, and reads nothing, takes the daemon for deaf.
_ANSWERS = ("reload.", "config.invalid", "removals.")
UNFOLDED = (
    *("tasks.", "stop.", "log.dropped", "fault.recovered", "reconcile.interrupted"),
    *_ANSWERS,
    *("shutdown.announced", "shutdown.drained", "shutdown.overran", "shutdown.cancelled"),
)
# Differ between lines that say the same; so does every duration, by its name's ending.
_VOLATILE = frozenset({"event", "run", "cause", "causes", "attempt", "exc_info"})
_DURATION = "_s"
_REASON = ("reason", "error")
_LONGEST_SUBJECT = 128


def folding_line(level: str, fields: Mapping[str, Any]) -> Line:
    """*fields* are plain data, with ``event`` among them."""
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
        # One fault of a key at a time: whatever else differs is a change of it.
        subject, reason = "", reason or _subject(stable)
    else:
        told = {k: v for k, v in stable.items() if k not in (*_REASON, "error_type", "errno")}
        # Lines that speak of nothing but their reason are not changes of one another.
        subject = _subject(told or stable)
    return Line(fields["event"], level, subject, reason, key, stable)


def _series_key(fields: Mapping[str, Any]) -> str | None:
    """What recovered() and forget() call it: the key, or a source as ``CONTROLLER: SOURCE``."""
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
