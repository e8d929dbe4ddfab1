"""Speed of the work queue: add, get and done of one key is a cycle.

Run: ``python bench/workqueue.py``. The queue has deduplication, priorities with ageing,
round-robin between controllers, limits, causes and counters; the floor is the same three methods
over a deque and two sets. Rounds of both alternate, and count processor time. (Not named
queue.py: a script's directory precedes the standard library, and trio imports ``queue``.)
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from random import Random

from table import heading, row

from reconciled.core.queue.backoff import Backoff
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.queue.states import Priority
from reconciled.core.resources import Key, key_of

ROUNDS = 9
CYCLES = 100_000
KEYS = 1000
TARGET = ">= 500 k/s and >= 0.1 of the floor"


class Floor:
    """The minimum that has the three methods and never runs a key twice at once."""

    def __init__(self) -> None:
        self.fifo: deque[Key] = deque()
        self.waiting: set[Key] = set()
        self.running: set[Key] = set()

    def add(self, key: Key) -> None:
        """Enqueue *key*, once."""
        if key not in self.waiting:
            self.waiting.add(key)
            if key not in self.running:
                self.fifo.append(key)

    def get(self) -> Key:
        """Take the first key."""
        key = self.fifo.popleft()
        self.waiting.discard(key)
        self.running.add(key)
        return key

    def done(self, key: Key) -> None:
        """Give *key* back."""
        self.running.discard(key)
        if key in self.waiting:
            self.fifo.append(key)


def keys_of(controller: str) -> list[Key]:
    """The keys of one controller."""
    return [key_of(controller, f"resource-{number}") for number in range(KEYS)]


def floor_one_by_one() -> float:
    """The floor, one key in the queue at a time."""
    queue, keys = Floor(), keys_of("site")
    began = time.process_time()
    for _ in range(CYCLES // KEYS):
        for key in keys:
            queue.add(key)
            queue.done(queue.get())
    return CYCLES / (time.process_time() - began)


def floor_in_bursts() -> float:
    """The floor, all keys in the queue at a time."""
    queue, keys = Floor(), keys_of("site")
    began = time.process_time()
    for _ in range(CYCLES // KEYS):
        for key in keys:
            queue.add(key)
        for _ in keys:
            queue.done(queue.get())
    return CYCLES / (time.process_time() - began)


def one_by_one() -> float:
    """One key in the queue at a time."""
    queue = WorkQueue(16, Random(1))
    lane, keys = queue.lane("site", 4, Backoff()), keys_of("site")
    now = 0.0
    began = time.process_time()
    for _ in range(CYCLES // KEYS):
        for key in keys:
            lane.add(key, now, "changed")
            job = queue.get(now)
            assert job is not None
            job.lane.done(job, now)
        now += 0.01
    return CYCLES / (time.process_time() - began)


def in_bursts(controllers: int, priorities: tuple[Priority, ...]) -> float:
    """All keys of *controllers* in the queue at a time, their priorities mixed."""
    queue = WorkQueue(16, Random(1))
    names = [f"controller-{number}" for number in range(controllers)]
    lanes = [queue.lane(name, 4, Backoff()) for name in names]
    keys = [keys_of(name) for name in names]
    mixed = [
        (
            lanes[number % controllers],
            keys[number % controllers][number],
            priorities[number // controllers % len(priorities)],
        )
        for number in range(KEYS)
    ]
    now = 0.0
    began = time.process_time()
    for _ in range(CYCLES // KEYS):
        for lane, key, priority in mixed:
            lane.add(key, now, "changed", priority)
        now += 0.01
        while (job := queue.get(now)) is not None:
            job.lane.done(job, now)
    return CYCLES / (time.process_time() - began)


def compare(name: str, ours: Callable[[], float], floor: Callable[[], float]) -> None:
    """Alternate rounds of both, and print the medians."""
    rounds = [(ours(), floor()) for _ in range(ROUNDS)]
    row(
        name,
        statistics.median(speed for speed, _ in rounds) / 1000,
        statistics.median(speed for _, speed in rounds) / 1000,
        "k/s",
        TARGET,
    )


def main() -> None:
    """Print every row."""
    heading()
    compare("queue: one by one", one_by_one, floor_one_by_one)
    every, changed = tuple(Priority), (Priority.CHANGED,)
    compare("queue: bursts", lambda: in_bursts(1, changed), floor_in_bursts)
    compare("queue: bursts, 4 controllers", lambda: in_bursts(4, changed), floor_in_bursts)
    compare("queue: bursts, 5 priorities", lambda: in_bursts(1, every), floor_in_bursts)
    compare("queue: bursts, both", lambda: in_bursts(4, every), floor_in_bursts)


if __name__ == "__main__":
    main()
