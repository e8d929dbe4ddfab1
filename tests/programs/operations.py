"""Operations without a journal, and a minimal daemon that runs one program of an operation."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from reconciled.programs.processes import all_processes

# Unique: end_all_of() finds programs by it, and another test run may be active at the same time.
ID = f"01{secrets.token_hex(12).upper()}"
HERE = Path(__file__).resolve().parent
DAEMON = """
import sys, trio
from pathlib import Path
from operations import FakeOperation
from reconciled.core.stages import StopLimits
from reconciled.programs import run_program
from reconciled.stop import Stop, Work

async def main(directory, budget, argv):
    operation = FakeOperation(Path(directory))
    stop = Stop("test", StopLimits())
    stop.install()
    with Work("k", stop, key="k") as work:
        if budget:
            async with work.critical("apply", budget=budget):
                await run_program(argv, operation=operation, name="apply", directory=Path.cwd())
        else:
            await run_program(argv, operation=operation, name="apply", directory=Path.cwd())

trio.run(main, sys.argv[1], float(sys.argv[2]), sys.argv[3:])
"""


@attrs.define(eq=False)
class FakeOperation:
    """The part of an operation that run_program() uses."""

    directory: Path
    attempt: int = 1
    epoch: int = 7
    last_step: str = ""

    @property
    def id(self) -> str:
        return self.directory.name


def make_operation(directory: Path, attempt: int = 1) -> FakeOperation:
    directory.mkdir(parents=True, exist_ok=True)
    return FakeOperation(directory, attempt)


def start_daemon(
    directory: Path, script: str, *, where: Path, budget: float = 0
) -> subprocess.Popen[bytes]:
    """Start a daemon that runs the shell *script* as a program of the operation in *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(directory), str(budget), "sh", "-c", script],
        cwd=where,
        env={"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
    )


def end_all_of(directory: Path) -> None:
    """Kill each process whose environment names the operation of *directory*."""
    variable = f"RECONCILED_OPERATION={directory.name}".encode()
    for process in all_processes():
        try:
            if variable in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                os.kill(process.pid, signal.SIGKILL)
        except OSError:
            continue


@contextlib.contextmanager
def low_score(score: int = -250) -> Iterator[None]:
    """Give this process a negative out-of-memory score, as a unit gives its daemon."""
    file = Path("/proc/self/oom_score_adj")
    before = file.read_text()
    try:
        file.write_text(str(score))
    except PermissionError:
        pytest.skip("lowering the score needs CAP_SYS_RESOURCE, which many containers lack")
    try:
        yield
    finally:
        file.write_text(before)


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Poll until another process has made *condition* true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
