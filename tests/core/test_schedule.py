"""When timers are due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.schedule import CORRECTION, Cron, Every

BERLIN = ZoneInfo("Europe/Berlin")
START = datetime(2025, 1, 1, tzinfo=UTC)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_an_interval_keeps_to_its_grid() -> None:
    """Jitter delays each tick from its own grid point, and does not move the next one."""
    every = Every(600, jitter=0.1)
    assert every.due(1000.0, 1, 0.0) == 1600.0
    assert every.due(1000.0, 1, 0.5) == 1630.0
    assert every.due(1000.0, 2, 0.0) == 2200.0


def test_missed_grid_points_are_one_tick() -> None:
    """After a pause over several grid points the next tick is the first one in the future."""
    every = Every(600)
    assert every.next_tick(1000.0, 1, 1600.0) == 2
    assert every.next_tick(1000.0, 1, 1000.0 + 5 * 600 + 1) == 6


@given(
    interval=st.floats(0.001, 1e6),
    began=st.floats(0, 1e6),
    tick=st.integers(1, 10_000),
    jitter=st.floats(0, 0.99),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_tick_is_never_delivered_twice(
    interval: float, began: float, tick: int, jitter: float, chance: float
) -> None:
    """The tick after one delivered on time is the next one, whatever the rounding."""
    every = Every(interval, jitter)
    assert every.next_tick(began, tick, every.due(began, tick, chance)) == tick + 1


@pytest.mark.parametrize(("interval", "jitter"), [(0, 0.1), (-1, 0), (60, 1.0), (60, -0.1)])
def test_invalid_intervals_and_jitters_are_refused(interval: float, jitter: float) -> None:
    """An interval is positive, and its jitter is a share from 0 to below 1."""
    with pytest.raises(ValueError, match="must be"):
        Every(interval, jitter)


def test_cron_is_read_in_its_zone() -> None:
    """04:00 in Berlin is 02:00 UTC in summer and 03:00 UTC in winter."""
    cron = Cron("0 4 * * *", BERLIN)
    assert cron.due(utc("2026-01-10T12:00")) == utc("2026-01-11T03:00")
    assert cron.due(utc("2026-07-10T12:00")) == utc("2026-07-11T02:00")


def test_a_skipped_time_is_due_once_at_the_end_of_the_gap() -> None:
    """Clocks go from 02:00 to 03:00 on 2026-03-29: 02:15 and 02:45 are both due at 03:00, once."""
    cron = Cron("15,45 2 * * *", BERLIN)
    first = cron.due(utc("2026-03-28T12:00"))
    assert first == utc("2026-03-29T01:00")
    assert cron.due(first) == utc("2026-03-30T00:15")


def test_a_repeated_time_is_due_the_first_time_only() -> None:
    """02:00 to 03:00 occurs twice on 2026-10-25: 02:15 and 02:45 are due in the first pass."""
    cron = Cron("15,45 2 * * *", BERLIN)
    assert cron.due(utc("2026-10-24T12:00")) == utc("2026-10-25T00:15")
    assert cron.due(utc("2026-10-25T00:15")) == utc("2026-10-25T00:45")
    assert cron.due(utc("2026-10-25T00:45")) == utc("2026-10-26T01:15")
    # Started within the second pass, whose digits equal those of the first.
    assert cron.due(utc("2026-10-25T01:20")) == utc("2026-10-26T01:15")


def test_each_hour_means_each_real_hour() -> None:
    """An hourly time is due in both passes of a repeated hour."""
    cron = Cron("30 * * * *", BERLIN)
    due = [utc("2026-10-24T23:40")]
    for _ in range(3):
        due.append(cron.due(due[-1]))
    assert due[1:] == [utc(f"2026-10-25T0{hour}:30") for hour in range(3)]


def test_a_small_correction_of_the_clock_repeats_nothing() -> None:
    """Where the clock is set back by less than CORRECTION, a tick is not due again."""
    cron = Cron("0 4 * * *", UTC)
    passed = utc("2026-05-01T04:00")
    assert cron.due(passed - timedelta(seconds=1), passed) == utc("2026-05-02T04:00")


def test_a_large_correction_forgets_the_last_due_time() -> None:
    """Where the clock is set back by more than CORRECTION, the last due time is ignored."""
    cron = Cron("0 4 * * *", UTC)
    wrong = utc("2031-05-01T04:00")
    assert cron.due(utc("2026-05-01T03:00"), wrong) == utc("2026-05-01T04:00")
    passed = utc("2026-05-02T04:00")
    assert cron.due(passed - CORRECTION - timedelta(hours=2), passed) == passed


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("0 4 * *", "has 4 fields: write five"),
        ("0 0 4 * * *", "has 6 fields"),
        ("61 4 * * *", "bad minute"),
        ("@daily", "has 1 fields"),
        ("0 0 30 2 *", "bad day-of-month|does not exist"),
    ],
)
def test_malformed_expressions_are_refused(expression: str, message: str) -> None:
    """The message names the wrong field, or the number of fields to write."""
    with pytest.raises(ValueError, match=message):
        Cron(expression, UTC)


@given(
    st.integers(0, 3 * 366 * 86400).map(lambda seconds: START + timedelta(seconds=seconds)),
    st.sampled_from(["*/7 * * * *", "0 4 * * *", "30 2 * * *", "15,45 1-3 * * SUN", "59 23 L * *"]),
    st.sampled_from([BERLIN, UTC, ZoneInfo("America/New_York"), ZoneInfo("Australia/Lord_Howe")]),
)
def test_the_next_time_is_always_in_the_future(
    now: datetime, expression: str, zone: ZoneInfo
) -> None:
    """The next time is later than now, in every zone and around every clock change."""
    assert Cron(expression, zone).due(now) > now
