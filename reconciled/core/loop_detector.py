"""A daemon that wakes itself (C11): noticed, named once, and slowed down until it stops.

A run counts when it acted, or came back at once, although nobody changed the spec and it was
not the configured schedule alone that caused it: a reconciler whose writes wake its own
watcher, or that finds its own time stamp different each time. An *episode* begins with the
``limit``-th counted run within ``window`` seconds. It ends with a foreign change of the spec,
or when no run counted for a whole window.

Invariants: one LoopBegan and one LoopEnded an episode; the rest that a looping key is given
doubles, and never grows past half a window, so that a key that still loops is seen to; a key
without a counted run within the window has no state here once quiet() was asked
(invariant 14).
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
    """What one run of a key was like."""

    acted: bool  # something was written, or a program other than a check ran
    requeued: bool  # it left a cause to run again without a delay of its own
    spec_changed: bool  # a foreign change of the spec was among its causes
    only_scheduled: bool  # its causes were configured ticks and nothing else

    @property
    def is_self_triggered(self) -> bool:
        """Whether it looks like a loop, were there many such runs."""
        return (self.acted or self.requeued) and not self.spec_changed and not self.only_scheduled


@attrs.frozen
class LoopBegan:
    """*key* ran *runs* times within *seconds* without a reason from outside."""

    key: Key
    runs: int
    seconds: float


@attrs.frozen
class LoopEnded:
    """The episode of *key* is over: *runs* counted runs since *seconds* ago."""

    key: Key
    runs: int
    seconds: float
    spec_changed: bool  # by a foreign change of the spec, not by falling quiet


@attrs.frozen
class LoopVerdict:
    """What to do about a run: how long its key has to rest, and what to say."""

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
    """Told of every run as it ends; *now* in seconds of one monotonic clock."""

    def __init__(self, limit: int = 20, window: float = 60.0) -> None:
        self._limit = limit
        self._window = window
        self._histories: OrderedDict[Key, _RunHistory] = OrderedDict()  # the quietest first

    def __len__(self) -> int:
        """How many keys have any state here."""
        return len(self._histories)

    @property
    def looping(self) -> tuple[Key, ...]:
        """The keys whose episode goes on, for status."""
        return tuple(key for key, trail in self._histories.items() if trail.backoff)

    def record_run(self, key: Key, now: float, facts: RunFacts) -> LoopVerdict:
        """Note a run of *key* that ended at *now*. The rest is for done() of the queue."""
        trail = self._histories.get(key)
        if facts.spec_changed:
            if trail is None:
                return _NOTHING
            del self._histories[key]
            return (
                LoopVerdict(notice=_ended(key, trail, now, changed=True))
                if trail.backoff
                else _NOTHING
            )
        if not facts.is_self_triggered:
            return _NOTHING
        if trail is None:
            trail = _RunHistory(deque(maxlen=self._limit), first=now, last=now)
            self._histories[key] = trail
        self._histories.move_to_end(key)
        trail.times.append(now)
        trail.last = now
        trail.runs += 1
        return self._judge(key, trail, now)

    def expire_quiet(self, now: float) -> list[LoopEnded]:
        """Let go of keys without a counted run for a window. Ask once a second or so."""
        over = []
        while self._histories:
            key, trail = next(iter(self._histories.items()))
            if now - trail.last < self._window:
                break
            del self._histories[key]
            if trail.backoff:
                over.append(_ended(key, trail, now, changed=False))
        return over

    def forget(self, key: Key) -> None:
        """Drop everything about *key*, without a word."""
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
