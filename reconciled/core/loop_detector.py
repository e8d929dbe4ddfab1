"""Detects hot loops (C11): a key whose runs trigger each other; reported once, and slowed down.

A run counts when it acted, or requeued itself without a delay, although the spec was not changed
and the run was not caused by the configured schedule alone: a reconciler whose writes trigger
its own watcher, or that finds its own time stamp different each time. An *episode* begins with
the ``limit``-th counted run within ``window`` seconds. It ends with a change of the spec, or
when no run counted for a whole window.

Invariants: one LoopBegan and one LoopEnded per episode; the backoff of a looping key doubles and
never exceeds half a window, so that a key that still loops is still reconciled; a key without
a counted run within the window has no state here after expire_quiet() (invariant 14).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from reconciled.core.resources import Key

INITIAL_BACKOFF = 1.0  # seconds after the run that began an episode


@attrs.frozen
class RunFacts:
    """The facts about one run of a key."""

    acted: bool  # something was written, or a program other than a check ran
    requeued: bool  # it left a cause to run again without a configured delay
    spec_changed: bool  # a change of the spec was among its causes
    only_scheduled: bool  # its causes were configured ticks and nothing else

    @property
    def is_self_triggered(self) -> bool:
        """Whether it counts: many such runs are a loop."""
        return (self.acted or self.requeued) and not self.spec_changed and not self.only_scheduled


@attrs.frozen
class LoopBegan:
    """*key* ran *runs* times within *seconds* without an external cause."""

    key: Key
    runs: int
    seconds: float


@attrs.frozen
class LoopEnded:
    """The episode of *key* has ended: *runs* counted runs since *seconds* ago."""

    key: Key
    runs: int
    seconds: float
    spec_changed: bool  # ended by a change of the spec, not by a quiet window


@attrs.frozen
class LoopVerdict:
    """What to do about a run: the backoff of its key, and what to log."""

    backoff: float = 0.0
    notice: LoopBegan | LoopEnded | None = None


_NOTHING = LoopVerdict()


@attrs.define(eq=False)
class _RunHistory:
    """The counted runs of one key."""

    times: deque[float]
    first: float
    last: float
    runs: int = 0  # since the first one
    backoff: float = 0.0  # above 0 exactly during an episode


class LoopDetector:
    """Gets every run as it ends; *now* is in seconds of one monotonic clock."""

    def __init__(self, limit: int = 20, window: float = 60.0) -> None:
        self._limit = limit
        self._window = window
        self._histories: OrderedDict[Key, _RunHistory] = (
            OrderedDict()
        )  # least recently counted first

    def __len__(self) -> int:
        """How many keys have any state here."""
        return len(self._histories)

    def record_run(self, key: Key, now: float, facts: RunFacts) -> LoopVerdict:
        """Record a run of *key* that ended at *now*. The backoff is for the lane's done()."""
        history = self._histories.get(key)
        if facts.spec_changed:
            if history is None:
                return _NOTHING
            del self._histories[key]
            return (
                LoopVerdict(notice=_ended(key, history, now, changed=True))
                if history.backoff
                else _NOTHING
            )
        if not facts.is_self_triggered:
            return _NOTHING
        if history is None:
            history = _RunHistory(deque(maxlen=self._limit), first=now, last=now)
            self._histories[key] = history
        self._histories.move_to_end(key)
        history.times.append(now)
        history.last = now
        history.runs += 1
        return self._judge(key, history, now)

    def expire_quiet(self, now: float) -> list[LoopEnded]:
        """Drop keys without a counted run for a window. Call about once a second."""
        ended = []
        while self._histories:
            key, history = next(iter(self._histories.items()))
            if now - history.last < self._window:
                break
            del self._histories[key]
            if history.backoff:
                ended.append(_ended(key, history, now, changed=False))
        return ended

    def forget(self, key: Key) -> None:
        """Drop everything about *key*, without a LoopEnded."""
        self._histories.pop(key, None)

    def _judge(self, key: Key, history: _RunHistory, now: float) -> LoopVerdict:
        if history.backoff:
            history.backoff = min(2 * history.backoff, self._window / 2)
            return LoopVerdict(history.backoff)
        if len(history.times) < self._limit or now - history.times[0] > self._window:
            return _NOTHING
        history.backoff = min(INITIAL_BACKOFF, self._window / 2)
        history.first = history.times[0]
        history.runs = self._limit
        return LoopVerdict(history.backoff, LoopBegan(key, self._limit, now - history.first))


def _ended(key: Key, history: _RunHistory, now: float, *, changed: bool) -> LoopEnded:
    return LoopEnded(key, history.runs, now - history.first, changed)
