"""Folding equal lines: a fault is shown once, then counted."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.repeat_filter import (
    CHANGE_REFILL,
    CHANGES,
    INTERVALS,
    Emit,
    Line,
    RepeatFilter,
    Suppress,
)


def fault(reason: str = "refused", key: str | None = "site/a", event: str = "run.failed") -> Line:
    return Line(event, "error", "", reason, key)


def info(subject: str, key: str | None = None) -> Line:
    return Line("file.written", "info", subject, key=key)


def test_r1_ten_thousand_equal_errors() -> None:
    """R1: of 10,000 equal errors in 10,000 s the first is shown, then counted summaries."""
    repeat_filter = RepeatFilter()
    shown: list[tuple[float, int]] = []
    for second in range(10_000):
        now = float(second)
        shown += [(now, summary.repeated) for summary in repeat_filter.flush_due(now)]
        match repeat_filter.admit(fault(), now):
            case Emit(repeated=repeated):
                shown.append((now, repeated))
            case Suppress():
                pass
    assert [at for at, _ in shown] == [0, 10, 70, 670, 4270, 7870]
    counted = sum(repeated for _, repeated in shown)
    left = repeat_filter.flush_all(10_000.0)
    # Line 0, and each that arrived exactly when a summary was due, is shown itself or counted.
    assert 1 + counted + sum(summary.repeated for summary in left) == 10_000


def test_r1_a_poll_slower_than_the_first_interval() -> None:
    """R1: an unchanged fault polled each 30 s for two hours gives a handful of lines, not 240."""
    repeat_filter = RepeatFilter()
    shown = sum(isinstance(repeat_filter.admit(fault(), 30.0 * n), Emit) for n in range(240))
    assert shown <= 8


def test_a_change_of_reason_is_shown_after_a_summary() -> None:
    """Another reason is shown immediately, preceded by a summary of the one before."""
    repeat_filter = RepeatFilter()
    repeat_filter.admit(fault("refused"), 0)
    for second in range(1, 6):
        assert isinstance(repeat_filter.admit(fault("refused"), second), Suppress)
    verdict = repeat_filter.admit(fault("no space"), 6)
    assert isinstance(verdict, Emit)
    assert verdict.before is not None
    assert verdict.before.line.reason == "refused"
    assert verdict.before.repeated == 5
    assert verdict.before.since == 1
    assert isinstance(repeat_filter.admit(fault("no space"), 7), Suppress)


def test_a_fault_whose_reason_always_differs_is_folded_too() -> None:
    """Reasons that never repeat use up the credit; later changes are counted as changes."""
    repeat_filter = RepeatFilter()
    verdicts = [repeat_filter.admit(fault(f"request {n}"), n / 1000) for n in range(1000)]
    assert sum(isinstance(verdict, Emit) for verdict in verdicts) == 1 + CHANGES
    (summary,) = repeat_filter.flush_due(11)
    assert summary.repeated == summary.changes == 1000 - 1 - CHANGES
    assert summary.line.reason == "request 999"


def test_credit_for_changes_is_refilled() -> None:
    """A change after a quiet time is shown immediately even after a flood of them."""
    repeat_filter = RepeatFilter()
    for n in range(100):
        repeat_filter.admit(fault(f"request {n}"), 0)
    assert isinstance(repeat_filter.admit(fault("later"), CHANGE_REFILL), Emit)


def test_recovery_is_announced_once() -> None:
    """R1: the recovery of a fault is announced once, with the lines not yet summarised."""
    repeat_filter = RepeatFilter()
    repeat_filter.admit(fault(), 5)
    repeat_filter.admit(fault(), 6)
    (recovery,) = repeat_filter.mark_recovered("site/a", 7)
    assert (recovery.line.event, recovery.since, recovery.repeated) == ("run.failed", 5, 1)
    assert repeat_filter.mark_recovered("site/a", 8) == []
    assert repeat_filter.mark_recovered("site/b", 8) == []


def test_info_lines_do_not_recover() -> None:
    """Only warnings and errors are faults that can end."""
    repeat_filter = RepeatFilter()
    repeat_filter.admit(info("x", key="site/a"), 0)
    assert repeat_filter.mark_recovered("site/a", 1) == []


def test_a_new_fault_after_a_recovery_is_shown() -> None:
    """Failed, recovered, failed again: three changes of state, three lines."""
    repeat_filter = RepeatFilter()
    assert isinstance(repeat_filter.admit(fault(), 0), Emit)
    assert len(repeat_filter.mark_recovered("site/a", 1)) == 1
    assert isinstance(repeat_filter.admit(fault(), 2), Emit)
    (recovery,) = repeat_filter.mark_recovered("site/a", 3)
    assert recovery.since == 2


def test_flapping_is_folded() -> None:
    """A key that fails and recovers each second is shown a few times, then counted."""
    repeat_filter = RepeatFilter()
    lines = 0
    for n in range(1000):
        lines += isinstance(repeat_filter.admit(fault(), n), Emit)
        lines += len(repeat_filter.mark_recovered("site/a", n + 0.5))
        lines += len(repeat_filter.flush_due(n + 0.9))
    assert lines < 40


def test_a_summary_says_that_an_unshown_fault_has_ended() -> None:
    """A fault that began and ended while changes were folded is summarised as ended."""
    repeat_filter = RepeatFilter()
    for n in range(CHANGES + 2):
        repeat_filter.admit(fault(), n / 10)
        repeat_filter.mark_recovered("site/a", n / 10)
    (summary,) = repeat_filter.flush_due(60)
    assert summary.ended


def test_a_summary_needs_no_further_line() -> None:
    """Counted lines are summarised when due even if no such line follows."""
    repeat_filter = RepeatFilter()
    repeat_filter.admit(fault(), 0)
    repeat_filter.admit(fault(), 1)
    assert repeat_filter.flush_due(INTERVALS[0] - 0.1) == []
    (summary,) = repeat_filter.flush_due(INTERVALS[0])
    assert summary.repeated == 1
    assert repeat_filter.flush_due(INTERVALS[0] + 1) == []


def test_forget_drops_all_state_of_a_key() -> None:
    """Invariant 14: nothing of a key is left after forget(), in either index."""
    repeat_filter = RepeatFilter()
    for n in range(50):
        repeat_filter.admit(fault(key=f"site/{n}"), 0)
        repeat_filter.admit(info("x", key=f"site/{n}"), 0)
    for n in range(50):
        repeat_filter.forget(f"site/{n}")
    assert repr(repeat_filter) == "<RepeatFilter 0/4096 series, 0 keys>"


def test_memory_is_bounded_and_counts_survive() -> None:
    """At capacity the least recently seen series is evicted, and its count is still shown."""
    repeat_filter = RepeatFilter(capacity=10)
    repeat_filter.admit(fault(key="site/old"), 0)
    repeat_filter.admit(fault(key="site/old"), 0)
    for n in range(30):
        repeat_filter.admit(fault(key=f"site/{n}"), 1)
    assert len(repeat_filter._series) == 10
    assert len(repeat_filter._of_key) == 10
    assert [summary.line.key for summary in repeat_filter.flush_due(2)] == ["site/old"]


def test_idle_info_lines_expire_and_faults_do_not() -> None:
    """An idle series of info lines is dropped; a fault is kept until it recovers."""
    repeat_filter = RepeatFilter()
    repeat_filter.admit(info("x"), 0)
    repeat_filter.admit(fault(), 0)
    repeat_filter.flush_due(100_000)
    assert len(repeat_filter._series) == 1
    assert len(repeat_filter.mark_recovered("site/a", 100_001)) == 1


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "admit", "admit", "flush", "recovered"]),
        st.sampled_from(["site/a", "site/b", "site/c"]),
        st.sampled_from(["x", "y", "z"]),
        st.floats(0, 700),
    ),
    max_size=120,
)


@given(steps=_STEPS, capacity=st.integers(1, 4))
def test_no_line_is_lost(steps: list[Any], capacity: int) -> None:
    """Invariant 4: lines shown + lines counted in summaries and recoveries = lines admitted."""
    repeat_filter = RepeatFilter(capacity=capacity)
    now = 0.0
    admitted = accounted = 0
    for action, key, reason, wait in steps:
        now += wait
        if action == "flush":
            accounted += sum(summary.repeated for summary in repeat_filter.flush_due(now))
        elif action == "recovered":
            accounted += sum(
                recovery.repeated for recovery in repeat_filter.mark_recovered(key, now)
            )
        else:
            admitted += 1
            verdict = repeat_filter.admit(fault(reason, key), now)
            if isinstance(verdict, Emit):
                accounted += 1 + verdict.repeated
                accounted += verdict.before.repeated if verdict.before else 0
        assert len(repeat_filter._series) <= capacity
    accounted += sum(summary.repeated for summary in repeat_filter.flush_all(now))
    assert accounted == admitted
