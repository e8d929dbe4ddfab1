"""Power cuts: the daemon starts on what a cut may have left, and everything becomes as desired.

make kills CUT_SEED=123    the cuts of one test again
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from harness import children_of
from powercut import Disk, may_trace, read_record, wrapper
from world import MAY_BE_HELD, PATIENCE, World

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

ROUNDS = 4
CUTS = 8  # a round


def need_strace() -> None:
    """Skip where it is missing, but never under CI."""
    if may_trace():
        return
    if os.environ.get("CI"):
        pytest.fail("strace is missing or may not trace: it is needed under CI")
    pytest.skip("strace is missing or may not trace")


def empty(directory: Path) -> None:
    """Remove what is in it."""
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@pytest.mark.parametrize("turn", range(1 if "CUT_SEED" in os.environ else ROUNDS))
def test_c04_a_power_cut_loses_nothing(
    world: World, tmp_path_factory: pytest.TempPathFactory, turn: int
) -> None:
    """After a power cut at any instant everything becomes as desired, and every rule holds."""
    need_strace()
    seed = int(os.environ.get("CUT_SEED", random.randrange(1 << 32)))
    print(f"replay: CUT_SEED={seed}, turn {turn}")
    draw = random.Random(seed)
    # A cut ends its program too, half-way: then its recover says that nobody knows.
    world.may_be_held = MAY_BE_HELD | {"x/sure"}
    aside = tmp_path_factory.mktemp("record")
    record = aside / "calls"
    world.declare()
    before = Disk(world.root)
    daemon = world.site.start(wrapper=wrapper(record))
    world.wait_for(daemon)
    # Not of the wrapper: it ends by itself when all have ended.
    (inner,) = children_of(daemon.pid)
    os.kill(inner, signal.SIGTERM)
    daemon.ended(within=PATIENCE)
    changes = read_record(record, world.root)
    assert sum(change.kind == "sync" for change in changes) > 50, changes[:20]
    points = sorted(draw.sample(range(len(changes)), CUTS))
    built = []
    for number, change in enumerate(changes):
        before.take(change)
        if number in points:
            target = aside / str(number)
            before.cut(draw, draw.choice([0.0, 0.0, 1.0, 0.5, 0.8]), target)
            built.append((target, change))
    for target, change in built:
        print(f"cut after {change.kind} {change.path} {change.other}: {target}")
        empty(world.root)
        shutil.copytree(target, world.root, dirs_exist_ok=True)
        world.settle()
        shutil.rmtree(target)
