"""Running programs: in a group of their own, bounded in time and output, never half-owned.

1. Argument lists only, no shell. Standard input is a file in memory, output goes to a file:
   no pipe that blocks a program, or breaks when this process dies.
2. Ordinary programs get SIGTERM when their caller is cancelled, and SIGKILL at the end of its
   cleanup allowance. Inside a critical section nothing comes before ``min(5 s, budget / 4)``
   ahead of its deadline: then SIGTERM, and SIGKILL at the deadline.
3. The whole group gets both, and members that outlive their leader get the same.
4. The call is over when the program has ended, whoever still holds its output open.
5. A program of an operation outlives this process, and how it ends is durable all the same
   (``parent``). A stop ends it by the same rules as any other.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from reconciled.core.errors import ProgramFailed, StepsDamaged
from reconciled.core.program_end import Ended
from reconciled.programs.children import Child, Owner, ProgramHandle, current_children
from reconciled.programs.launch import Launch, explain_start_failure, program_environment
from reconciled.programs.output import Output
from reconciled.programs.program_records import Assignment, boot_id
from reconciled.programs.steps import format_handle, read_steps
from reconciled.programs.supervision import Supervision
from reconciled.stop import Section, cleanup_scope, covering_section
from reconciled.threads import in_thread

OUTPUT_LIMIT = 1024 * 1024
# A program can write 1 GB a second straight to its file, whatever we do: looking more often
# costs more than it saves.
POLL_INTERVAL = 0.25
TERM_LEAD = 5.0  # seconds between SIGTERM and the deadline of a critical section, at most
# What the kernel may take to end a killed group. Beyond it sits in a system call that
# nothing ends; to wait on would only take the rest of the stop down with it.
KILL_TIMEOUT = 1.0

__all__ = ["Ended", "JournaledOperation", "ProgramFailed", "program_environment", "run_program"]


class JournaledOperation(Protocol):
    """What run_program() needs of an operation; see reconciled.api.Operation."""

    @property
    def id(self) -> str:
        """The idempotency key."""

    @property
    def attempt(self) -> int:
        """1 for the first one."""

    @property
    def epoch(self) -> int:
        """The number of this start of the daemon."""

    @property
    def last_step(self) -> str:
        """The last step that is durable."""

    @property
    def directory(self) -> Path:
        """``STATE/operations/ID``."""


async def run_program(  # noqa: PLR0913 one required argument
    argv: Sequence[str],
    *,
    operation: JournaledOperation | None = None,
    output: Path | None = None,
    name: str = "",
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    output_limit: int = OUTPUT_LIMIT,
) -> Ended:
    """Run the program *argv* to its end, and tell how it ended; see Ended.check().

    operation     whose program it is, one at a time: it is started only once that is durable,
                  goes on where the daemon is killed, and is told its identity (RECONCILED_*)
    output        directory for its output, made if it lacks; by default the operation's, else
                  ``request.output``; the file in it is NAME.log, and is appended to
    name          what it does, as in ``apply``; by default the program's file name
    environment   on top of the daemon's own, without what is meant for the daemon alone
    directory     where it runs; argument 0 with a slash is relative to it
    output_limit  bytes of output that are kept, the newest

    Raises ProgramFailed if it cannot be started. When cancelled, ends the program and its
    group (SIGTERM, then SIGKILL when the cleanup allowance is over) before trio.Cancelled
    goes on; inside a critical section it runs on until that nears its deadline.
    """
    arguments = _checked_arguments(argv)
    action = name or Path(arguments[0]).name
    if output is None and operation is None:
        raise TypeError("run_program() needs to know where output goes: output=request.output")
    with _exclusive_program(operation):
        variables = program_environment({**(environment or {}), **_operation_variables(operation)})
        launch = Launch(arguments, directory, variables, stdin)
        place = output or (operation.directory if operation else Path())
        file = place / f"{action}.log"
        try:
            log = Output.open(file, output_limit)
        except OSError as error:
            message = f"{arguments[0]}: its output cannot go to {file}: {error.strerror}"
            raise ProgramFailed(message) from error
        with contextlib.closing(log):
            return await _run(launch, log, operation, action)


@contextlib.contextmanager
def _exclusive_program(operation: JournaledOperation | None) -> Iterator[None]:
    """Its turn to run a program: what is durable of them has room for one."""
    running = current_children().operations
    if operation is None:
        yield
        return
    if operation.id in running:
        raise RuntimeError(f"operation {operation.id} runs a program already: one at a time")
    running.add(operation.id)
    try:
        yield
    finally:
        running.discard(operation.id)


def _operation_variables(operation: JournaledOperation | None) -> dict[str, str]:
    """What a program is told about its operation."""
    if operation is None:
        return {}
    try:
        noted = read_steps(operation.directory)
    except (StepsDamaged, OSError) as error:
        raise ProgramFailed(f"which steps are done is unknown: {error}") from error
    return {
        "RECONCILED_OPERATION": operation.id,
        "RECONCILED_ATTEMPT": str(operation.attempt),
        "RECONCILED_STEP": noted[-1].name if noted else operation.last_step,
        "RECONCILED_EPOCH": str(operation.epoch),
        "RECONCILED_HANDLE": format_handle(operation.directory.absolute(), operation.attempt),
    }


async def _run(
    launch: Launch, log: Output, operation: JournaledOperation | None, action: str
) -> Ended:
    section = covering_section()
    began = trio.current_time()
    child = await _start(launch, log, _supervision(operation, action, section), section)
    warned = False
    try:
        if section is not None:
            with section.scope_before_deadline(min(TERM_LEAD, section.budget / 4)):
                await _wait_ended(child, log)
            warned = not child.ended
        if warned:
            child.signal_group(signal.SIGTERM)
        await _wait_ended(child, log)
    finally:
        kill_at = _kill_deadline(child, section, warned=warned)
        with trio.CancelScope(deadline=kill_at + KILL_TIMEOUT, shield=True):
            await _end_group(child, log, kill_at)
            await child.release()
        code, number = _reap_or_abandon(child)
        log.compact()
    tail = log.tail(current_children().redact)
    ended = Ended(launch.arguments[0], code, number, trio.current_time() - began, tail)
    if warned and section is not None and code is None:
        # It ended by our signal, not by a word of its own: that is a cut section, and no
        # failed program. The section says so; it need not wait for its deadline any more.
        section.cut(f"{ended}, sent ahead of the deadline")
        await trio.sleep_forever()
    return ended


def _supervision(
    operation: JournaledOperation | None, action: str, section: Section | None
) -> Supervision | None:
    if operation is None:
        return None
    # Monotonic time of this boot: what the next daemon, and reap, can still make sense of.
    deadline = None if section is None else time.monotonic() + section.remaining
    return Supervision(
        operation.directory.absolute(),
        Assignment(boot_id(), operation.attempt, action, section is not None, deadline),
    )


async def _start(
    launch: Launch, log: Output, supervision: Supervision | None, section: Section | None
) -> Child:
    """Start it in a thread; a cancellation meanwhile is delivered at the next checkpoint."""
    children = current_children()
    task = trio.lowlevel.current_task().name
    owner = Owner(launch.arguments[0], task, section is not None)

    def start() -> ProgramHandle:
        if supervision is None:
            return launch.start(log)
        return launch.start_under_parent(log, supervision, children.supervisors)

    try:
        return await in_thread(partial(children.start, start, owner), limiter=children.limiter)
    except (OSError, ValueError) as error:
        raise ProgramFailed(explain_start_failure(launch, error)) from error


async def _wait_ended(child: Child, log: Output) -> None:
    """Wait for the program itself, and keep its output bounded."""
    while not child.ended:
        with trio.move_on_after(POLL_INTERVAL):
            await child.wait()
        await _trim_output(log)


async def _trim_output(log: Output) -> None:
    if log.is_over_limit:
        # To give back 300 MB takes 10-50 ms, too long for the loop.
        await in_thread(log.trim, limiter=current_children().limiter)


def _kill_deadline(child: Child, section: Section | None, *, warned: bool) -> float:
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
            await _wait_group_ended(child, log)
            return
    child.signal_group(signal.SIGKILL)
    await _wait_group_ended(child, log)


async def _wait_group_ended(child: Child, log: Output) -> None:
    await _wait_ended(child, log)
    pause = 0.002
    while child.members():
        await trio.sleep(pause)
        pause = min(pause * 2, 0.1)
        await _trim_output(log)


def _reap_or_abandon(child: Child) -> tuple[int | None, int | None]:
    """Reap it. One that not even SIGKILL ended is left to the reaper of orphans."""
    try:
        if child.ended:
            return child.reap()
        child.abandon()
        return None, None
    finally:
        current_children().forget(child)


def _checked_arguments(argv: Sequence[str]) -> tuple[str, ...]:
    if isinstance(argv, str) or not argv or not argv[0]:
        raise ProgramFailed(
            f"{argv!r} is not a program: write a list of its name and arguments, as in [ls, -l]"
        )
    return tuple(argv)
