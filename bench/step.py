"""Duration of ``reconciled step``, and rate of programs with and without a small parent."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import attrs
import trio
from table import heading, row

from reconciled.durability import replace_at
from reconciled.programs import attempt_fence, run_program
from reconciled.programs.steps import format_handle

STEPS = 40
PROGRAMS = 200
AT_ONCE = 16


@attrs.frozen
class Operation:
    """The part of an operation that run_program() uses."""

    directory: Path
    attempt: int = 1
    epoch: int = 1
    last_step: str = ""

    @property
    def id(self) -> str:
        """The id of the operation, which names its directory."""
        return self.directory.name


def median(command: list[str], environment: dict[str, str]) -> float:
    """Milliseconds of wall time that one call of *command* takes."""
    durations = []
    for turn in range(STEPS):
        began = time.perf_counter()
        subprocess.run([*command, f"step {turn}"], env=environment, check=True)
        durations.append((time.perf_counter() - began) * 1000)
    return statistics.median(durations)


def make_operation(root: Path, name: str) -> Operation:
    """Make an operation with a directory below *root*."""
    directory = root / name
    directory.mkdir()
    return Operation(directory)


def steps(root: Path) -> None:
    """Measure calls of the command, compared with an interpreter that does nothing."""
    operation = make_operation(root, "steps")
    attempt_fence.fence(operation.directory, 1)
    handle = format_handle(operation.directory, 1)
    environment = {**os.environ, "RECONCILED_HANDLE": handle}
    script = str(Path(sys.executable).with_name("reconciled"))
    measured = median([script, "step"], environment)
    floor = median([sys.executable, "-c", ""], environment)
    row("reconciled step, median", measured, floor, "ms", "<= 50")


async def programs(root: Path, *, of_operations: bool, at_once: int) -> float:
    """Programs per second, *at_once* at a time."""
    names = iter(range(PROGRAMS))
    kind = f"{of_operations}-{at_once}"

    async def work() -> None:
        for number in names:
            if of_operations:
                await run_program(["true"], operation=make_operation(root, f"{kind}-{number}"))
            else:
                await run_program(["true"], output=root / kind / str(number))

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(at_once):
            nursery.start_soon(work, name=f"worker {number}")
    return PROGRAMS / (time.perf_counter() - began)


def sync(root: Path) -> float:
    """Milliseconds of one durable replacement, which bounds a program under a small parent."""
    durations = []
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(STEPS):
        began = time.perf_counter()
        replace_at(handle, "file", b"x" * 200)
        os.fsync(handle)
        durations.append((time.perf_counter() - began) * 1000)
    os.close(handle)
    return statistics.median(durations)


def main() -> None:
    """Print the table."""
    heading()
    # $BENCH_DIR should be on a disk: in a tmpfs a sync costs nothing.
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        root = Path(name)
        steps(root)
        for at_once in (1, AT_ONCE):
            measured = trio.run(lambda n=at_once: programs(root, of_operations=True, at_once=n))
            floor = trio.run(lambda n=at_once: programs(root, of_operations=False, at_once=n))
            row(f"programs of operations, {at_once} at once", measured, floor, "/s", "-")
        row("one durable replacement (three per program)", sync(root), None, "ms", "-")


if __name__ == "__main__":
    main()
