"""The work queue, rule by rule; test_queue_model.py combines them in random order."""

from __future__ import annotations

import math
import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reconciled.core.queue.backoff import Backoff
from reconciled.core.queue.counters import WAIT_BOUNDS
from reconciled.core.queue.entry import MAX_CAUSES
from reconciled.core.queue.fifo import AGEING
from reconciled.core.queue.lane import Job, Lane
from reconciled.core.queue.queue import Unserved, WorkQueue
from reconciled.core.queue.states import KeyState, Priority
from reconciled.core.queue.statistics import lane_statistics
from reconciled.core.resources import Key, key_of

A, B, C = (key_of("site", name) for name in "abc")
BACKOFF = Backoff(8.0, 64.0)


@pytest.fixture
def queue() -> WorkQueue:
    """A queue with a high limit."""
    return WorkQueue(1000, Random(1))


@pytest.fixture
def lane(queue: WorkQueue) -> Lane:
    """Its only lane."""
    return queue.lane("site", 1000, BACKOFF)


def take(queue: WorkQueue, now: float = 0.0) -> Job:
    """The next job; there has to be one."""
    job = queue.get(now)
    assert job is not None
    return job


def served(queue: WorkQueue, now: float = 0.0) -> list[Key]:
    """Run everything that is ready, one by one."""
    order = []
    while (job := queue.get(now)) is not None:
        order.append(job.key)
        job.lane.done(job, now)
    return order


def test_many_enqueues_make_one_run(queue: WorkQueue, lane: Lane) -> None:
    """Enqueues of a waiting key become one run, with their causes in order, each once."""
    for cause in ("b", "a", "b"):
        lane.add(A, 0.0, cause)
    job = take(queue)
    assert (job.key, job.causes, job.more_causes) == (A, ("b", "a"), 0)
    lane.done(job, 0.0)
    assert queue.get(0.0) is None
    assert (lane.counters.adds, lane.counters.dedupes, lane.counters.gets) == (3, 2, 1)


def test_causes_are_capped_and_counted(queue: WorkQueue, lane: Lane) -> None:
    """Of a stream of different causes the first MAX_CAUSES are kept and the others counted."""
    for number in range(1000):
        lane.add(A, 0.0, f"event {number}")
    job = take(queue)
    assert job.causes == tuple(f"event {number}" for number in range(MAX_CAUSES))
    assert job.more_causes == 1000 - MAX_CAUSES


def test_a_cause_during_a_run_leads_to_one_more(queue: WorkQueue, lane: Lane) -> None:
    """Invariant 1: never two runs of a key at once, and one more for the causes meanwhile."""
    lane.add(A, 0.0, "first")
    job = take(queue)
    lane.add(A, 1.0, "second")
    lane.add(A, 1.0, "third")
    assert job.causes == ("first",)
    assert job.dirty
    assert queue.get(1.0) is None
    lane.done(job, 2.0)
    again = take(queue, 4.0)
    assert (again.causes, again.waited) == (("second", "third"), 3.0)
    assert job.causes == ("first",)


def test_the_more_urgent_runs_first(queue: WorkQueue, lane: Lane) -> None:
    """Keys run by priority, then in order of arrival."""
    for name, priority in [("e", 4), ("d", 3), ("c", 2), ("b", 1), ("a", 0), ("c2", 2)]:
        lane.add(key_of("site", name), 0.0, "x", Priority(priority))
    assert [key.partition("/")[2] for key in served(queue)] == ["a", "b", "c", "c2", "d", "e"]


def test_a_more_urgent_enqueue_raises_a_waiting_key(queue: WorkQueue, lane: Lane) -> None:
    """A more urgent enqueue raises a waiting key's priority, a less urgent one never lowers it."""
    lane.add(A, 0.0, "tick", Priority.RESYNC)
    lane.add(B, 0.0, "changed", Priority.CHANGED)
    lane.add(A, 0.0, "asked", Priority.ASKED)
    lane.add(A, 0.0, "tick", Priority.RESYNC)
    job = take(queue)
    assert (job.key, job.priority, job.causes) == (A, Priority.ASKED, ("tick", "asked"))
    lane.done(job, 0.0)
    assert served(queue) == [B]


def test_a_low_priority_is_not_starved(queue: WorkQueue, lane: Lane) -> None:
    """200 keys that add themselves again at once do not keep a RESYNC key from running."""
    lane.add(A, 0.0, "tick", Priority.RESYNC)
    for number in range(200):
        lane.add(key_of("site", f"busy-{number}"), 0.0, "again", Priority.CHANGED)
    for handout in range(1, 2 * AGEING + 1):
        now = handout * 0.001
        job = take(queue, now)
        if job.key == A:
            break
        lane.add(job.key, now, "again", Priority.CHANGED)
        lane.done(job, now)
    else:
        pytest.fail(f"not served within {2 * AGEING} hand-outs")


@given(st.lists(st.sampled_from(Priority), max_size=30), st.sampled_from(Priority))
def test_the_wait_is_bounded(older: list[Priority], priority: Priority) -> None:
    """With n older keys, a key runs within AGEING * (n + 1) hand-outs, whatever arrives."""
    queue = WorkQueue(1, Random(1))
    lane = queue.lane("site", 1, BACKOFF)
    for number, urgency in enumerate(older):
        lane.add(key_of("site", f"older-{number}"), 0.0, "x", urgency)
    lane.add(A, 1.0, "x", priority)
    for handout in range(AGEING * (len(older) + 1)):
        for urgency in Priority:
            lane.add(key_of("site", f"new-{handout}-{urgency}"), 2.0 + handout, "x", urgency)
        job = take(queue, 2.0 + handout)
        lane.done(job, 2.0 + handout)
        if job.key == A:
            return
    pytest.fail("not served in time")


def test_controllers_are_served_round_robin(queue: WorkQueue, lane: Lane) -> None:
    """10,000 keys of one controller delay a key of another by one hand-out."""
    other = queue.lane("other", 1000, BACKOFF)
    for number in range(10_000):
        lane.add(key_of("site", f"k{number}"), 0.0, "x", Priority.RECOVERY)
    other.add(Key("other/a"), 0.0, "x", Priority.RESYNC)
    assert "other/a" in (take(queue).key, take(queue).key)


def test_limits_hold_and_can_change(queue: WorkQueue, lane: Lane) -> None:
    """No more keys run than the lane's and the global limit allow, also after a change."""
    for number in range(10):
        lane.add(key_of("site", f"k{number}"), 0.0, "x")
    lane.limit = 2
    jobs = [take(queue), take(queue)]
    assert queue.get(0.0) is None
    lane.limit = 4
    jobs += [take(queue), take(queue)]
    lane.limit = 1
    for job in jobs[:3]:
        lane.done(job, 0.0)
        assert queue.get(0.0) is None
    lane.limit = 10
    queue.limit = 2
    jobs = [jobs[3], take(queue)]
    assert queue.get(0.0) is None
    queue.limit = 3
    assert queue.get(0.0) is not None
    queue.limit = 0
    lane.done(jobs[0], 0.0)
    assert queue.get(0.0) is None


def test_a_lane_at_its_limit_does_not_hold_up_another(queue: WorkQueue, lane: Lane) -> None:
    """A lane that runs as many keys as its limit is skipped."""
    lane.limit = 1
    other = queue.lane("other", 1, BACKOFF)
    for key in (A, B, C):
        lane.add(key, 0.0, "x")
    other.add(Key("other/a"), 0.0, "x")
    assert {take(queue).key, take(queue).key} == {A, "other/a"}
    assert queue.get(0.0) is None


def test_the_earliest_delay_wins_once(queue: WorkQueue, lane: Lane) -> None:
    """Several delayed enqueues become one run at the earliest; its wait counts from then."""
    lane.add_at(A, 30.0, 0.0, "late")
    lane.add_at(A, 10.0, 0.0, "early")
    lane.add_at(A, 20.0, 0.0, "middle")
    assert queue.get(9.9) is None
    assert queue.next_due() == 10.0
    job = take(queue, 12.0)
    assert (job.causes, job.waited) == (("late", "early", "middle"), 2.0)
    lane.done(job, 12.0)
    assert queue.get(1e6) is None
    assert len(lane) == 0


def test_an_event_before_a_periodic_run_makes_one_run(queue: WorkQueue, lane: Lane) -> None:
    """The event's run serves the periodic cause too, which is then enqueued again."""
    lane.add(A, 0.0, "changed")
    lane.done_after(take(queue), 0.0, 600.0, "after 10m")
    lane.add(A, 100.0, "changed")
    job = take(queue, 100.0)
    assert job.causes == ("after 10m", "changed")
    assert queue.next_due() is None
    lane.done_after(job, 100.0, 600.0, "after 10m")
    assert queue.get(699.0) is None
    assert take(queue, 700.0).causes == ("after 10m",)


def test_a_delayed_enqueue_during_a_run_is_kept(queue: WorkQueue, lane: Lane) -> None:
    """A delayed enqueue of a running key is due at its time, whether the run has ended or not."""
    lane.add(A, 0.0, "changed")
    job = take(queue)
    lane.add_at(A, 10.0, 0.0, "later")
    assert queue.get(11.0) is None
    lane.done(job, 12.0)
    assert take(queue, 12.0).waited == 2.0


@pytest.mark.parametrize("priority", Priority)
def test_only_urgent_enqueues_open_the_gate(
    queue: WorkQueue, lane: Lane, priority: Priority
) -> None:
    """During a backoff CHANGED and more urgent run the key, ticks and own writes do not."""
    lane.add(A, 0.0, "changed")
    delay = lane.failed(take(queue), 0.0)
    assert delay is not None
    assert delay >= 2.0
    lane.add(A, 1.0, "again", priority)
    job = queue.get(1.0)
    assert (job is not None) == (priority <= Priority.CHANGED)
    job = job or take(queue, delay)
    assert job.causes == ("retry", "again")
    assert job.failures == 1


def test_a_change_during_a_failing_run_runs_without_backoff(queue: WorkQueue, lane: Lane) -> None:
    """A failed run whose spec changed meanwhile has no backoff, and still counts as a failure."""
    lane.add(A, 0.0, "changed")
    job = take(queue)
    lane.add(A, 0.0, "changed again", Priority.CHANGED)
    assert lane.failed(job, 0.0) == 0.0
    job = take(queue)
    assert (job.causes, job.failures) == (("changed again",), 1)


def test_failures_add_up_until_a_success(queue: WorkQueue, lane: Lane) -> None:
    """Each failure doubles the backoff; a success resets it."""
    now = 0.0
    lane.add(A, now, "changed")
    for failures in range(8):
        job = take(queue, now)
        assert job.failures == failures
        delay = lane.failed(job, now)
        assert delay is not None
        longest = BACKOFF.longest(failures + 1)
        assert longest / 4 <= delay <= longest
        now += delay
    lane.done(take(queue, now), now)
    assert (lane.counters.retries, len(lane)) == (8, 0)
    lane.add(A, now, "changed")
    assert take(queue, now).failures == 0


def test_an_interrupted_run_does_not_count_as_a_failure(queue: WorkQueue, lane: Lane) -> None:
    """Invariant 8: an interrupted run waits again unchanged, with the causes meanwhile."""
    lane.add(A, 0.0, "changed", Priority.ASKED)
    lane.failed(take(queue), 0.0)
    job = take(queue, 100.0)
    lane.add(A, 100.0, "tick", Priority.RESYNC)
    lane.interrupted(job, 100.0)
    job = take(queue, 100.0)
    assert (job.causes, job.failures, job.priority) == (("retry", "tick"), 1, Priority.RETRY)
    assert (lane.counters.interruptions, lane.counters.retries) == (1, 1)


@pytest.mark.parametrize("priority", Priority)
def test_terminal_waits_for_a_change(queue: WorkQueue, lane: Lane, priority: Priority) -> None:
    """A terminal key runs again for CHANGED and more urgent only; earlier causes are not lost."""
    lane.add(A, 0.0, "changed")
    lane.terminal(take(queue), 0.0)
    lane.add(A, 0.0, "again", priority)
    lane.add_at(A, 10.0, 0.0, "later", Priority.RESYNC)
    assert queue.next_due() is None
    job = queue.get(1e9)
    assert (job is not None) == (priority <= Priority.CHANGED)
    if job is None:
        lane.add(A, 1e9, "asked", Priority.ASKED)
        assert take(queue, 1e9).causes == ("again", "later", "asked")


def test_a_backoff_holds_back_self_triggered_runs_only(queue: WorkQueue, lane: Lane) -> None:
    """After done() with a backoff, own writes wait for its end; then the key has no state."""
    lane.add(A, 0.0, "changed")
    job = take(queue)
    lane.add(A, 0.0, "own write", Priority.RESYNC)
    lane.done(job, 0.0, backoff=5.0)
    assert queue.get(4.9) is None
    job = take(queue, 5.0)
    assert job.causes == ("own write",)
    lane.done(job, 5.0, backoff=5.0)
    lane.add(A, 6.0, "asked", Priority.ASKED)
    lane.done(take(queue, 6.0), 6.0, backoff=5.0)
    assert [entry.key_state for entry in lane] == [KeyState.THROTTLED]
    assert queue.get(11.0) is None
    assert len(lane) == 0


def test_forget_removes_everything(queue: WorkQueue, lane: Lane) -> None:
    """Invariant 14: a forgotten key, in whatever state, leaves no state and never runs."""
    lane.add(A, 0.0, "waiting")
    lane.add_at(B, 10.0, 0.0, "delayed")
    lane.add(C, 0.0, "failing", Priority.ASKED)
    lane.failed(take(queue), 0.0)
    for key in (A, B, C, A):
        lane.forget(key)
    assert len(lane) == 0
    assert queue.next_due() is None
    assert queue.get(1e6) is None


@pytest.mark.parametrize("ending", ["done", "failed", "terminal", "interrupted"])
def test_a_key_forgotten_while_it_runs(queue: WorkQueue, lane: Lane, ending: str) -> None:
    """Its run continues alone and leaves only what was enqueued afterwards."""
    for enqueued in (False, True):
        lane.add(A, 0.0, "changed")
        job = take(queue)
        lane.add(A, 0.0, "before")
        lane.forget(A)
        if enqueued:
            lane.add(A, 0.0, "after", Priority.RESYNC)
        assert queue.get(0.0) is None
        getattr(lane, ending)(job, 0.0)
        if enqueued:
            job = take(queue)
            assert (job.causes, job.failures) == (("after",), 0)
            lane.done(job, 0.0)
        assert len(lane) == 0


def test_a_delayed_enqueue_of_a_run_that_was_forgotten_or_interrupted(
    queue: WorkQueue, lane: Lane
) -> None:
    """It is dropped with its key, or goes into the next run: it is due at most once."""
    for ending in (lane.forget, None):
        lane.add(A, 0.0, "changed")
        job = take(queue)
        lane.add_at(A, 10.0, 0.0, "later")
        if ending is not None:
            ending(A)
            lane.done(job, 0.0, backoff=5.0)
            assert len(lane) == 0
        else:
            lane.interrupted(job, 0.0)
            assert take(queue).causes == ("changed", "later")
        assert queue.next_due() is None


def test_a_gate_does_not_advance_a_delayed_enqueue(queue: WorkQueue, lane: Lane) -> None:
    """A delayed enqueue of a key with only a gate is due at its own time."""
    lane.add(A, 0.0, "changed")
    lane.done(take(queue), 0.0, backoff=5.0)
    lane.add_at(A, 60.0, 0.0, "later")
    assert queue.get(59.0) is None
    assert take(queue, 60.0).causes == ("later",)


def test_a_job_is_given_back_once(queue: WorkQueue, lane: Lane) -> None:
    """Giving back a job that is not handed out is an error that changes nothing."""
    lane.add(A, 0.0, "x")
    job = take(queue)
    lane.done(job, 0.0)
    with pytest.raises(ValueError, match="site/a was not handed out"):
        lane.done(job, 0.0)
    lane.add(A, 0.0, "x")
    with pytest.raises(ValueError, match="site/a was not handed out"):
        lane.failed(job, 0.0)
    assert queue.running == 0
    assert take(queue).key == A


@pytest.mark.parametrize("seed", range(500))
def test_c05_nothing_is_handed_out_after_the_close(seed: int) -> None:
    """C05: 1,000 adds and a close at a random instant: no key after it, and all are counted."""
    print("seed", seed)
    rng = Random(seed)
    queue = WorkQueue(16, Random(seed))
    lanes = [queue.lane(f"c{number}", 4, Backoff(0.01, 1.0)) for number in range(3)]
    instant, jobs, closed = rng.randrange(1000), list[Job](), False
    for number in range(1000):
        now = number * 0.001
        if number == instant:
            queue.close()
            closed = True
        lane = rng.choice(lanes)
        lane.add(key_of(lane.name, f"k{rng.randrange(50)}"), now, "x", rng.choice(list(Priority)))
        if rng.random() < 0.7 and (job := queue.get(now)) is not None:
            assert not closed
            jobs.append(job)
        if jobs and rng.random() < 0.6:
            job = jobs.pop(rng.randrange(len(jobs)))
            ending = rng.choice(["done", "failed", "interrupted", "terminal"])
            getattr(job.lane, ending)(job, now)
    for job in jobs:
        job.lane.interrupted(job, 1.0)
    assert queue.get(1e6) is None
    assert queue.unserved().refused == 1000 - instant
    assert queue.unserved().waiting == sum(lane.waiting for lane in lanes)


def test_close_counts_what_it_holds_back(queue: WorkQueue, lane: Lane) -> None:
    """After a close every key that is not run is counted; a second close is harmless."""
    lane.add(A, 0.0, "x", Priority.ASKED)
    job = take(queue)
    lane.add(A, 0.0, "meanwhile")
    lane.add(B, 0.0, "x")
    lane.add_at(C, 10.0, 0.0, "x")
    unserved = Unserved(waiting=1, delayed=1, retrying=0, dirty=1, refused=0)
    assert queue.close() == unserved
    assert queue.close() == unserved
    lane.add(key_of("site", "new"), 7.0, "x")
    lane.add_at(B, 9.0, 7.0, "x")
    lane.interrupted(job, 8.0)
    assert queue.get(1e6) is None
    assert queue.next_due() is None
    assert queue.unserved() == Unserved(waiting=2, delayed=1, retrying=0, dirty=0, refused=2)


def test_a_dropped_lane_forgets_and_refuses(queue: WorkQueue, lane: Lane) -> None:
    """A dropped lane forgets its keys and refuses others; its runs count until they end."""
    lane.add(A, 0.0, "x", Priority.ASKED)
    lane.add(B, 0.0, "x")
    job = take(queue)
    queue.drop_lane("site")
    queue.drop_lane("site")
    lane.add(C, 0.0, "x")
    assert queue.get(0.0) is None
    assert (queue.running, lane.counters.refused, list(queue)) == (1, 1, [])
    lane.failed(job, 0.0)
    assert (queue.running, len(lane)) == (0, 0)
    assert queue.lane("site", 1, BACKOFF) is not lane


def test_a_lane_that_is_added_again_keeps_its_runs(queue: WorkQueue, lane: Lane) -> None:
    """Invariant 1 holds across reloads that drop a controller and add it again."""
    lane.add(A, 0.0, "x")
    job = take(queue)
    queue.drop_lane("site")
    again = queue.lane("site", 5, BACKOFF)
    again.add(A, 0.0, "new")
    assert queue.get(0.0) is None
    job.lane.done(job, 0.0)
    assert take(queue).causes == ("new",)


def test_wake_is_called_once_and_only_when_needed(queue: WorkQueue, lane: Lane) -> None:
    """The hook wakes an idle dispatcher for keys, free slots and earlier due times."""
    calls: list[str] = []
    queue.wake = lambda: calls.append("wake")
    lane.limit = 1
    lane.add(A, 0.0, "x")
    assert not calls
    job = take(queue)
    lane.add(B, 0.0, "x")
    assert queue.get(0.0) is None
    assert not calls
    lane.done(job, 0.0)
    assert len(calls) == 1
    lane.done(take(queue), 0.0)
    assert queue.get(0.0) is None
    lane.add_at(C, 10.0, 0.0, "x")
    lane.add(A, 0.0, "x")
    assert len(calls) == 2
    lane.done(take(queue), 0.0)
    assert queue.get(0.0) is None
    lane.add_at(B, 20.0, 0.0, "later than what it sleeps for")
    assert len(calls) == 2
    lane.add_at(B, 5.0, 0.0, "earlier")
    assert len(calls) == 3


def test_wake_respects_the_global_limit(queue: WorkQueue, lane: Lane) -> None:
    """At the global limit a waiting key does not wake the dispatcher until a run ends."""
    calls: list[str] = []
    queue.wake = lambda: calls.append("wake")
    queue.limit = 1
    lane.add(A, 0.0, "x")
    job = take(queue)
    assert queue.get(0.0) is None
    lane.add(B, 0.0, "x")
    assert not calls
    lane.done(job, 0.0)
    assert len(calls) == 1


def test_waits_are_counted_in_buckets(queue: WorkQueue, lane: Lane) -> None:
    """Each hand-out counts in the bucket of its priority and wait; sums add up."""
    waits = [0.0, 0.001, 0.002, 1.0, 1e6]
    for wait in waits:
        lane.add(A, 0.0, "x", Priority.RETRY)
        lane.done(take(queue, wait), wait)
    counts = lane.counters.waits[Priority.RETRY]
    assert sum(counts) == 5
    assert (counts[0], counts[1], counts[WAIT_BOUNDS.index(1.0)], counts[-1]) == (2, 1, 1, 1)
    assert math.isclose(lane.counters.wait_sums[Priority.RETRY], sum(waits))
    assert sum(map(sum, lane.counters.waits)) == 5


def test_statistics_count_every_state(queue: WorkQueue, lane: Lane) -> None:
    """Each key is counted by its state, with the two ages that reveal a stuck queue."""
    for number in range(5):
        lane.add(key_of("site", f"k{number}"), float(number), "x")
    jobs = [take(queue, 10.0) for _ in range(5)]
    lane.failed(jobs[0], 11.0)
    lane.terminal(jobs[1], 11.0)
    lane.done(jobs[2], 11.0, backoff=9.0)
    lane.add(jobs[3].key, 12.0, "dirty")
    lane.add_at(A, 99.0, 12.0, "x")
    lane.add(B, 13.0, "x")
    seen = lane_statistics(lane, 20.0)
    assert (seen.waiting, seen.running, seen.dirty, seen.delayed) == (1, 2, 1, 1)
    assert (seen.retrying, seen.terminal, seen.throttled) == (1, 1, 1)
    assert (seen.oldest_wait, seen.longest_run) == (7.0, 10.0)


def test_memory_of_known_keys(queue: WorkQueue, lane: Lane) -> None:
    """A delayed key costs less than 1 KiB; one that is done, at most its slot in a table."""
    keys = [key_of("site", f"k{number}") for number in range(10_000)]
    tracemalloc.start()
    try:
        for key in keys:
            lane.add(key, 0.0, "changed")
        while (job := queue.get(0.0)) is not None:
            lane.done_after(job, 0.0, 600.0, "after 10m")
        delayed = tracemalloc.get_traced_memory()[0]
        assert delayed < 1024 * len(keys)
        while (job := queue.get(600.0)) is not None:
            lane.done(job, 600.0)
        del job
        assert len(lane) == 0
        assert tracemalloc.get_traced_memory()[0] < 100 * len(keys)
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_moved_entries_cost_no_memory(lane: Lane) -> None:
    """Moving, raising and forgetting 100,000 times leaves no stale slots or heap items behind."""
    tracemalloc.start()
    try:
        for number in range(100_000):
            lane.add(A, 0.0, "x", Priority.RESYNC)
            lane.add(A, 0.0, "x", Priority.ASKED)
            lane.forget(A)
            lane.add_at(B, 1e6 - number, 0.0, "x")
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
