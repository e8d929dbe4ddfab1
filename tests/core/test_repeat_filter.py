"""Folding equal lines: faults are told, not repeated."""

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


def note(subject: str, key: str | None = None) -> Line:
    return Line("file.written", "info", subject, key=key)


def test_r1_ten_thousand_equal_errors() -> None:
    """R1: of 10,000 equal errors in 10,000 s the first comes at once, then counted summaries."""
    folder = RepeatFilter()
    shown: list[tuple[float, int]] = []
    for second in range(10_000):
        now = float(second)
        shown += [(now, summary.repeated) for summary in folder.flush_due(now)]
        match folder.admit(fault(), now):
            case Emit(repeated=repeated):
                shown.append((now, repeated))
            case Suppress():
                pass
    assert [at for at, _ in shown] == [0, 10, 70, 670, 4270, 7870]
    told = sum(repeated for _, repeated in shown)
    left = folder.flush_all(10_000.0)
    # Line 0, and each that came at the very time of a summary, is shown itself or counted.
    assert 1 + told + sum(summary.repeated for summary in left) == 10_000


def test_r1_a_poll_slower_than_the_first_interval() -> None:
    """R1: an unchanged fault polled each 30 s for two hours gives a handful of lines, not 240."""
    folder = RepeatFilter()
    shown = sum(isinstance(folder.admit(fault(), 30.0 * n), Emit) for n in range(240))
    assert shown <= 8


def test_a_change_comes_at_once_after_the_count_of_what_was() -> None:
    """Another reason is shown at once, and before it what was counted of the one before."""
    folder = RepeatFilter()
    folder.admit(fault("refused"), 0)
    for second in range(1, 6):
        assert isinstance(folder.admit(fault("refused"), second), Suppress)
    verdict = folder.admit(fault("no space"), 6)
    assert isinstance(verdict, Emit)
    assert verdict.before is not None
    assert verdict.before.line.reason == "refused"
    assert verdict.before.repeated == 5
    assert verdict.before.since == 1
    assert isinstance(folder.admit(fault("no space"), 7), Suppress)


def test_a_fault_that_always_differs_is_folded_too() -> None:
    """Reasons that never repeat use up the credit; later changes are counted as changes."""
    folder = RepeatFilter()
    verdicts = [folder.admit(fault(f"request {n}"), n / 1000) for n in range(1000)]
    assert sum(isinstance(verdict, Emit) for verdict in verdicts) == 1 + CHANGES
    (summary,) = folder.flush_due(11)
    assert summary.repeated == summary.changes == 1000 - 1 - CHANGES
    assert summary.line.reason == "request 999"


def test_credit_for_changes_comes_back() -> None:
    """A change that comes after a quiet time is told at once even after a flood of them."""
    folder = RepeatFilter()
    for n in range(100):
        folder.admit(fault(f"request {n}"), 0)
    assert isinstance(folder.admit(fault("later"), CHANGE_REFILL), Emit)


def test_recovery_is_announced_once() -> None:
    """R1: the recovery of a told fault is announced once, with the lines not yet counted."""
    folder = RepeatFilter()
    folder.admit(fault(), 5)
    folder.admit(fault(), 6)
    (recovery,) = folder.mark_recovered("site/a", 7)
    assert (recovery.line.event, recovery.since, recovery.repeated) == ("run.failed", 5, 1)
    assert folder.mark_recovered("site/a", 8) == []
    assert folder.mark_recovered("site/b", 8) == []


def test_notes_do_not_recover() -> None:
    """Only warnings and errors are faults that can end."""
    folder = RepeatFilter()
    folder.admit(note("x", key="site/a"), 0)
    assert folder.mark_recovered("site/a", 1) == []


def test_a_new_fault_after_a_recovery_is_told_at_once() -> None:
    """Failed, well, failed again: three changes of state, three lines."""
    folder = RepeatFilter()
    assert isinstance(folder.admit(fault(), 0), Emit)
    assert len(folder.mark_recovered("site/a", 1)) == 1
    assert isinstance(folder.admit(fault(), 2), Emit)
    (recovery,) = folder.mark_recovered("site/a", 3)
    assert recovery.since == 2


def test_flapping_is_folded() -> None:
    """A key that fails and recovers each second is told a few times, then counted."""
    folder = RepeatFilter()
    lines = 0
    for n in range(1000):
        lines += isinstance(folder.admit(fault(), n), Emit)
        lines += len(folder.mark_recovered("site/a", n + 0.5))
        lines += len(folder.flush_due(n + 0.9))
    assert lines < 40


def test_a_summary_of_an_untold_fault_says_that_it_is_over() -> None:
    """A fault that came and went while changes were folded is summarised as ended."""
    folder = RepeatFilter()
    for n in range(CHANGES + 2):
        folder.admit(fault(), n / 10)
        folder.mark_recovered("site/a", n / 10)
    (summary,) = folder.flush_due(60)
    assert summary.ended


def test_summaries_come_without_further_lines() -> None:
    """What was counted is told when it is due even if no such line comes any more."""
    folder = RepeatFilter()
    folder.admit(fault(), 0)
    folder.admit(fault(), 1)
    assert folder.flush_due(INTERVALS[0] - 0.1) == []
    (summary,) = folder.flush_due(INTERVALS[0])
    assert summary.repeated == 1
    assert folder.flush_due(INTERVALS[0] + 1) == []


def test_state_leaves_with_the_key() -> None:
    """Invariant 14: nothing of a key is left after forget(), in either index."""
    folder = RepeatFilter()
    for n in range(50):
        folder.admit(fault(key=f"site/{n}"), 0)
        folder.admit(note("x", key=f"site/{n}"), 0)
    for n in range(50):
        folder.forget(f"site/{n}")
    assert repr(folder) == "<RepeatFilter 0/4096 series, 0 keys>"


def test_memory_is_bounded_and_counts_survive() -> None:
    """At capacity the longest unseen series goes, and what it had counted is still told."""
    folder = RepeatFilter(capacity=10)
    folder.admit(fault(key="site/old"), 0)
    folder.admit(fault(key="site/old"), 0)
    for n in range(30):
        folder.admit(fault(key=f"site/{n}"), 1)
    assert len(folder._series) == 10
    assert len(folder._of_key) == 10
    assert [summary.line.key for summary in folder.flush_due(2)] == ["site/old"]


def test_quiet_notes_expire_and_faults_stay() -> None:
    """A series of notes goes when it was idle; a fault is remembered until it recovers."""
    folder = RepeatFilter()
    folder.admit(note("x"), 0)
    folder.admit(fault(), 0)
    folder.flush_due(100_000)
    assert len(folder._series) == 1
    assert len(folder.mark_recovered("site/a", 100_001)) == 1


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
    folder = RepeatFilter(capacity=capacity)
    now = 0.0
    admitted = told = 0
    for action, key, reason, wait in steps:
        now += wait
        if action == "flush":
            told += sum(summary.repeated for summary in folder.flush_due(now))
        elif action == "recovered":
            told += sum(recovery.repeated for recovery in folder.mark_recovered(key, now))
        else:
            admitted += 1
            verdict = folder.admit(fault(reason, key), now)
            if isinstance(verdict, Emit):
                told += 1 + verdict.repeated
                told += verdict.before.repeated if verdict.before else 0
        assert len(folder._series) <= capacity
    told += sum(summary.repeated for summary in folder.flush_all(now))
    assert told == admitted
