"""Durations as people write them: ``1m30s`` in, seconds out, and back."""

from __future__ import annotations

import re
from typing import NewType

# The type of a field that is written as a duration, in configuration, options and specs.
Seconds = NewType("Seconds", float)

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
LONGEST = 366 * 86400.0  # beyond this a duration is a typo, and timers lose precision


def parse_duration(text: str) -> float:
    """Seconds in *text*, which is ``(number(ms|s|m|h|d))+``. Raises ValueError, with a remedy."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(
            f"{text!r} is not a duration: write a number with a unit (ms, s, m, h, d), as in 1m30s"
        )
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > LONGEST:
        raise ValueError(f"{text!r} is longer than 366d")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest text that parse_duration() reads back as *seconds*, to the millisecond."""
    left = round(seconds * 1000)
    if left == 0:
        return "0s"
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)
