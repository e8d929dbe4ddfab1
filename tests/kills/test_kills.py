"""SIGKILL of the daemon at every system call that makes something durable, and at any instant.

After the last start everything is as desired, and the rules of scenario.py hold. One chain uses one
state: each daemon is killed at a later call than the one before it, in recovery as well.

`make test` draws the calls of one chain and one round of instants; `make kills` runs all of them.

    make kills KILL=37         a daemon killed at its call number 37, and one start after it
    make kills KILL=37,5,12    the same, with recovery killed at its call 5, and so on
    make kills KILL_SEED=123   one round of kills at random instants
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from scenario import Scenario

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

CHAINS = 12
CALLS = 144  # about as many as a first life with this scenario makes
ROUNDS = 6
KILLS = 10  # a round
LONGEST = 0.9  # seconds from the start of a daemon to its kill, at most

SAMPLE = "sample"  # in place of a chain: its calls are drawn
REPLAYED = [int(number) for number in os.environ.get("KILL", "").split(",") if number]


def chains() -> list[object]:
    """The numbers of the calls, a list for each state; the sample comes first."""
    if REPLAYED:
        return [REPLAYED]
    if "KILL_SEED" in os.environ:
        return []
    every = [list(range(1 + first, CALLS + 1, CHAINS)) for first in range(CHAINS)]
    return [SAMPLE, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in every)]


def rounds() -> list[object]:
    """The numbers of the rounds; the first one is the sample."""
    if REPLAYED:
        return []
    if "KILL_SEED" in os.environ:
        return [0]
    return [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(1, ROUNDS))]


def name_of(chain: object) -> str:
    """The name of a chain among the tests."""
    return f"chain-{chain[0]}" if isinstance(chain, list) else str(chain)


@pytest.mark.parametrize("chain", chains(), ids=name_of)
def test_c04_killed_at_any_call(scenario: Scenario, chain: str | list[int]) -> None:
    """A SIGKILL just before any call that makes something durable leaves nothing half-done."""
    # Drawn in the test, since both workers have to collect the same tests.
    calls = sorted(random.sample(range(1, CALLS + 1), 12)) if isinstance(chain, str) else chain
    print("replay: make kills KILL=" + ",".join(map(str, calls)))
    for count in calls:
        _, call = scenario.run_until_call(count)
        print(f"killed at {call}")
        scenario.check_effects()
    scenario.converge()


@pytest.mark.parametrize("turn", rounds())
def test_killed_at_any_instant(scenario: Scenario, turn: int) -> None:
    """A SIGKILL at any instant, again and again, leaves nothing half-done."""
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 32)))
    print(f"round {turn}, replay: make kills KILL_SEED={seed}")
    draw = random.Random(seed)
    for _ in range(KILLS):
        daemon = scenario.start_next_generation()
        daemon.wait_for("daemon.starting")
        instant = draw.uniform(0, LONGEST)
        time.sleep(instant)  # the instant itself is what is random
        daemon.send(signal.SIGKILL)
        daemon.ended()
        print(f"killed {instant:.3f} s after the start, generation {scenario.generation}")
        scenario.check_effects()
    scenario.converge()
