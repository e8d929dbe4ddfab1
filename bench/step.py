"""Programs of operations: ``reconciled step``, and what a small parent costs over a bare start."""

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

from reconciled.programs import attempts, run_program
from reconciled.programs.steps import format_handle

STEPS = 40
PROGRAMS = 200
AT_ONCE = 16


@attrs.frozen
class Operation:
    """What run_program() needs of one."""

    directory: Path
    attempt: int = 1
    epoch: int = 1
    last_step: str = ""

    @property
    def id(self) -> str:
        """Its name."""
        return self.directory.name


def median(command: list[str], environment: dict[str, str]) -> float:
    """Milliseconds of wall time that one call of *command* takes."""
    taken = []
    for turn in range(STEPS):
        began = time.perf_counter()
        subprocess.run([*command, f"step {turn}"], env=environment, check=True)
        taken.append((time.perf_counter() - began) * 1000)
    return statistics.median(taken)


def made(root: Path, name: str) -> Operation:
    """A new operation below *root*."""
    directory = root / name
    directory.mkdir()
    return Operation(directory)


def steps(root: Path) -> None:
    """A call of the command, beside an interpreter that does nothing."""
    operation = made(root, "steps")
    attempts.fence(operation.directory, 1)
    handle = format_handle(operation.directory, 1)
    environment = {**os.environ, "RECONCILED_HANDLE": handle}
    script = str(Path(sys.executable).with_name("reconciled"))
    ours = median([script, "step"], environment)
    floor = median([sys.executable, "-c", ""], environment)
    row("reconciled step, median", ours, floor, "ms", "<= 50")


async def programs(root: Path, *, of_operations: bool, at_once: int) -> float:
    """Programs a second, *at_once* at a time."""
    names = iter(range(PROGRAMS))
    kind = f"{of_operations}-{at_once}"

    async def work() -> None:
        for number in names:
            if of_operations:
                await run_program(["true"], operation=made(root, f"{kind}-{number}"))
            else:
                await run_program(["true"], output=root / kind / str(number))

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for number in range(at_once):
            nursery.start_soon(work, name=f"worker {number}")
    return PROGRAMS / (time.perf_counter() - began)


def sync(root: Path) -> float:
    """Milliseconds of one durable replacement: what bounds a program under a small parent."""
    taken = []
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(STEPS):
        began = time.perf_counter()
        attempts.replace_at(handle, "file", b"x" * 200)
        os.fsync(handle)
        taken.append((time.perf_counter() - began) * 1000)
    os.close(handle)
    return statistics.median(taken)


def main() -> None:
    """Print the table."""
    heading()
    # Not the default: in memory a sync costs nothing.
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as name:
        root = Path(name)
        steps(root)
        for at_once in (1, AT_ONCE):
            ours = trio.run(lambda n=at_once: programs(root, of_operations=True, at_once=n))
            floor = trio.run(lambda n=at_once: programs(root, of_operations=False, at_once=n))
            row(f"programs of operations, {at_once} at once", ours, floor, "/s", "-")
        row("one durable replacement (three of them a program)", sync(root), None, "ms", "-")


if __name__ == "__main__":
    main()
