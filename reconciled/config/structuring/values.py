"""Types of fields that are written in a form of their own, and validators of their ranges.

Values are plain floats once read; the type only tells the reader which form to expect.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NewType

Share = NewType("Share", float)  # 0 to 1, written as a percentage: 50%

_PERCENTAGE = re.compile(r"([1-9]?[0-9](?:\.[0-9]+)?|100)%")


def parse_share(text: str) -> float:
    """The share that *text*, ``50%``, stands for. Raises ValueError, with a remedy."""
    match = _PERCENTAGE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no share: write a percentage from 0% to 100%, as in 50%")
    return float(match[1]) / 100


def at_least(least: float) -> Callable[[Any, Any, Any], None]:
    """An attrs validator: the number is *least* or more."""

    def check(_: Any, attribute: Any, value: Any) -> None:
        if value < least:
            # With the attribute the fault is reported at the field and not at its mapping.
            raise ValueError(f"must be at least {least}, got {value}", attribute)

    return check


def positive(_: Any, attribute: Any, value: Any) -> None:
    """Refuse a duration that is zero (an attrs validator)."""
    if value <= 0:
        raise ValueError("must be longer than 0s", attribute)
