"""Ids of operations: unique in the world, sorted by time, never used again.

They are the idempotency keys that programs and remote sides see.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import attrs

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's: sorts as its numbers do
_LENGTH = 26
_RANDOM_BITS = 80


@attrs.define(eq=False)
class OperationIds:
    """Makes ids: 48 bits of milliseconds and 80 random ones, as 26 characters (a ULID).

    Rising within a process even where the clock stands or goes back: the last time is kept
    then and the random part counts up.
    """

    _now: Callable[[], float] = time.time
    _random: Callable[[int], int] = secrets.randbits
    _last: int = 0

    def new(self) -> str:
        """An id above every one before."""
        fresh = (int(self._now() * 1000) << _RANDOM_BITS) | self._random(_RANDOM_BITS)
        if fresh >> _RANDOM_BITS > self._last >> _RANDOM_BITS:
            self._last = fresh
        else:
            self._last += 1 + self._random(32)
        digits = (self._last >> shift & 31 for shift in range(5 * (_LENGTH - 1), -1, -5))
        return "".join(_ALPHABET[digit] for digit in digits)
