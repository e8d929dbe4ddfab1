"""What stands in one controller's part of the queue now: for status, scrapes and reports.

It walks all keys that have any state, some microseconds for ten of them: for when somebody
asks, not for each run.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import attrs

from reconciled.core.queue.entry import Standing

if TYPE_CHECKING:
    from reconciled.core.queue.lane import Lane


@attrs.frozen
class Census:
    """Keys by standing, and the two ages that tell a stuck queue.

    dirty    running keys with a cause that arrived since; counted in running too
    oldest   seconds that the key that waits longest has waited; 0 where none waits
    longest  seconds that the longest of the runs going on has taken; 0 where none runs
    """

    waiting: int
    running: int
    dirty: int
    delayed: int
    retrying: int
    terminal: int
    resting: int
    oldest: float
    longest: float


def census(lane: Lane, now: float) -> Census:
    """Count the keys of *lane*."""
    keys = Counter(entry.standing for entry in lane)
    waiting = [entry.since for entry in lane if entry.standing is Standing.WAITING]
    running = [entry.started for entry in lane if entry.running]
    return Census(
        waiting=len(waiting),
        running=len(running),
        dirty=keys[Standing.DIRTY],
        delayed=keys[Standing.DELAYED],
        retrying=keys[Standing.RETRYING],
        terminal=keys[Standing.TERMINAL],
        resting=keys[Standing.RESTING],
        oldest=now - min(waiting, default=now),
        longest=now - min(running, default=now),
    )
