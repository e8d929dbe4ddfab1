"""The loop detector: one notice per episode, growing backoff, no state for keys without loops."""

from __future__ import annotations

import attrs
import pytest

from reconciled.core.loop_detector import LoopBegan, LoopDetector, LoopEnded, LoopVerdict, RunFacts
from reconciled.core.resources import Key

KEY = Key("site/a")
SELF = RunFacts(acted=True, requeued=False, spec_changed=False, only_scheduled=False)
QUIET = attrs.evolve(SELF, acted=False)


def spin(detector: LoopDetector, now: float, runs: int, step: float = 0.1) -> list[LoopVerdict]:
    """Counted runs, from *now* on, *step* seconds apart."""
    return [detector.record_run(KEY, now + step * turn, SELF) for turn in range(runs)]


@pytest.mark.parametrize("ran", [SELF, attrs.evolve(QUIET, requeued=True)])
def test_a_loop_is_reported_once(ran: RunFacts) -> None:
    """C11: the 20th run within a minute begins an episode; the further ones report nothing."""
    detector = LoopDetector()
    verdicts = [detector.record_run(KEY, turn * 2.0, ran) for turn in range(25)]
    assert [index for index, verdict in enumerate(verdicts) if verdict.notice] == [19]
    assert verdicts[19].notice == LoopBegan(KEY, 20, 38.0)


def test_backoff_doubles_up_to_half_a_window() -> None:
    """The backoff of a looping key doubles, but the key still runs within a window."""
    verdicts = spin(LoopDetector(), 0.0, 27)
    assert [verdict.backoff for verdict in verdicts[18:]] == [0, 1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize(
    "ran",
    [
        QUIET,
        attrs.evolve(SELF, spec_changed=True),
        attrs.evolve(SELF, only_scheduled=True),
        attrs.evolve(SELF, requeued=True, spec_changed=True),
    ],
)
def test_runs_with_an_external_cause_never_count(ran: RunFacts) -> None:
    """Runs without effects, spec changes and the schedule alone count as no loop, without state."""
    detector = LoopDetector()
    assert {detector.record_run(KEY, turn * 0.01, ran) for turn in range(1000)} == {LoopVerdict()}
    assert len(detector) == 0


def test_slow_runs_do_not_count_as_a_loop() -> None:
    """Twenty runs in more than a minute do not begin an episode."""
    assert not any(verdict.notice for verdict in spin(LoopDetector(), 0.0, 500, step=3.2))


def test_a_spec_change_ends_an_episode() -> None:
    """A changed spec ends the episode with a LoopEnded, and counting starts again."""
    detector = LoopDetector()
    spin(detector, 0.0, 21)
    verdict = detector.record_run(KEY, 5.0, attrs.evolve(SELF, spec_changed=True))
    assert verdict == LoopVerdict(0.0, LoopEnded(KEY, 21, 5.0, spec_changed=True))
    assert len(detector) == 0
    assert not any(verdict.notice for verdict in spin(detector, 6.0, 19))


def test_quiet_ends_an_episode() -> None:
    """A window without a counted run ends the episode, once, and drops all state."""
    detector = LoopDetector()
    spin(detector, 0.0, 20, step=1.0)
    assert detector.expire_quiet(78.9) == []
    assert detector.expire_quiet(79.0) == [LoopEnded(KEY, 20, 79.0, spec_changed=False)]
    assert detector.expire_quiet(1000.0) == []
    assert len(detector) == 0


def test_state_of_keys_that_acted_once_is_dropped() -> None:
    """Invariant 14: counted runs are dropped after a window, without a notice."""
    detector = LoopDetector()
    for number in range(100):
        detector.record_run(Key(f"site/{number}"), float(number), SELF)
    assert detector.expire_quiet(120.0) == []
    assert len(detector) == 39  # those that ran after 60.0


def test_a_running_key_does_not_hide_a_quiet_one() -> None:
    """A quiet key is dropped although a key that was recorded before it still runs."""
    detector = LoopDetector()
    detector.record_run(KEY, 0.0, SELF)
    spin_of_another = [detector.record_run(Key("site/b"), turn * 1.0, SELF) for turn in range(20)]
    assert spin_of_another[-1].notice
    detector.record_run(KEY, 70.0, SELF)
    assert [ended.key for ended in detector.expire_quiet(80.0)] == ["site/b"]
    assert len(detector) == 1


def test_forget_drops_a_key() -> None:
    """Invariant 14: a forgotten key has no state, and its episode gets no LoopEnded."""
    detector = LoopDetector()
    spin(detector, 0.0, 25)
    detector.forget(KEY)
    detector.forget(KEY)
    assert len(detector) == 0
    assert detector.expire_quiet(1e6) == []
