"""One controller's part of the work queue: its keys, their priorities, its limit.

Invariants: a key has one entry at a time and so at most one run (invariant 1); every cause
that arrives during a run leads to one more run, though not before a closed gate opens; a key
that is neither waiting, running, delayed nor failing has no state here (invariant 14).

Delays: the earliest due time wins, and there is one run. An enqueue for later that is not yet
due when something else makes its key run goes into that run (its cause too): a caller that
needs a periodic run enqueues the key again at the end of each, as ``done_after`` does. An
enqueue for later that arrives *during* a run is kept until after it. An entry has one due time:
where one of its enqueues opens gates, the gate does not hold the earlier ones either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

from reconciled.core.queue.counters import WAIT_BOUNDS, Counters
from reconciled.core.queue.entry import Entry
from reconciled.core.queue.fifo import PriorityFifo
from reconciled.core.queue.states import OPENS_GATE, EntryState, Priority

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from reconciled.core.queue.backoff import Backoff
    from reconciled.core.queue.delays import Delays
    from reconciled.core.queue.ring import Ring
    from reconciled.core.resources import Key

# Read for each key handed out; an attribute of an Enum class costs ten times as much.
_WAITING, _DELAYED, _RUNNING = EntryState.WAITING, EntryState.DELAYED, EntryState.RUNNING
_CHANGED, _RESYNC = Priority.CHANGED, Priority.RESYNC


class Job(Protocol):
    """One key handed out for one run. Valid until it is given back to its lane."""

    @property
    def lane(self) -> Lane:
        """Where to give it back: ``job.lane.done(job, now)`` and the other endings."""

    @property
    def key(self) -> Key:
        """What to reconcile."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Why it runs: distinct, in order of arrival, MAX_CAUSES at most."""

    @property
    def more_causes(self) -> int:
        """How many enqueues had a cause beyond MAX_CAUSES."""

    @property
    def priority(self) -> Priority:
        """The most urgent priority that was requested."""

    @property
    def waited(self) -> float:
        """Seconds from when it could have run until it did."""

    @property
    def started(self) -> float:
        """When it was handed out, in the clock of the queue's callers."""

    @property
    def failures(self) -> int:
        """Failed runs in a row before this one."""

    @property
    def dirty(self) -> bool:
        """Whether a cause arrived since it was handed out that requests a run without delay."""


class Lane:
    """The keys of one controller. Made by WorkQueue.lane(); the queue hands out its keys.

    Every method takes *now* in seconds of one monotonic clock. No method blocks, and none
    calls back, except the queue's ``wake``.
    """

    __slots__ = (
        "_by_priority",
        "_delays",
        "_entries",
        "_fifo",
        "_limit",
        "_ring",
        "_rng",
        "backoff",
        "closed",
        "counters",
        "in_ring",
        "name",
        "running",
        "waiting",
    )

    def __init__(  # noqa: PLR0913 -- its own three, and what it shares with the other lanes
        self,
        name: str,
        limit: int,
        backoff: Backoff,
        *,
        ring: Ring[Lane],
        delays: Delays[Lane],
        rng: Random,
    ) -> None:
        self.name = name
        self.backoff = backoff
        self.counters = Counters()
        self.waiting = 0
        self.running = 0
        self.in_ring = False  # owned by Ring
        self.closed = False  # adds are refused: the queue was closed or the lane dropped
        self._limit = limit
        self._ring = ring
        self._delays = delays
        self._rng = rng
        self._entries: dict[Key, Entry[Lane]] = {}
        self._fifo = PriorityFifo[Lane]()
        self._by_priority = self._fifo.by_priority

    def __len__(self) -> int:
        """How many keys have any state here."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[Lane]]:
        """Every entry, for inspection: waiting, running, delayed or failing."""
        return iter(self._entries.values())

    @property
    def limit(self) -> int:
        """How many of its keys may run at once; 0 pauses it. May be changed at any time."""
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        if self.running >= limit:
            self._ring.withdraw(self)
        else:
            self._offer()

    # -- enqueueing

    def add(self, key: Key, now: float, cause: str, priority: Priority = _CHANGED) -> None:
        """Enqueue *key* to run as soon as possible.

        If it is running, it runs once more; if it is waiting, one run serves all enqueues, at
        the most urgent of their priorities. An enqueue less urgent than OPENS_GATE waits behind
        a closed gate.
        """
        entries = self._entries
        if key in entries or self.closed:
            self._add_again(key, now, cause, priority)
            return
        self.counters.adds += 1
        entries[key] = entry = Entry(self, key, (cause,), priority, now)
        self._by_priority[priority].append(entry)
        self.waiting += 1
        if not self.in_ring and self.running < self._limit:
            self._ring.offer(self)

    def add_at(
        self, key: Key, when: float, now: float, cause: str, priority: Priority = _RESYNC
    ) -> None:
        """Enqueue *key* to run at *when*; an earlier run for another cause serves this one too."""
        if when <= now:
            self.add(key, now, cause, priority)
            return
        if self.closed:
            self.counters.refused += 1
            return
        self.counters.adds += 1
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(self, key, (), priority, now)
        elif entry.running:
            if entry.follow_up is None:
                entry.follow_up = Entry(self, key, (), priority, now)
            entry = entry.follow_up
        else:
            self.counters.dedupes += 1
        if entry.causes and entry.state is _WAITING:
            entry.record_cause(cause)
            self._raise_priority(entry, priority)
        else:
            self._delays.enqueue(entry, when, cause, priority)

    # -- endings of a run

    def done(self, job: Job, now: float, backoff: float = 0.0) -> None:
        """*job* succeeded: its failures are forgotten, and it runs again if a cause arrived.

        A gate holds it back for *backoff* seconds, as after a failure: the brake on hot loops.
        """
        entry = self._take_back(job)
        if entry.follow_up is not None or backoff > 0.0:
            self._finish(entry, now, backoff)
        elif self.waiting and not self.in_ring and self.running < self._limit:
            self._ring.offer(self)
        elif self._ring.idle:
            self._ring.wake_if_ready()

    def done_after(
        self, job: Job, now: float, delay: float, cause: str, *, backoff: float = 0.0
    ) -> None:
        """*job* succeeded, and runs again in *delay* seconds.

        If another cause makes it run earlier, that run serves both.
        """
        entry = self._entries.get(job.key)
        if entry is job and entry.state is _RUNNING:
            self.add_at(job.key, now + delay, now, cause)
        self.done(job, now, backoff)

    def failed(self, job: Job, now: float, cause: str = "retry") -> float | None:
        """*job* failed: it runs again when the gate of its backoff opens.

        Returns the seconds until then: 0 where a cause that opens the gate arrived during the
        run, None where the key was forgotten meanwhile and does not run again.
        """
        entry = self._take_back(job)
        if entry.state is EntryState.FORGOTTEN:
            self._finish(entry, now)
            return None
        self.counters.retries += 1
        following = entry.follow_up or Entry(self, entry.key, (cause,), Priority.RETRY, now)
        entry.follow_up = following
        following.failures = entry.failures + 1
        delay = self.backoff.delay(following.failures, self._rng)
        self._delays.close_gate(following, now + delay)
        if following.state is _DELAYED:
            self._delays.enqueue(following, following.gate, cause, Priority.RETRY)
        self._finish(entry, now)
        return 0.0 if following.due is None else following.due - now

    def terminal(self, job: Job, now: float) -> None:
        """*job* can never succeed: only an enqueue that opens the gate makes it run again."""
        entry = self._take_back(job)
        if entry.state is _RUNNING:
            if entry.follow_up is None:
                entry.follow_up = Entry(self, entry.key, (), _RESYNC, now)
            self._delays.close_gate(entry.follow_up, math.inf)
        self._finish(entry, now)

    def interrupted(self, job: Job, now: float) -> None:
        """*job* was stopped from outside: it waits again, with what arrived during the run.

        No backoff step, and its failures are left unchanged (invariant 8).
        """
        entry = self._take_back(job)
        if entry.state is _RUNNING:
            self.counters.interruptions += 1
            following = Entry(self, entry.key, entry.causes, entry.priority, now)
            following.failures = entry.failures
            following.more_causes = entry.more_causes
            if entry.follow_up is not None:
                self._delays.drop(entry.follow_up)
                following.absorb(entry.follow_up)
            entry.follow_up = following
        self._finish(entry, now)

    def forget(self, key: Key) -> None:
        """Drop everything about *key*.

        A run of it continues, still the only one, and leaves only what is enqueued after this.
        """
        entry = self._entries.get(key)
        if entry is None:
            return
        if entry.running:
            entry.state = EntryState.FORGOTTEN
            if entry.follow_up is not None:
                self._delays.drop(entry.follow_up)
                entry.follow_up = None
            return
        del self._entries[key]
        if entry.state is _WAITING:
            entry.state = EntryState.REMOVED
            self.waiting -= 1
            self._fifo.mark_stale(self.waiting)
            if not self.waiting:
                self._ring.withdraw(self)
        self._delays.drop(entry)

    # -- for the queue

    def take(self, now: float) -> Entry[Lane]:
        """Hand out the next key. Called only for the lane at the front of the ring."""
        counters = self.counters
        counters.gets = gets = counters.gets + 1
        entry = self._fifo.choose(gets).popleft()
        entry.state = _RUNNING
        entry.started = now
        entry.waited = waited = now - entry.since
        priority = entry.priority
        counters.waits[priority][bisect_left(WAIT_BOUNDS, waited)] += 1
        counters.wait_sums[priority] += waited
        self.running = running = self.running + 1
        self.waiting = waiting = self.waiting - 1
        if waiting and running < self._limit:
            self._ring.ready.append(self)
        else:
            self.in_ring = False
        return entry

    def come_due(self, entry: Entry[Lane]) -> None:
        """The delay of *entry* has ended: it waits, unless only its gate was remembered."""
        if self._entries.get(entry.key) is not entry:
            entry.state = _WAITING  # of a running key: put into the fifo when the run ends
        elif entry.causes:
            self._append_waiting(entry)
        else:
            del self._entries[entry.key]

    # -- inside

    def _add_again(self, key: Key, now: float, cause: str, priority: Priority) -> None:
        if self.closed:
            self.counters.refused += 1
            return
        self.counters.adds += 1
        entry = self._entries[key]
        if entry.running:
            if entry.follow_up is None:
                entry.follow_up = Entry(self, key, (cause,), priority, now)
                return
            entry = entry.follow_up
        if entry.state is _WAITING:
            self.counters.dedupes += 1
            entry.record_cause(cause)
            self._raise_priority(entry, priority)
        elif priority <= OPENS_GATE or now >= entry.gate:
            entry.record_cause(cause)
            entry.priority = min(priority, entry.priority)
            entry.since = now
            self._delays.drop(entry)
            self.come_due(entry)
        else:
            self.counters.dedupes += 1
            self._delays.enqueue(entry, now, cause, priority)

    def _take_back(self, job: Job) -> Entry[Lane]:
        entry = self._entries.pop(job.key, None)
        if entry is not job:
            if entry is not None:
                self._entries[job.key] = entry
            raise ValueError(
                f"{job.key} was not handed out by lane {self.name}, or was given back already"
            )
        self.running -= 1
        self._ring.running -= 1
        return entry

    def _finish(self, ended: Entry[Lane], now: float, backoff: float = 0.0) -> None:
        """Put what follows the run of *ended* in its place, and offer the free slot."""
        following = ended.follow_up
        if backoff > 0.0 and ended.state is _RUNNING:
            following = following or Entry(self, ended.key, (), _RESYNC, now)
            self._delays.close_gate(following, now + backoff)
        if following is not None:
            self._entries[following.key] = following
            if following.state is _WAITING:
                self._append_waiting(following)
        self._offer()
        self._ring.wake_if_ready()

    def _append_waiting(self, entry: Entry[Lane]) -> None:
        entry.state = _WAITING
        self._by_priority[entry.priority].append(entry)
        self.waiting += 1
        self._offer()

    def _raise_priority(self, entry: Entry[Lane], priority: Priority) -> None:
        """Make a waiting entry more urgent; never less."""
        if priority >= entry.priority:
            return
        entry.priority = priority
        if self._entries[entry.key] is entry:
            self._by_priority[priority].append(entry)
            self._fifo.mark_stale(self.waiting)

    def _offer(self) -> None:
        if self.waiting and not self.in_ring and self.running < self._limit:
            self._ring.offer(self)
