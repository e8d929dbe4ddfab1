"""The guard before removals."""

from __future__ import annotations

import pytest

from reconciled.core.removal_guard import WINDOW, HeldRemovals, RemovalGuard
from reconciled.core.resources import Key

OWNED = frozenset(Key(f"site/k{number:02}") for number in range(20))
KEYS = sorted(OWNED)


def some(first: int, last: int) -> frozenset[Key]:
    return frozenset(KEYS[first:last])


@pytest.mark.parametrize(
    ("removals", "owned", "held"),
    [
        (4, 4, False),  # all, but few
        (5, 5, True),  # all
        (5, 10, False),  # exactly the share
        (6, 10, True),
        (10, 20, False),
        (11, 20, True),
    ],
)
def test_held_means_many_and_a_large_share(*, removals: int, owned: int, held: bool) -> None:
    """A set is held when it is above the number and above the share (C10 case 2)."""
    guard = RemovalGuard(share=0.5, above=4)
    passed = guard.decide(some(0, removals), some(0, owned), now=0.0)
    assert passed == (frozenset() if held else some(0, removals))
    assert guard.held == (HeldRemovals(tuple(KEYS[:removals]), owned, 0.0) if held else None)


def test_removals_within_a_minute_are_counted_together() -> None:
    """A mass deletion of three keys at a time is held once the sum exceeds the limits (C10)."""
    guard = RemovalGuard()
    owned = set(KEYS[:10])
    assert guard.decide(some(0, 3), owned, now=0.0) == some(0, 3)
    owned -= some(0, 3)
    assert guard.decide(some(3, 5), owned, now=20.0) == some(3, 5)
    owned -= some(3, 5)
    assert guard.decide(some(5, 6), owned, now=40.0) == frozenset()
    assert guard.held == HeldRemovals((KEYS[5],), 10, 40.0)


def test_removals_far_apart_are_not_counted_together() -> None:
    """After a minute a removal is no longer counted."""
    guard = RemovalGuard()
    assert guard.decide(some(0, 4), some(0, 8), now=0.0) == some(0, 4)
    assert guard.decide(some(4, 8), some(4, 8), now=WINDOW) == some(4, 8)


def test_a_guard_holds_again_what_an_earlier_one_held() -> None:
    """A restored key is held although its set is small now; one that is declared again is not."""
    guard = RemovalGuard()
    guard.restore(HeldRemovals(tuple(KEYS[:6]), 8, 1.0))
    assert guard.decide(some(2, 6), OWNED, now=2.0) == frozenset()
    assert guard.held == HeldRemovals(tuple(KEYS[2:6]), len(OWNED), 1.0)
    guard.approve(some(2, 6))
    assert guard.decide(some(2, 6), OWNED, now=3.0) == some(2, 6)
    assert guard.held is None


def test_held_keys_stay_held() -> None:
    """Neither time nor a smaller share nor a smaller set releases a held key."""
    guard = RemovalGuard()
    guard.decide(some(0, 6), some(0, 6), now=0.0)
    assert guard.decide(some(0, 6), OWNED, now=WINDOW * 2) == frozenset()
    guard.release(some(0, 4))
    assert guard.decide(some(4, 6), OWNED, now=WINDOW * 3) == frozenset()
    assert guard.held == HeldRemovals((KEYS[4], KEYS[5]), 20, 0.0)


def test_an_approval_is_for_exactly_its_keys() -> None:
    """A key that joined after the set was shown needs its own approval."""
    guard = RemovalGuard()
    guard.decide(some(0, 6), some(0, 8), now=0.0)
    assert guard.held is not None
    guard.approve(guard.held.keys)
    assert guard.decide(some(0, 8), some(0, 8), now=1.0) == some(0, 6)
    assert guard.held == HeldRemovals((KEYS[6], KEYS[7]), 8, 1.0)
    guard.approve(guard.held.keys)
    assert guard.decide(some(6, 8), some(6, 8), now=2.0) == some(6, 8)
    assert guard.held is None


def test_an_approval_is_used_once() -> None:
    """A key that was approved, removed, declared and deleted again is judged again."""
    guard = RemovalGuard()
    guard.approve(some(0, 6))
    assert guard.decide(some(0, 6), some(0, 6), now=0.0) == some(0, 6)
    guard.release(some(0, 6))
    assert guard.decide(some(0, 6), some(0, 6), now=1.0) == frozenset()


def test_an_approval_lapses_with_its_reason() -> None:
    """It lapses when its key is declared again, or is not to be removed at the next decision."""
    guard = RemovalGuard()
    guard.approve(some(0, 6))
    guard.release(some(0, 6))
    assert guard.decide(some(0, 6), some(0, 6), now=0.0) == frozenset()
    guard = RemovalGuard()
    guard.approve(some(0, 6))
    guard.decide(frozenset(), some(0, 6), now=0.0)
    assert guard.decide(some(0, 6), some(0, 6), now=1.0) == frozenset()


def test_approved_removals_do_not_count_against_the_next_deletion() -> None:
    """Approved removals are counted neither as removals nor as owned."""
    guard = RemovalGuard()
    guard.approve(some(0, 10))
    assert guard.decide(some(0, 10), OWNED, now=0.0) == some(0, 10)
    assert guard.decide(some(10, 11), some(10, 20), now=1.0) == some(10, 11)


def test_str_and_repr() -> None:
    """str() of held removals gives their share; repr() of the guard its limits and counts."""
    guard = RemovalGuard()
    guard.decide(some(0, 6), some(0, 8), now=0.0)
    assert str(guard.held) == "6 of 8 keys would be removed at once"
    assert repr(guard) == "<RemovalGuard above 4 and 50%: 6 held, 0 in the last minute>"
