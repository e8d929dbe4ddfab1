"""Operations without a journal, and a daemon that is nothing but one program of an operation."""

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

# Unique: end_all_of() finds programs by it, and another test run may be at work beside this one.
ID = f"01{secrets.token_hex(12).upper()}"
HERE = Path(__file__).resolve().parent
HOST = """
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
    """What run_program() needs of one."""

    directory: Path
    attempt: int = 1
    epoch: int = 7
    last_step: str = ""

    @property
    def id(self) -> str:
        return self.directory.name


def made(directory: Path, attempt: int = 1) -> FakeOperation:
    directory.mkdir(parents=True, exist_ok=True)
    return FakeOperation(directory, attempt)


def start_host(
    directory: Path, script: str, *, where: Path, budget: float = 0
) -> subprocess.Popen[bytes]:
    """A process that runs the shell *script* as a program of the operation in *directory*."""
    directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", HOST, str(directory), str(budget), "sh", "-c", script],
        cwd=where,
        env={"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
    )


def end_all_of(directory: Path) -> None:
    """Kill whatever names the operation of *directory* in its environment."""
    mark = f"RECONCILED_OPERATION={directory.name}".encode()
    for process in all_processes():
        try:
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                os.kill(process.pid, signal.SIGKILL)
        except OSError:
            continue


@contextlib.contextmanager
def low_score(score: int = -250) -> Iterator[None]:
    """This process as a unit makes its daemon for the kernel's out-of-memory killer."""
    file = Path("/proc/self/oom_score_adj")
    before = file.read_text()
    try:
        file.write_text(str(score))
    except PermissionError:
        pytest.skip("to lower one's own score needs CAP_SYS_RESOURCE, which many containers lack")
    try:
        yield
    finally:
        file.write_text(before)


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Other processes make it true, and tell nobody."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
