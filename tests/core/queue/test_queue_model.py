"""The work queue against a model that keeps only what was enqueued and what runs."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reconciled.core.queue.backoff import Backoff
from reconciled.core.queue.entry import MAX_CAUSES
from reconciled.core.queue.lane import Job
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.queue.states import Priority
from reconciled.core.queue.statistics import lane_statistics
from reconciled.core.resources import Key, controller_of, key_of

LANES = ("a", "b")
KEYS = [key_of(lane, f"k{number}") for lane in LANES for number in range(3)]
BACKOFF = Backoff(2.0, 16.0)
keys = st.sampled_from(KEYS)
priorities = st.sampled_from(list(Priority))
numbers = st.integers(0, 9)


class FixedJitter(Random):
    """Jitter that the model can predict."""

    def random(self) -> float:
        """The middle of the range."""
        return 0.5


class Enqueued:
    """One cause that has to reach a run, and from when on."""

    def __init__(self, cause: str, priority: Priority, when: float) -> None:
        self.cause = cause
        self.opens = priority <= Priority.CHANGED
        self.when = when


class Queue(RuleBasedStateMachine):
    """Every rule does one thing to the queue and to the model."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1.0
        self.queue = WorkQueue(2, FixedJitter())
        self.queue.wake = self.woken
        self.lanes = {name: self.queue.lane(name, 1, BACKOFF) for name in LANES}
        self.pending: dict[Key, list[Enqueued]] = {key: [] for key in KEYS}
        self.gates = dict.fromkeys(KEYS, 0.0)
        self.jobs: dict[Key, Job] = {}
        self.forgotten: set[Key] = set()
        self.causes = 0
        self.asleep: float | None = None  # until when, after a get() that returned None
        self.may_wake = False
        self.refused = 0
        self.closed = False

    def woken(self) -> None:
        """The hook: called only while the dispatcher is idle, and at most once."""
        assert self.may_wake
        assert not self.closed
        self.asleep, self.may_wake = None, False

    def enqueue(self, key: Key, priority: Priority, when: float) -> str:
        """The model's part of an enqueue."""
        self.causes += 1
        cause = f"cause {self.causes}"
        if self.closed:
            self.refused += 1
        else:
            self.pending[key].append(Enqueued(cause, priority, when))
        return cause

    def ready_at_latest(self, key: Key) -> float:
        """The time by which *key* has to be ready."""
        gate = self.gates[key]
        times = [e.when if e.opens else max(e.when, gate) for e in self.pending[key]]
        return min(times, default=math.inf)

    def ready_at_earliest(self, key: Key) -> float:
        """The earliest time at which *key* may be ready."""
        gate = 0.0 if any(e.opens for e in self.pending[key]) else self.gates[key]
        return min((max(e.when, gate) for e in self.pending[key]), default=math.inf)

    def running(self, name: str) -> int:
        """How many keys of a lane the model has running."""
        return sum(controller_of(key) == name for key in self.jobs)

    def ready(self) -> list[Key]:
        """The keys that get() has to choose from."""
        if self.closed or len(self.jobs) >= self.queue.limit:
            return []
        return [
            key
            for key in KEYS
            if key not in self.jobs
            and self.ready_at_latest(key) <= self.now
            and self.running(controller_of(key)) < self.lanes[controller_of(key)].limit
        ]

    @rule(key=keys, priority=priorities)
    def add(self, key: Key, priority: Priority) -> None:
        """Enqueue a key."""
        self.lanes[controller_of(key)].add(
            key, self.now, self.enqueue(key, priority, self.now), priority
        )

    @rule(key=keys, priority=priorities, delay=numbers)
    def add_at(self, key: Key, priority: Priority, delay: int) -> None:
        """Enqueue a key for later."""
        when = self.now + delay
        cause = self.enqueue(key, priority, when)
        self.lanes[controller_of(key)].add_at(key, when, self.now, cause, priority)

    @rule(times=st.integers(1, 3))
    def get(self, times: int) -> None:
        """Get keys: at most one run a key, within limits, not early, no cause lost."""
        for _ in range(times):
            ready = self.ready()
            job = self.queue.get(self.now)
            if job is None:
                assert not ready
                self.asleep, self.may_wake = self.queue.next_due() or math.inf, True
                return
            assert not self.closed
            assert job.key not in self.jobs
            assert self.ready_at_earliest(job.key) <= self.now
            expected = {each.cause for each in self.pending[job.key]}
            assert set(job.causes) <= expected | {"retry"}
            assert len(job.causes) == len(set(job.causes)) <= MAX_CAUSES
            assert expected <= {*job.causes, "retry"} or job.more_causes
            self.pending[job.key], self.gates[job.key] = [], 0.0
            self.jobs[job.key] = job

    def give_back(self, number: int) -> tuple[Job, bool]:
        """A running job, and whether its key was not forgotten meanwhile."""
        job = self.jobs.pop(sorted(self.jobs)[number % len(self.jobs)])
        known = job.key not in self.forgotten
        self.forgotten.discard(job.key)
        return job, known

    some_run = precondition(lambda self: self.jobs)

    @some_run
    @rule(number=numbers, backoff=st.sampled_from([0, 0, 3]))
    def done(self, number: int, backoff: int) -> None:
        """A run succeeds."""
        job, known = self.give_back(number)
        if known and backoff:
            self.gates[job.key] = self.now + backoff
        job.lane.done(job, self.now, backoff)

    @some_run
    @rule(number=numbers, delay=numbers, backoff=st.sampled_from([0, 0, 3]))
    def done_after(self, number: int, delay: int, backoff: int) -> None:
        """A run succeeds and requests another one later."""
        job, known = self.give_back(number)
        cause = self.enqueue(job.key, Priority.RESYNC, self.now + delay) if known else "again"
        if known and backoff:
            self.gates[job.key] = self.now + backoff
        job.lane.done_after(job, self.now, delay, cause, backoff=backoff)

    @some_run
    @rule(number=numbers)
    def failed(self, number: int) -> None:
        """A run fails: a gate, and one more run behind it."""
        job, known = self.give_back(number)
        delay = job.lane.failed(job, self.now)
        if known:
            gate = self.now + BACKOFF.longest(job.failures + 1) * 0.625
            self.gates[job.key] = gate
            self.pending[job.key].append(Enqueued("retry", Priority.RETRY, gate))
        assert (delay is None) == (not known)

    @some_run
    @rule(number=numbers)
    def terminal(self, number: int) -> None:
        """A run fails permanently."""
        job, known = self.give_back(number)
        if known:
            self.gates[job.key] = math.inf
        job.lane.terminal(job, self.now)

    @some_run
    @rule(number=numbers)
    def interrupted(self, number: int) -> None:
        """A run is stopped from outside: its causes are pending again."""
        job, known = self.give_back(number)
        if known:
            again = [Enqueued(cause, job.priority, self.now) for cause in job.causes]
            self.pending[job.key] = again + self.pending[job.key]
            self.pending[job.key][0].opens = True  # never behind a gate
        job.lane.interrupted(job, self.now)

    @rule(key=keys)
    def forget(self, key: Key) -> None:
        """A key is forgotten."""
        self.lanes[controller_of(key)].forget(key)
        self.pending[key], self.gates[key] = [], 0.0
        if key in self.jobs:
            self.forgotten.add(key)

    @rule(limit=st.integers(0, 3), name=st.sampled_from(["", *LANES]))
    def limit(self, limit: int, name: str) -> None:
        """Limits change while keys run."""
        if name:
            self.lanes[name].limit = limit
        else:
            self.queue.limit = limit

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        """Time passes; a dispatcher that sleeps until next_due() wakes at that time."""
        self.now += seconds
        if self.asleep is not None and self.asleep <= self.now:
            self.asleep = None

    @precondition(lambda self: not self.closed)
    @rule(really=st.integers(0, 19))
    def close(self, really: int) -> None:
        """Close the queue; rarely, so that the other rules are tested."""
        if really == 0:
            self.closed = True
            self.asleep = None
            self.queue.close()

    @invariant()
    def an_idle_dispatcher_misses_nothing(self) -> None:
        """While get() returned None and ``wake`` was not called, no key is ready."""
        if self.asleep is not None and not self.closed:
            assert not self.ready()
            assert (self.queue.next_due() or math.inf) >= min(self.asleep, self.now)

    @invariant()
    def counts_agree(self) -> None:
        """Counts equal those of the model; no key without a reason has state."""
        for name, lane in self.lanes.items():
            seen = lane_statistics(lane, self.now)
            assert seen.waiting == lane.waiting >= 0
            assert seen.running == lane.running == self.running(name)
            in_ring = lane.waiting > 0 and lane.running < lane.limit and not self.closed
            assert lane.in_ring == in_ring
            reasons = {key for key in KEYS if self.pending[key] or self.gates[key]}
            assert {entry.key for entry in lane} <= reasons | self.jobs.keys()
        assert self.queue.running == len(self.jobs)
        assert self.queue.unserved().refused == self.refused

    def teardown(self) -> None:
        """Run everything: each pending cause is handed out, and no state is left."""
        if self.closed:
            assert self.queue.get(self.now + 1e6) is None
            return
        self.queue.limit = 99
        for lane in self.lanes.values():
            lane.limit = 99
        for key in KEYS:
            if self.gates[key] == math.inf:
                self.add(key, Priority.ASKED)
        for _ in range(99):
            while self.jobs:
                job, _ = self.give_back(0)
                job.lane.done(job, self.now)
            self.get(1)
            if not self.jobs and (due := self.queue.next_due()) is not None:
                self.now = max(self.now, due)
        assert not any(self.pending.values())
        assert [len(lane) for lane in self.lanes.values()] == [0, 0]


TestModel = pytest.mark.timeout(300)(Queue.TestCase)
TestModel.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
