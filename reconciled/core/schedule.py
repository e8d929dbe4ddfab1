"""When timers are due: arithmetic only, with the current time handed in.

* An interval keeps to a grid that starts when its timer started: slow runs and jitter never add
  up to a drift, and several missed grid points are one tick.
* A cron time is a wall clock time in one zone. Each is due once: a time that a clock change
  skips is due at the end of the gap, one that it repeats is due the first time only.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, tzinfo

import attrs
from cronsim import CronSim, CronSimError

# A clock set back by less than this was corrected: times that have passed are not due again.
# Beyond it the old time was wrong, and waiting for it to pass again would miss the right ones.
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
            raise ValueError(f"an interval must be longer than 0 s, got {self.interval:g} s")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be from 0% to below 100%, got {self.jitter:.0%}")

    def due(self, began: float, tick: int, chance: float) -> float:
        """The time of tick number *tick* (from 1); *chance* in [0, 1) is its share of jitter."""
        return began + self.interval * (tick + self.jitter * chance)

    def next_tick(self, began: float, tick: int, now: float) -> int:
        """The number of the tick to wait for at *now*, when *tick* was the last one delivered."""
        # At least the next one: rounding may put a tick slightly before its own grid point.
        return max(tick + 1, math.floor((now - began) / self.interval) + 1)


@attrs.frozen
class Cron:
    """Due by a cron expression of five fields, read in *zone*.

    Raises ValueError, with a remedy, for an expression that is malformed or never due.
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
            raise ValueError(f"{self.expression!r} names a date that does not exist") from error

    def due(self, now: datetime, last_due: datetime | None = None) -> datetime:
        """The next time, in UTC, after *now* and after *last_due*, the last one that was due.

        *last_due* is ignored where the clock was set back by more than CORRECTION.
        """
        after = now
        if last_due is not None and now < last_due <= now + CORRECTION:
            after = last_due
        start = after.astimezone(self.zone)
        for time in CronSim(self.expression, start):
            # In UTC: within one zone, datetimes are compared by their digits, and both passes
            # of an hour that a clock change repeats would be equal.
            if time.astimezone(UTC) > after:
                return time.astimezone(UTC)
        raise AssertionError(f"{self.expression!r} was checked to be due at some time, and is not")
