"""SIGKILL of the daemon at every system call that makes something durable, and at any instant.

After the last start everything is as desired, and the rules of world.py hold. One chain is one
world: each life is killed at a later call than the one before it, in recovery as well.

    make kills KILL=37         one life, killed at its call number 37, and one start after it
    make kills KILL=37,5,12    the same, and in between recovery killed at its call 5, and so on
    make kills KILL_SEED=123   one chain of kills at random instants
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from world import World

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

CHAINS = 12
CALLS = 144  # about as many as a first life with this world makes
ROUNDS = 6
KILLS = 10  # a round
LONGEST = 0.9  # seconds from the start of a life to its end, at most


def chains() -> list[list[int]]:
    """The numbers of the calls, a list for each world."""
    if "KILL" in os.environ:
        return [[int(number) for number in os.environ["KILL"].split(",")]]
    if "KILL_SEED" in os.environ:
        return []
    return [list(range(1 + first, CALLS + 1, CHAINS)) for first in range(CHAINS)]


def seed_of(turn: int) -> int:
    """Drawn in the test: two workers have to collect the same tests."""
    if "KILL_SEED" in os.environ:
        return int(os.environ["KILL_SEED"]) + turn
    return random.randrange(1 << 32)


@pytest.mark.parametrize("chain", chains(), ids=lambda chain: f"chain-{chain[0]}")
def test_c04_killed_at_any_call(world: World, chain: list[int]) -> None:
    """A SIGKILL just before any call that makes something durable leaves nothing half-done."""
    print("replay: KILL=" + ",".join(map(str, chain)))
    for count in chain:
        _, call = world.live_until(count)
        print(f"killed at {call}")
        world.check_effects()
    world.settle()


@pytest.mark.parametrize(
    "turn", range(0 if "KILL" in os.environ else 1 if "KILL_SEED" in os.environ else ROUNDS)
)
def test_killed_at_any_instant(world: World, turn: int) -> None:
    """A SIGKILL at any instant, again and again, leaves nothing half-done."""
    seed = seed_of(turn)
    print(f"replay: KILL_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(KILLS):
        daemon = world.live()
        daemon.wait_for("daemon.starting")
        instant = draw.uniform(0, LONGEST)
        time.sleep(instant)  # the instant itself is what is random
        daemon.send(signal.SIGKILL)
        daemon.ended()
        print(f"killed {instant:.3f} s after the start, generation {world.generation}")
        world.check_effects()
    world.settle()
