"""Running programs: in a group of their own, bounded in time and output, never half-owned.

1. Argument lists only, no shell. Standard input is a file in memory, output goes to a file:
   no pipe that blocks a program, or breaks when this process dies.
2. Ordinary programs get SIGTERM when their caller is cancelled, and SIGKILL at the end of its
   cleanup allowance. Inside a critical section nothing comes before ``min(5 s, budget / 4)``
   ahead of its deadline: then SIGTERM, and SIGKILL at the deadline.
3. The whole group gets both, and members that outlive their leader get the same.
4. The call is over when the program has ended, whoever still holds its output open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import attrs
import trio

from reconciled.programs.children import Child, Owner, clean_signals, current_children
from reconciled.programs.output import Output
from reconciled.stop import Section, cleanup_scope, covering_section

OUTPUT_LIMIT = 1024 * 1024
# A program can write 1 GB a second straight to its file, whatever we do: looking more often
# costs more than it saves.
LOOK_EVERY = 0.25
LEAD = 5.0  # seconds between SIGTERM and the deadline of a critical section, at most
# What the kernel may take to end a killed group. Beyond it sits in a system call that
# nothing ends; to wait on would only take the rest of the stop down with it.
KILL_TAKES = 1.0

_NOT_INHERITED = ("NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY")
_NOT_INHERITED_PREFIXES = ("WATCHDOG_", "LISTEN_")

_QUOTED_LINES = 3
_QUOTED_LENGTH = 400


class ProgramFailed(Exception):
    """A program could not be started, or did not end with exit code 0.

    Its text is one line, fit for a log, and quotes the program's last lines.
    """

    def __init__(self, message: str, ended: Ended | None = None) -> None:
        super().__init__(message)
        self.ended = ended  # None: it was never started


@attrs.frozen
class Ended:
    """How a program ended."""

    program: str  # argument 0
    code: int | None  # None: ended by a signal, or its status was lost
    signal: int | None
    duration: float  # seconds
    tail: tuple[str, ...]  # the last lines of its output, printable and bounded

    def check(self) -> Self:
        """Itself, if the exit code is 0; raises ProgramFailed otherwise."""
        if self.code != 0:
            raise ProgramFailed(str(self), self)
        return self

    def __str__(self) -> str:
        if self.code is not None:
            how = f"ended with exit code {self.code}"
        elif self.signal is not None:
            how = f"was ended by {_signal_name(self.signal)}"
        else:
            how = "ended, but its exit status was lost"
        quoted = " | ".join(self.tail[-_QUOTED_LINES:])
        if len(quoted) > _QUOTED_LENGTH:
            quoted = "…" + quoted[-_QUOTED_LENGTH:]
        return f"{self.program} {how}: {quoted}" if quoted else f"{self.program} {how}, silently"


@attrs.frozen
class _Launch:
    """What is to be started."""

    arguments: tuple[str, ...]
    directory: Path | None
    environment: Mapping[str, str]
    stdin: bytes

    def fork(self, log: Output) -> subprocess.Popen[bytes]:
        """Start it, in a thread: this blocks until the program is in place of its fork."""
        with _memory_file(self.stdin) as source, log.writer() as writer, clean_signals():
            return subprocess.Popen(  # noqa: S603 a list, and no shell: what the author wrote
                self.arguments,
                stdin=source,
                stdout=writer,
                stderr=writer,
                cwd=self.directory,
                env=self.environment,
                process_group=0,
            )


async def run_program(  # noqa: PLR0913 one required argument and one required keyword
    argv: Sequence[str],
    *,
    output: Path,
    name: str = "",
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    output_limit: int = OUTPUT_LIMIT,
) -> Ended:
    """Run the program *argv* to its end, and tell how it ended; see Ended.check().

    output        directory for its output, made if it lacks: ``operation.directory`` or
                  ``request.output``; the file in it is NAME.log, and is appended to
    name          by default the program's file name
    environment   on top of the daemon's own, without what is meant for the daemon alone
    directory     where it runs; argument 0 with a slash is relative to it
    output_limit  bytes of output that are kept, the newest

    Raises ProgramFailed if it cannot be started. When cancelled, ends the program and its
    group (SIGTERM, then SIGKILL when the cleanup allowance is over) before trio.Cancelled
    goes on; inside a critical section it runs on until that nears its deadline.
    """
    arguments = _checked(argv)
    launch = _Launch(arguments, directory, program_environment(environment or {}), stdin)
    file = output / f"{name or Path(arguments[0]).name}.log"
    try:
        log = Output.open(file, output_limit)
    except OSError as error:
        message = f"{arguments[0]}: its output cannot go to {file}: {error.strerror}"
        raise ProgramFailed(message) from error
    with contextlib.closing(log):
        return await _run(launch, log)


async def _run(launch: _Launch, log: Output) -> Ended:
    section = covering_section()
    began = trio.current_time()
    child = await _start(launch, log, critical=section is not None)
    warned = False
    try:
        if section is not None:
            with section.warned(min(LEAD, section.budget / 4)):
                await _until_ended(child, log)
            warned = not child.ended
        if warned:
            child.signal_group(signal.SIGTERM)
        await _until_ended(child, log)
    finally:
        kill_at = _kill_at(child, section, warned=warned)
        with trio.CancelScope(deadline=kill_at + KILL_TAKES, shield=True):
            await _end_group(child, log, kill_at)
        code, number = _release(child)
        log.compact()
    ended = Ended(launch.arguments[0], code, number, trio.current_time() - began, log.tail())
    if warned and section is not None and code is None:
        # It ended by our signal, not by a word of its own: that is a cut section, and no
        # failed program. The section says so; it need not wait for its deadline any more.
        section.cut(f"{ended}, sent ahead of the deadline")
        await trio.sleep_forever()
    return ended


async def _start(launch: _Launch, log: Output, *, critical: bool) -> Child:
    """Start it in a thread; a cancellation meanwhile is delivered at the next checkpoint."""
    children = current_children()
    owner = Owner(launch.arguments[0], trio.lowlevel.current_task().name, critical)
    try:
        return await trio.to_thread.run_sync(
            children.start, lambda: launch.fork(log), owner, limiter=children.limiter
        )
    except (OSError, ValueError) as error:
        raise ProgramFailed(_why_not_started(launch, error)) from error


async def _until_ended(child: Child, log: Output) -> None:
    """Wait for the program itself, and keep its output bounded."""
    while not child.ended:
        with trio.move_on_after(LOOK_EVERY):
            await child.wait()
        await _look(log)


async def _look(log: Output) -> None:
    if log.over:
        # To give back 300 MB takes 10-50 ms, too long for the loop.
        await trio.to_thread.run_sync(log.trim, limiter=current_children().limiter)


def _kill_at(child: Child, section: Section | None, *, warned: bool) -> float:
    """When patience ends with what still lives of the group, in trio's time."""
    if warned and not child.ended:
        return trio.current_time()
    allowance = cleanup_scope().deadline
    return allowance if section is None else min(allowance, section.deadline)


async def _end_group(child: Child, log: Output, kill_at: float) -> None:
    """Leave no living member behind: SIGTERM, and SIGKILL at *kill_at*."""
    if child.ended and not child.members():
        return
    if kill_at > trio.current_time():
        child.signal_group(signal.SIGTERM)
        with trio.CancelScope(deadline=kill_at):
            await _until_gone(child, log)
            return
    child.signal_group(signal.SIGKILL)
    await _until_gone(child, log)


async def _until_gone(child: Child, log: Output) -> None:
    await _until_ended(child, log)
    pause = 0.002
    while child.members():
        await trio.sleep(pause)
        pause = min(pause * 2, 0.1)
        await _look(log)


def _release(child: Child) -> tuple[int | None, int | None]:
    """Reap it. One that not even SIGKILL ended is left to the reaper of orphans."""
    try:
        if child.ended:
            return child.reap()
        child.abandon()
        return None, None
    finally:
        current_children().forget(child)


def program_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """What a program finds: ours without what is meant for this process alone, and *additions*.

    PATH ends with the directory of ``reconciled``, so that a program can call it back.
    """
    environment = {name: value for name, value in os.environ.items() if not _ours_alone(name)}
    environment.update(additions)
    path = environment.get("PATH") or os.defpath
    environment["PATH"] = f"{path}{os.pathsep}{_own_directory()}"
    return environment


def _ours_alone(name: str) -> bool:
    return name in _NOT_INHERITED or name.startswith(_NOT_INHERITED_PREFIXES)


def _own_directory() -> str:
    # Run as a module, argument 0 is a source file; the script stands beside the interpreter.
    ours = sys.argv[0] if Path(sys.argv[0]).name == "reconciled" else sys.executable
    return str(Path(ours).absolute().parent)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Iterator[int]:
    file = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def _checked(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str) or not argv or not argv[0]:
        raise ProgramFailed(
            f"{argv!r} is not a program: write a list of its name and arguments, as in [ls, -l]"
        )
    return tuple(argv)


def _why_not_started(launch: _Launch, error: OSError | ValueError) -> str:
    program = launch.arguments[0]
    where = launch.directory or Path.cwd()
    if isinstance(error, ValueError):  # a NUL, a lone surrogate
        why = str(error)
    elif not where.is_dir():
        why = f"its directory {where} does not exist"
    elif error.errno == errno.ENOENT and "/" not in program:
        why = "it is not in PATH"
    elif error.errno == errno.ENOENT and (where / program).exists():
        why = "the interpreter in its first line does not exist"
    elif error.errno == errno.ENOENT:
        why = f"there is no {where / program}"
    elif error.errno == errno.EACCES:
        why = f"it is not executable (see chmod +x), or not for us: {where / program}"
    elif error.errno == errno.ENOEXEC:
        why = "it is no program; a script begins with a line like #!/bin/sh"
    else:
        why = error.strerror or str(error)
    return f"{program} cannot be started: {why}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
