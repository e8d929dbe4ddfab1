"""The keys of one controller's lane, counted by state: for status, metrics and reports.

Counting walks all keys that have any state, at some microseconds for ten of them: for
inspection, not for each run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs

from reconciled.core.queue.states import KeyState

if TYPE_CHECKING:
    from reconciled.core.queue.lane import Lane


@attrs.frozen
class LaneStatistics:
    """Keys by state, and the two ages that reveal a stuck queue.

    running      includes the dirty keys: running, with a cause that arrived since
    oldest_wait  seconds that the key that waits longest has waited; 0 where none waits
    longest_run  seconds that the longest of the current runs has taken; 0 where none runs
    """

    waiting: int
    running: int
    dirty: int
    delayed: int
    retrying: int
    terminal: int
    throttled: int
    oldest_wait: float
    longest_run: float


def lane_statistics(lane: Lane, now: float) -> LaneStatistics:
    """Count the keys of *lane*."""
    keys = Counter(entry.key_state for entry in lane)
    waiting = [entry.since for entry in lane if entry.key_state is KeyState.WAITING]
    running = [entry.started for entry in lane if entry.running]
    return LaneStatistics(
        waiting=len(waiting),
        running=len(running),
        dirty=keys[KeyState.DIRTY],
        delayed=keys[KeyState.DELAYED],
        retrying=keys[KeyState.RETRYING],
        terminal=keys[KeyState.TERMINAL],
        throttled=keys[KeyState.THROTTLED],
        oldest_wait=now - min(waiting, default=now),
        longest_run=now - min(running, default=now),
    )
