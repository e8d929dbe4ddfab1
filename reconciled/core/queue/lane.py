"""One controller's part of the work queue: its keys, their priorities, its limit.

Invariants: a key has one stay at a time and so at most one run (invariant 1); every cause
that arrives during a run leads to one more run, though not before a closed gate opens; a key
that is neither waiting, running, delayed nor failing has no state here (invariant 14).

Delays: the earliest wish wins, and there is one delivery. A wish for later that has not come
due when something else makes its key run goes into that run (its cause too): whoever wants
a periodic run asks again at the end of each, as ``done_after`` does. A wish for later that
arrives *during* a run is kept for after it. A stay is due at one time: where one of the wishes
that met in it opens gates, the gate may not hold the earlier ones either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from reconciled.core.queue.counters import WAIT_BOUNDS, Counters
from reconciled.core.queue.entry import OPENS_GATE, Entry, EntryState, Job, Priority
from reconciled.core.queue.fifo import PriorityFifo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from reconciled.core.queue.backoff import Backoff
    from reconciled.core.queue.delays import Delays
    from reconciled.core.queue.ring import Ring
    from reconciled.core.resources import Key

# Looked up for each key handed out; a class attribute of an Enum costs ten times as much.
_WAITING, _DELAYED, _RUNNING = EntryState.WAITING, EntryState.DELAYED, EntryState.RUNNING
_CHANGED, _RESYNC = Priority.CHANGED, Priority.RESYNC


class Lane:
    """The keys of one controller. Made by WorkQueue.lane(), which also hands out its keys.

    Every method takes *now* in seconds of one monotonic clock. None blocks or calls back,
    but for the queue's ``wake``.
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
        self, name: str, limit: int, backoff: Backoff, *, ring: Ring, delays: Delays, rng: Random
    ) -> None:
        self.name = name
        self.backoff = backoff
        self.counters = Counters()
        self.waiting = 0
        self.running = 0
        self.in_ring = False  # owned by Turns
        self.closed = False  # adds are refused: the queue was closed or the lane dropped
        self._limit = limit
        self._ring = ring
        self._delays = delays
        self._rng = rng
        self._entries: dict[Key, Entry] = {}
        self._fifo = PriorityFifo()
        self._by_priority = self._fifo.by_priority

    def __len__(self) -> int:
        """How many keys have any state here."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Every stay, for inspection: waiting, running, delayed or failing."""
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

    # -- wishes

    def add(self, key: Key, now: float, cause: str, priority: Priority = _CHANGED) -> None:
        """Want a run of *key* as soon as may be.

        One more run if it is running; one for all wishes if it is waiting, at the highest
        of their priorities. Below OPENS_GATE the wish waits for a closed gate.
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
        """Want a run of *key* at *when*, or with whatever makes it run before."""
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

        For *rest* seconds it stands behind a gate, as after a failure (for loops).
        """
        entry = self._take_back(job)
        if entry.follow_up is not None or backoff > 0.0:
            self._finish(entry, now, backoff)
        elif self.waiting and not self.in_ring and self.running < self._limit:
            self._ring.offer(self)
        elif self._ring.idle:
            self._ring.wake_if_ready()

    def done_after(  # noqa: PLR0913 -- an ending, a wish and a rest in one step
        self,
        job: Job,
        now: float,
        delay: float,
        cause: str,
        *,
        priority: Priority = _RESYNC,
        backoff: float = 0.0,
    ) -> None:
        """*job* succeeded, and wants to run again in *delay* seconds.

        Or before that for another cause: there is one run for both.
        """
        entry = self._entries.get(job.key)
        if entry is job and entry.state is _RUNNING:
            self.add_at(job.key, now + delay, now, cause, priority)
        self.done(job, now, backoff)

    def failed(self, job: Job, now: float, cause: str = "retry") -> float | None:
        """*job* failed: it runs again behind the gate of its backoff.

        Gives the seconds until then: 0 where a cause that opens the gate arrived during the
        run, None where the key was forgotten meanwhile and nothing comes back.
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
        """*job* can never succeed: only a wish that opens the gate makes it run again."""
        entry = self._take_back(job)
        if entry.state is _RUNNING:
            if entry.follow_up is None:
                entry.follow_up = Entry(self, entry.key, (), _RESYNC, now)
            self._delays.close_gate(entry.follow_up, math.inf)
        self._finish(entry, now)

    def interrupted(self, job: Job, now: float) -> None:
        """*job* was stopped from outside: it waits again, with what arrived during the run.

        No backoff step, and its failures stay as they were (invariant 8).
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

        A run of it goes on, still alone, and leaves only what is wished after this.
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

    def take(self, now: float) -> Entry:
        """Hand out the next key. Only for the lane whose turn it is."""
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

    def come_due(self, entry: Entry) -> None:
        """*entry* was delayed and is not any more: it waits, unless only its gate was left."""
        if self._entries.get(entry.key) is not entry:
            entry.state = _WAITING  # of a running key: goes into line when the run ends
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

    def _take_back(self, job: Job) -> Entry:
        entry = self._entries.pop(job.key, None)
        if entry is not job:
            if entry is not None:
                self._entries[job.key] = entry
            raise ValueError(
                f"{job.key} was not handed out by lane {self.name}, or is back already"
            )
        self.running -= 1
        self._ring.running -= 1
        return entry

    def _finish(self, ended: Entry, now: float, backoff: float = 0.0) -> None:
        """Put what follows the run of *ended* in its place, and go on with the free slot."""
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

    def _append_waiting(self, entry: Entry) -> None:
        entry.state = _WAITING
        self._by_priority[entry.priority].append(entry)
        self.waiting += 1
        self._offer()

    def _raise_priority(self, entry: Entry, priority: Priority) -> None:
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
