"""Backoff: growth, cap, spread."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.queue.backoff import MIN_JITTER_SHARE, Backoff
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.resources import key_of


def test_the_upper_end_doubles_up_to_the_cap() -> None:
    """Each failure doubles the longest delay, until the cap."""
    backoff = Backoff(1.0, 10.0)
    assert [backoff.longest(failures) for failures in range(1, 7)] == [1, 2, 4, 8, 10, 10]


@given(st.integers(1, 10**9), st.integers())
def test_a_delay_stays_between_its_minimum_and_the_cap(failures: int, seed: int) -> None:
    """However often a key failed, its delay is finite, above the minimum, below the cap."""
    backoff = Backoff(0.5, 300.0)
    assert 0.5 * MIN_JITTER_SHARE <= backoff.delay(failures, Random(seed)) <= 300.0


@pytest.mark.parametrize(("initial", "maximum"), [(0, 1), (-1, 1), (2, 1), (1, float("inf"))])
def test_an_invalid_backoff_is_refused(initial: float, maximum: float) -> None:
    """A backoff needs a positive initial delay that is not above a finite maximum."""
    with pytest.raises(ValueError, match="0 < initial <= max"):
        Backoff(initial, maximum)


@pytest.mark.parametrize("failures", [1, 3, 20])
def test_keys_that_fail_together_are_retried_spread_out(failures: int) -> None:
    """R2: of 500 keys failing at one instant, no tenth of the span gets a fifth of them."""
    seed = 4711 + failures
    print("seed", seed)
    queue = WorkQueue(500, Random(seed))
    backoff = Backoff(1.0, 300.0)
    lane = queue.lane("site", 500, backoff)
    now = 0.0
    for number in range(500):
        lane.add(key_of("site", f"k{number}"), now, "changed")
    for _ in range(failures):
        jobs = [queue.get(now) for _ in range(500)]
        delays = [lane.failed(job, now) or 0.0 for job in jobs if job is not None]
        assert len(delays) == 500
        now += 1000.0
    longest = backoff.longest(failures)
    assert MIN_JITTER_SHARE * longest <= min(delays)
    assert max(delays) <= longest
    span = longest * (1 - MIN_JITTER_SHARE)
    shares = [0] * 10
    for delay in delays:
        shares[min(9, int((delay - MIN_JITTER_SHARE * longest) / span * 10))] += 1
    assert max(shares) < 100
    assert min(shares) > 20
    assert len(set(delays)) > 490
