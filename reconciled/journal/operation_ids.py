"""Ids of operations: globally unique, sorted by time, never reused.

Programs and remote systems use them as idempotency keys.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import attrs

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's base 32: sorts like its numbers
_LENGTH = 26
_RANDOM_BITS = 80


@attrs.define(eq=False)
class OperationIds:
    """Makes ids: 48 bits of milliseconds and 80 random bits, as 26 characters (a ULID).

    Ids rise within a process even if the clock does not, or is set back: then the last time is
    kept and the random part is incremented.
    """

    _now: Callable[[], float] = time.time
    _random: Callable[[int], int] = secrets.randbits
    _last: int = 0

    def new(self) -> str:
        """An id greater than every earlier one."""
        fresh = (int(self._now() * 1000) << _RANDOM_BITS) | self._random(_RANDOM_BITS)
        if fresh >> _RANDOM_BITS > self._last >> _RANDOM_BITS:
            self._last = fresh
        else:
            self._last += 1 + self._random(32)
        digits = (self._last >> shift & 31 for shift in range(5 * (_LENGTH - 1), -1, -5))
        return "".join(_ALPHABET[digit] for digit in digits)
