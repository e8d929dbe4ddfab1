"""Folds equal log lines into counts, so that an unchanged fault cannot flood a log.

A *series* is the lines of one event about one subject. Invariants:

1. The first line of a series is shown immediately; equal ones become counted summaries at growing
   intervals.
2. A change of reason is shown immediately, as long as the series has credit for changes: a fault
   whose text differs each time (a request id) is a flood too.
3. A recovery is announced exactly if the fault before it was shown.
4. Every line is shown or counted in exactly one summary or recovery; only forget() drops counts.
5. Memory is bounded: at most *capacity* series, and all series of a key are removed with the key.
   A series that was evicted for another one is shown as new when it recurs.

Time is handed in, in seconds of any monotonic clock, and never decreases.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

import attrs

# From one summary of a series to its next; the last one repeats.
INTERVALS = (10.0, 60.0, 600.0, 3600.0)
# Changes of one series that are shown in a row, and seconds until its credit grows by one.
CHANGES = 8
CHANGE_REFILL = 600.0
# Levels that state a fault: kept until mark_recovered() or forget(). Others expire when idle.
FAULTS = frozenset({"warning", "error", "critical"})


@attrs.frozen
class Line:
    """The parts of a log line that decide about folding.

    subject  what the event is about: equal subjects make one series
    reason   equal reasons fold; another one is a change
    key      the key with which the series is removed; None: it belongs to no key
    fields   what a summary shows; opaque
    """

    event: str
    level: str
    subject: Hashable
    reason: str = ""
    key: str | None = None
    fields: Mapping[str, Any] = attrs.field(factory=dict, eq=False)


@attrs.frozen
class Summary:
    """Lines that were counted instead of shown: *repeated* since *since* (seconds)."""

    line: Line
    repeated: int
    since: float
    changes: int = 0  # how often the reason changed among them
    ended: bool = False  # the fault has ended, and no line has announced that


@attrs.frozen
class Emit:
    """Show the line; *before* is a summary that has to come first.

    repeated  lines that this one represents, itself not counted; 0 on a first line
    since     when the first of them arrived
    changes   how often the reason changed among them
    """

    repeated: int = 0
    since: float = 0.0
    changes: int = 0
    before: Summary | None = None


@attrs.frozen
class Suppress:
    """Do not show the line: it is counted."""


@attrs.frozen
class Recovery:
    """A fault that was shown has ended; *repeated* lines of it were counted and not yet shown."""

    line: Line
    since: float  # when the fault was first shown
    repeated: int


_SeriesId = tuple[str, str | None, Hashable]
_FIRST = Emit()
_SUPPRESS = Suppress()


@attrs.define(eq=False)
class _Series:
    line: Line  # the newest one
    seen: float  # when it arrived
    due: float  # of the next summary
    began: float  # when this fault was first shown
    counted_since: float = 0.0  # when the first counted line arrived; valid while repeated > 0
    repeated: int = 0
    changes: int = 0
    step: int = 0  # index into INTERVALS
    credit: float = CHANGES
    credited: float = 0.0  # when credit was last brought up to date
    shown: bool = True  # the current state was shown; False: it is only counted
    healthy: bool = False  # recovered; kept for its credit, so that flapping folds too

    def count(self, now: float) -> None:
        if self.repeated == 0:
            self.counted_since = now
        self.repeated += 1

    def spend(self, now: float) -> bool:
        """Take one change from the credit; False when there is none."""
        self.credit = min(CHANGES, self.credit + (now - self.credited) / CHANGE_REFILL)
        self.credited = now
        if self.credit < 1:
            return False
        self.credit -= 1
        return True

    def reset_interval(self, now: float) -> None:
        self.step = 0
        self.due = now + INTERVALS[0]

    def take_summary(self, now: float) -> Summary:
        """Everything counted so far; the next summary is one interval further on."""
        summary = Summary(
            self.line, self.repeated, self.counted_since, self.changes, ended=self.healthy
        )
        self.repeated = self.changes = 0
        self.step = min(self.step + 1, len(INTERVALS) - 1)
        self.due = now + INTERVALS[self.step]
        self.shown = not self.healthy
        return summary

    def expired(self, now: float) -> bool:
        if self.repeated or (self.line.level in FAULTS and not self.healthy):
            return False
        return now >= max(self.due, self.seen + (CHANGES * CHANGE_REFILL if self.healthy else 0))


@attrs.define(eq=False)
class RepeatFilter:
    """Decides which lines are shown. Not thread-safe: its owner holds a lock."""

    capacity: int = 4096
    # Least recently seen first.
    _series: dict[_SeriesId, _Series] = attrs.field(factory=dict, init=False)
    # Exactly the ids of _series whose line has a key.
    _of_key: dict[str, set[_SeriesId]] = attrs.field(factory=dict, init=False)
    # Counted lines of series that were evicted: returned by the next flush_due().
    _evicted: list[Summary] = attrs.field(factory=list, init=False)
    # No series has a summary due, or expires, before this.
    _next: float = attrs.field(default=math.inf, init=False)

    def __repr__(self) -> str:
        return (
            f"<RepeatFilter {len(self._series)}/{self.capacity} series, {len(self._of_key)} keys>"
        )

    def admit(self, line: Line, now: float) -> Emit | Suppress:
        """Whether *line* is shown."""
        series_id = (line.event, line.key, line.subject)
        series = self._series.pop(series_id, None)
        if series is None:
            self._begin(series_id, line, now)
            return _FIRST
        self._series[series_id] = series  # the most recently seen one is last
        if series.healthy or series.line.reason != line.reason:
            verdict = self._change(series, line, now)
        else:
            verdict = self._repeat(series, line, now)
        self._next = min(self._next, series.due)
        return verdict

    def flush_due(self, now: float) -> list[Summary]:
        """The summaries that are due. Call about once a second."""
        due, self._evicted = self._evicted, []
        if now < self._next:
            return due
        for series_id, series in list(self._series.items()):
            if series.repeated and now >= series.due:
                due.append(series.take_summary(now))
            elif series.expired(now):
                self._remove(series_id)
        self._next = (
            min(
                (series.due if series.repeated else now + INTERVALS[1])
                for series in self._series.values()
            )
            if self._series
            else math.inf
        )
        return due

    def flush_all(self, now: float) -> list[Summary]:
        """Every counted line, for the end of the process."""
        due, self._evicted = self._evicted, []
        due += [series.take_summary(now) for series in self._series.values() if series.repeated]
        return due

    def mark_recovered(self, key: str, now: float) -> list[Recovery]:
        """The faults of *key* that have ended now and were shown. A second call returns none."""
        ended = []
        for series_id in sorted(self._of_key.get(key, ()), key=repr):
            series = self._series[series_id]
            if series.healthy or series.line.level not in FAULTS:
                continue
            series.healthy = True
            series.seen = now
            self._next = min(self._next, series.due)
            if series.shown:
                ended.append(Recovery(series.line, series.began, series.repeated))
                series.repeated = series.changes = 0
        return ended

    def forget(self, key: str) -> None:
        """Drop all state of *key*, including what was counted for it."""
        for series_id in list(self._of_key.get(key, ())):
            self._remove(series_id)

    def _begin(self, series_id: _SeriesId, line: Line, now: float) -> None:
        if len(self._series) >= self.capacity:
            self._evict(now)
        series = _Series(line, seen=now, due=now + INTERVALS[0], began=now, credited=now)
        self._series[series_id] = series
        if line.key is not None:
            self._of_key.setdefault(line.key, set()).add(series_id)
        self._next = min(self._next, series.due)

    def _change(self, series: _Series, line: Line, now: float) -> Emit | Suppress:
        was_healthy, series.healthy = series.healthy, False
        if was_healthy:
            series.began = now
        if not series.spend(now):
            series.shown = False
            series.changes += 1
            return self._repeat(series, line, now)
        before = series.take_summary(now) if series.repeated else None
        series.line, series.seen, series.shown = line, now, True
        series.reset_interval(now)
        return Emit(before=before) if before else _FIRST

    def _repeat(self, series: _Series, line: Line, now: float) -> Emit | Suppress:
        series.line, series.seen = line, now
        if now < series.due:
            series.count(now)
            return _SUPPRESS
        if not series.repeated:
            series.counted_since = now
        # The line itself is shown, so it is not counted among those that it represents.
        summary = series.take_summary(now)
        return Emit(summary.repeated, summary.since, summary.changes)

    def _evict(self, now: float) -> None:
        series_id = next(iter(self._series))
        series = self._series[series_id]
        # Bounded like the series themselves; beyond that a count is lost rather than memory.
        if series.repeated and len(self._evicted) < self.capacity:
            self._evicted.append(series.take_summary(now))
        self._remove(series_id)

    def _remove(self, series_id: _SeriesId) -> None:
        key = self._series.pop(series_id).line.key
        if key is not None:
            ids = self._of_key[key]
            ids.discard(series_id)
            if not ids:
                del self._of_key[key]
