"""Power cuts: the daemon starts on what a cut may have left, and everything becomes as desired.

`make test` runs one round of random cuts, `make kills` all rounds.

    make kills CUT_SEED=123    the cuts of one round again
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from harness import children_of
from powercut import Change, Disk, may_trace, read_record, wrapper
from scenario import MAY_BE_HELD, PATIENCE, Scenario, scenario_in

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


@attrs.define(eq=False)
class Recorded:
    """The writes and syncs of one daemon and its programs, up to a clean stop.

    scenario is a scratch copy: each cut replaces its files. before is a copy of them as they were
    when the record began; changes are those of the record.
    """

    scenario: Scenario
    before: Path
    changes: list[Change]

    def cuts(self, draw: random.Random, count: int, target: Path) -> list[tuple[Path, Change]]:
        """What a power cut after *count* random changes may leave, each in its directory."""
        disk = Disk(self.scenario.root, self.before)
        points = set(draw.sample(range(len(self.changes)), count))
        built = []
        for number, change in enumerate(self.changes):
            disk.take(change)
            if number in points:
                disk.cut(draw, draw.choice([0.0, 0.0, 1.0, 0.5, 0.8]), target / str(number))
                built.append((target / str(number), change))
        return built


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """One record for all rounds: a round draws where the cuts are."""
    need_strace()
    aside = tmp_path_factory.mktemp("record")
    for scenario in scenario_in(tmp_path_factory.mktemp("scenario")):
        # A cut ends the programs too, half-way: then recover() answers that it cannot know.
        scenario.may_be_held = MAY_BE_HELD | {"x/sure"}
        scenario.declare()
        shutil.copytree(scenario.root, aside / "before")
        daemon = scenario.workspace.start(wrapper=wrapper(aside / "calls"))
        scenario.wait_for(daemon)
        # The signal goes to the daemon, not to the wrapper, which ends when all have ended.
        (inner,) = children_of(daemon.pid)
        os.kill(inner, signal.SIGTERM)
        daemon.ended(within=PATIENCE)
        changes = read_record(aside / "calls", scenario.root)
        assert sum(change.kind == "sync" for change in changes) > 50, changes[:20]
        yield Recorded(scenario, aside / "before", changes)


def keep_identity(state: Path) -> None:
    """Let *state*, which was built anew, pass for the directory that it is an image of.

    A power cut keeps the directory's inode; with another one it would be taken for a copy.
    """
    with contextlib.suppress(FileNotFoundError):
        identity = json.loads((state / "identity").read_text())
        identity["inode"] = state.stat().st_ino
        (state / "identity").write_text(json.dumps(identity))


def rounds() -> list[object]:
    """The numbers of the rounds; the first one is the sample."""
    if "CUT_SEED" in os.environ:
        return [0]
    return [0, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(1, ROUNDS))]


@pytest.mark.parametrize("turn", rounds())
def test_c04_a_power_cut_loses_nothing(recorded: Recorded, tmp_path: Path, turn: int) -> None:
    """After a power cut at any instant everything becomes as desired, and every rule holds."""
    seed = int(os.environ.get("CUT_SEED", random.randrange(1 << 32)))
    print(f"round {turn}, replay: make kills CUT_SEED={seed}")
    scenario = recorded.scenario
    for left, change in recorded.cuts(random.Random(seed), CUTS, tmp_path):
        print(f"cut after {change.kind} {change.path} {change.other}: {left}")
        empty(scenario.root)
        shutil.copytree(left, scenario.root, dirs_exist_ok=True)
        keep_identity(scenario.root / "state")
        scenario.converge()
        shutil.rmtree(left)
