"""Watchers that make a controller's keys due by time, and declare no resources.

1. Due times that pass together, however many, are one tick.
2. A wait for a wall clock time is a series of short waits: a monotonic sleep notices neither a
   change of the clock nor a suspended machine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import attrs
import trio

from reconciled.core.durations import format_duration
from reconciled.core.schedule import Cron, Every
from reconciled.core.sources import Report, Tick

POLL_INTERVAL = 30.0  # seconds: the delay until a clock change or a suspend is noticed
_LOCAL_TIME = Path("/etc/localtime")


@attrs.define(eq=False)
class EveryWatcher:
    """Ticks at an interval, first after one interval; *rng* places each tick within the jitter."""

    every: Every
    rng: random.Random

    @property
    def name(self) -> str:
        """``every 10m``."""
        return f"every {format_duration(self.every.interval)}"

    @property
    def declares(self) -> bool:
        """False: a timer declares no resources."""
        return False

    async def watch(self, report: Callable[[Report], None]) -> None:
        """Report ticks until cancelled."""
        began, turn = trio.current_time(), 1
        while True:
            await trio.sleep_until(self.every.due(began, turn, self.rng.random()))
            report(Tick(self.name))
            turn = self.every.next_tick(began, turn, trio.current_time())


def _wall_clock() -> datetime:
    return datetime.now(UTC)


@attrs.define(eq=False)
class CronWatcher:
    """Ticks at wall clock times; *clock* returns the current time, with a zone."""

    cron: Cron
    clock: Callable[[], datetime] = _wall_clock

    @property
    def name(self) -> str:
        """``cron 0 4 * * *``, with the zone where it has a name."""
        zone = getattr(self.cron.zone, "key", None)
        return f"cron {self.cron.expression}" + (f" {zone}" if zone else "")

    @property
    def declares(self) -> bool:
        """False: a timer declares no resources."""
        return False

    async def watch(self, report: Callable[[Report], None]) -> None:
        """Report ticks until cancelled."""
        last = self.clock()
        passed: datetime | None = None
        due = self.cron.due(last)
        while True:
            now = self.clock()
            if now >= due:
                report(Tick(self.name))
                passed = due
                due = self.cron.due(now, passed)
            elif now < last:
                due = self.cron.due(now, passed)
            last = now
            await trio.sleep(min(POLL_INTERVAL, max(0.0, (due - now) / timedelta(seconds=1))))


def find_zone(name: str) -> tzinfo:
    """The time zone *name*, as in ``Europe/Berlin``. Raises ValueError with a remedy."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is not a time zone: write one like Europe/Berlin") from error


def local_zone() -> tzinfo:
    """The machine's time zone: ``$TZ``, else ``/etc/localtime``, else UTC. Raises ValueError."""
    name = os.environ.get("TZ", "").removeprefix(":")
    if name:
        return find_zone(name)
    try:
        with _LOCAL_TIME.open("rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        return UTC
