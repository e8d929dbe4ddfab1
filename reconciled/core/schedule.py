"""When timers are due: arithmetic only, with the present handed in.

* An interval keeps to a grid that begins where its timer began: slow runs and jitter never add
  up to a drift, and grid points that were missed are one tick, not many.
* A cron time is a wall clock time in one zone. Each passes once: a time that a clock change
  skips is due at the end of the gap, one that it repeats is due the first time only.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, tzinfo

import attrs
from cronsim import CronSim, CronSimError

# A clock set back by less than this was corrected: times that passed are not due again. Beyond
# it the old time was wrong, and waiting for it to come again would miss the right ones.
CORRECTION = timedelta(hours=1)
_FIELDS = 5
_LEAP_YEAR = datetime(2024, 1, 1, tzinfo=UTC)


@attrs.frozen
class Every:
    """Due each *interval* seconds, later by up to *jitter* (a share of the interval, below 1)."""

    interval: float
    jitter: float = 0.1

    def __attrs_post_init__(self) -> None:
        if not 0 < self.interval < math.inf:
            raise ValueError(f"an interval is longer than 0 s, not {self.interval:g} s")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter is a share from 0% to below 100%, not {self.jitter:.0%}")

    def due(self, began: float, tick: int, chance: float) -> float:
        """The time of tick number *turn* (from 1); *chance* from [0, 1) places it in its jitter."""
        return began + self.interval * (tick + self.jitter * chance)

    def next_tick(self, began: float, tick: int, now: float) -> int:
        """The number of the tick to wait for at *now*, when *turn* was the last that came."""
        # At least one on: rounding may put a tick a hair before its own grid point.
        return max(tick + 1, math.floor((now - began) / self.interval) + 1)


@attrs.frozen
class Cron:
    """Due by a cron expression of five fields, read in *zone*.

    Raises ValueError, with a remedy, for an expression that cannot be read or never comes.
    """

    expression: str
    zone: tzinfo

    def __attrs_post_init__(self) -> None:
        count = len(self.expression.split())
        if count != _FIELDS:
            raise ValueError(
                f"{self.expression!r} has {count} fields: write five, minute hour day month"
                " weekday, as in '0 4 * * *'"
            )
        try:
            next(CronSim(self.expression, _LEAP_YEAR))
        except CronSimError as error:
            raise ValueError(
                f"{self.expression!r} is not a cron expression: {str(error).lower()}"
            ) from error
        except StopIteration as error:
            raise ValueError(f"{self.expression!r} names a date that never comes") from error

    def due(self, now: datetime, last_due: datetime | None = None) -> datetime:
        """The next time, in UTC, after *now* and after *passed*, the last one that was due.

        *passed* counts for nothing where the clock was set back by more than a correction.
        """
        after = now
        if last_due is not None and now < last_due <= now + CORRECTION:
            after = last_due
        start = after.astimezone(self.zone)
        for time in CronSim(self.expression, start):
            # In UTC: within one zone, datetimes are compared by their digits, and of an hour
            # that a clock change repeats both passes would be equal.
            if time.astimezone(UTC) > after:
                return time.astimezone(UTC)
        raise AssertionError(f"{self.expression!r} was found to come, and did not")
