"""Timers, on a virtual clock."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import attrs
import pytest
import trio
from trio.testing import MockClock

from reconciled.core.schedule import Cron, Every
from reconciled.core.sources import Report, Tick
from reconciled.watchers import timers
from reconciled.watchers.timers import (
    POLL_INTERVAL,
    CronWatcher,
    EveryWatcher,
    find_zone,
    local_zone,
)

START = datetime(2026, 3, 1, 3, 50, tzinfo=UTC)


@attrs.define(eq=False)
class Wall:
    """A wall clock that runs with trio's clock, and can be set."""

    began: float
    offset: timedelta = timedelta(0)

    def __call__(self) -> datetime:
        return START + timedelta(seconds=trio.current_time() - self.began) + self.offset


@attrs.define(eq=False)
class Ticks:
    """The times of ticks, in seconds of virtual time."""

    began: float
    times: list[float] = attrs.field(factory=list)

    def __call__(self, report: Report) -> None:
        assert isinstance(report, Tick)
        self.times.append(round(trio.current_time() - self.began, 3))


async def test_ticks_come_each_interval(autojump_clock: MockClock) -> None:
    """Without jitter ticks come at each interval, the first one after the first interval."""
    ticks = Ticks(autojump_clock.current_time())
    with trio.move_on_after(35):
        await EveryWatcher(Every(10, jitter=0), random.Random(1)).watch(ticks)
    assert ticks.times == [10, 20, 30]


async def test_jitter_is_drawn_from_the_given_chance(autojump_clock: MockClock) -> None:
    """Each tick comes within its own jitter, differently for another chance, without drift."""
    rows = []
    for seed in (1, 2):
        ticks = Ticks(autojump_clock.current_time())
        with trio.move_on_after(10_000.5):
            await EveryWatcher(Every(10, jitter=0.1), random.Random(seed)).watch(ticks)
        rows.append(ticks.times)
        for turn, time in enumerate(ticks.times, start=1):
            assert 10 * turn <= time < 10 * turn + 1
        assert len(ticks.times) in (999, 1000)
    assert rows[0] != rows[1]


async def test_ticks_missed_by_a_blocked_loop_are_one_tick(mock_clock: MockClock) -> None:
    """Several grid points that passed at once are one tick, and the next keeps to the grid."""
    ticks = Ticks(trio.current_time())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(EveryWatcher(Every(10, jitter=0), random.Random(1)).watch, ticks)
        for jump in (45, 4, 2):
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(jump)
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="test is over")
    assert ticks.times == [45, 51]


async def test_a_cron_time_comes_on_time(autojump_clock: MockClock) -> None:
    """A daily time ticks once a day, at that time."""
    began = autojump_clock.current_time()
    ticks = Ticks(began)
    with trio.move_on_after(2 * 86400):
        await CronWatcher(Cron("0 4 * * *", UTC), Wall(began)).watch(ticks)
    assert ticks.times == [600, 600 + 86400]


async def test_a_clock_set_forward_is_noticed(autojump_clock: MockClock) -> None:
    """A wall clock that jumps past several due times gives one tick, a step later at most."""
    began = autojump_clock.current_time()
    wall, ticks = Wall(began), Ticks(began)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(CronWatcher(Cron("*/10 * * * *", UTC), wall).watch, ticks)
        await trio.sleep(65)
        wall.offset = timedelta(hours=3)
        await trio.sleep(60)
        assert ticks.times == [90]
        await trio.sleep(600)
        nursery.cancel_scope.cancel(reason="test is over")
    assert ticks.times == [90, 600]


async def test_a_clock_set_back_is_noticed(autojump_clock: MockClock) -> None:
    """After the clock was set back for hours, the times of the new present are due."""
    began = autojump_clock.current_time()
    wall, ticks = Wall(began), Ticks(began)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(CronWatcher(Cron("*/10 * * * *", UTC), wall).watch, ticks)
        await trio.sleep(605)
        assert ticks.times == [600]
        wall.offset = -timedelta(hours=5)
        await trio.sleep(600)
        nursery.cancel_scope.cancel(reason="test is over")
    assert ticks.times == [600, 1200]


async def test_a_corrected_clock_repeats_no_tick(autojump_clock: MockClock) -> None:
    """A clock set back for a second after a tick passes the time again without a tick."""
    began = autojump_clock.current_time()
    wall, ticks = Wall(began), Ticks(began)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(CronWatcher(Cron("0 4 * * *", UTC), wall).watch, ticks)
        await trio.sleep(600.5)
        wall.offset = -timedelta(seconds=1)
        await trio.sleep(600)
        nursery.cancel_scope.cancel(reason="test is over")
    assert ticks.times == [600]


async def test_an_idle_timer_wakes_once_per_poll_interval(autojump_clock: MockClock) -> None:
    """An idle timer reads the clock once per POLL_INTERVAL."""
    began = autojump_clock.current_time()
    wall, looks = Wall(began), []

    def clock() -> datetime:
        looks.append(autojump_clock.current_time())
        return wall()

    with trio.move_on_after(20 * POLL_INTERVAL):
        await CronWatcher(Cron("0 23 * * *", UTC), clock).watch(lambda _report: None)
    assert len(looks) <= 22


def test_names() -> None:
    """Names show the configured time; a timer declares nothing."""
    every = EveryWatcher(Every(600), random.Random(1))
    cron = CronWatcher(Cron("0 4 * * *", ZoneInfo("Europe/Berlin")))
    assert (every.name, every.declares) == ("every 10m", False)
    assert (cron.name, cron.declares) == ("cron 0 4 * * * Europe/Berlin", False)


@pytest.mark.parametrize("name", ["Europe/Berln", "../etc/passwd", "", "Europe"])
def test_an_unknown_zone_is_refused(name: str) -> None:
    """A wrong zone is an error that shows what to write."""
    with pytest.raises(ValueError, match="write one like Europe/Berlin"):
        find_zone(name)


def test_the_local_zone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TZ comes first, then the machine's file, then UTC."""
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert local_zone() == ZoneInfo("Asia/Tokyo")
    monkeypatch.delenv("TZ")
    monkeypatch.setattr(timers, "_LOCAL_TIME", tmp_path / "localtime")
    assert local_zone() is UTC
    (tmp_path / "localtime").write_bytes(b"no zone")
    assert local_zone() is UTC
