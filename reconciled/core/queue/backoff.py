"""The backoff of a key after failed runs in a row.

Exponential with a cap and wide jitter, so that keys that failed together (R2: one server
was down) are retried spread out, from the first retry on. Invariants: no delay is above
``maximum``, none below a quarter of what the jitter starts from.
"""

from __future__ import annotations

import math
from random import Random

import attrs

# The jitter's lower end, as a share of the upper. Not 0 as in "full jitter": a failed run
# must never be retried immediately. Not 1/2 as in "equal jitter": the spread would be narrower.
MIN_JITTER_SHARE = 0.25
_DOUBLINGS = 62  # beyond any cap; keeps the power finite however often a key failed


@attrs.frozen
class Backoff:
    """The delays after failures of one controller's keys, in seconds (``retry:``)."""

    initial: float = attrs.field(default=1.0)
    maximum: float = attrs.field(default=300.0)

    def __attrs_post_init__(self) -> None:
        if not 0 < self.initial <= self.maximum < math.inf:
            raise ValueError(
                f"a backoff needs 0 < initial <= max, got {self.initial:g} s and {self.maximum:g} s"
            )

    def longest(self, failures: int) -> float:
        """The upper end of the delay after *failures* (>= 1) failed runs in a row."""
        return min(self.maximum, math.ldexp(self.initial, min(failures - 1, _DOUBLINGS)))

    def delay(self, failures: int, rng: Random) -> float:
        """A delay between a quarter of longest() and all of it, evenly spread."""
        longest = self.longest(failures)
        return longest * (MIN_JITTER_SHARE + (1 - MIN_JITTER_SHARE) * rng.random())
