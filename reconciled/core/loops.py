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

FIRST_REST = 1.0  # seconds after the run that began an episode


@attrs.frozen
class Ran:
    """What one run of a key was like."""

    acted: bool  # something was written, or a program other than a check ran
    at_once: bool  # it left a cause to run again without a delay of its own
    foreign: bool  # a foreign change of the spec was among its causes
    scheduled: bool  # its causes were configured ticks and nothing else

    @property
    def counts(self) -> bool:
        """Whether it looks like a loop, were there many such runs."""
        return (self.acted or self.at_once) and not self.foreign and not self.scheduled


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
    changed: bool  # by a foreign change of the spec, not by falling quiet


@attrs.frozen
class Verdict:
    """What to do about a run: how long its key has to rest, and what to say."""

    rest: float = 0.0
    notice: LoopBegan | LoopEnded | None = None


_NOTHING = Verdict()


@attrs.define(eq=False)
class _Trail:
    """The counted runs of one key."""

    times: deque[float]
    first: float
    last: float
    runs: int = 0  # since the first one
    rest: float = 0.0  # above 0 exactly during an episode


class LoopDetector:
    """Told of every run as it ends; *now* in seconds of one monotonic clock."""

    def __init__(self, limit: int = 20, window: float = 60.0) -> None:
        self._limit = limit
        self._window = window
        self._trails: OrderedDict[Key, _Trail] = OrderedDict()  # the quietest first

    def __len__(self) -> int:
        """How many keys have any state here."""
        return len(self._trails)

    @property
    def looping(self) -> tuple[Key, ...]:
        """The keys whose episode goes on, for status."""
        return tuple(key for key, trail in self._trails.items() if trail.rest)

    def ran(self, key: Key, now: float, ran: Ran) -> Verdict:
        """Note a run of *key* that ended at *now*. The rest is for done() of the queue."""
        trail = self._trails.get(key)
        if ran.foreign:
            if trail is None:
                return _NOTHING
            del self._trails[key]
            return Verdict(notice=_ended(key, trail, now, changed=True)) if trail.rest else _NOTHING
        if not ran.counts:
            return _NOTHING
        if trail is None:
            trail = _Trail(deque(maxlen=self._limit), first=now, last=now)
            self._trails[key] = trail
        self._trails.move_to_end(key)
        trail.times.append(now)
        trail.last = now
        trail.runs += 1
        return self._judge(key, trail, now)

    def quiet(self, now: float) -> list[LoopEnded]:
        """Let go of keys without a counted run for a window. Ask once a second or so."""
        over = []
        while self._trails:
            key, trail = next(iter(self._trails.items()))
            if now - trail.last < self._window:
                break
            del self._trails[key]
            if trail.rest:
                over.append(_ended(key, trail, now, changed=False))
        return over

    def forget(self, key: Key) -> None:
        """Drop everything about *key*, without a word."""
        self._trails.pop(key, None)

    def _judge(self, key: Key, trail: _Trail, now: float) -> Verdict:
        if trail.rest:
            trail.rest = min(2 * trail.rest, self._window / 2)
            return Verdict(trail.rest)
        if len(trail.times) < self._limit or now - trail.times[0] > self._window:
            return _NOTHING
        trail.rest = min(FIRST_REST, self._window / 2)
        trail.first = trail.times[0]
        trail.runs = self._limit
        return Verdict(trail.rest, LoopBegan(key, self._limit, now - trail.first))


def _ended(key: Key, trail: _Trail, now: float, *, changed: bool) -> LoopEnded:
    return LoopEnded(key, trail.runs, now - trail.first, changed)
