"""Running a program to its end: in a session of its own, bounded in time and output.

1. Argument lists only, no shell. Standard input is a file in memory and output goes to a file: a
   pipe would block the program, or break when the daemon dies.
2. An ordinary program gets SIGTERM when its caller is cancelled, and SIGKILL at the end of the
   caller's cleanup allowance. In a critical section it gets SIGTERM ``min(5 s, budget / 4)``
   before the section's deadline, and SIGKILL at the deadline.
3. Both signals go to all members of its session (``small_parent``), and members that outlive the
   program get both, too. What was detached before the first signal is left alone.
4. The call returns when no member is left, even if a detached process still holds the output open.
   A member that cannot be ended is waited for. A cancellation ends that wait; then the next program
   of the same task waits.
5. An end after a signal of the daemon is an interruption, whatever the exit code.
6. A program of an operation can outlive the daemon; its small parent then records how it ends. A
   stop ends it by the same rules as any other program.
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
# Seconds between two checks of the output's size. A program can write 1 GB a second to its file
# in any case: more checks cost more than they save.
POLL_INTERVAL = 0.25
TERM_LEAD = 5.0  # seconds between SIGTERM and the deadline of a critical section, at most
# Seconds that the kernel may take to end a killed group. A process that takes longer is blocked
# in a system call that no signal ends, and waiting for it would delay the rest of the stop.
KILL_TIMEOUT = 1.0

__all__ = ["Ended", "JournaledOperation", "ProgramFailed", "program_environment", "run_program"]


class JournaledOperation(Protocol):
    """What run_program() needs of an operation; see reconciled.api.Operation."""

    @property
    def id(self) -> str:
        """The idempotency key."""

    @property
    def attempt(self) -> int:
        """The number of the attempt; the first is 1."""

    @property
    def epoch(self) -> int:
        """The number of this start of the daemon."""

    @property
    def last_step(self) -> str:
        """The last durable step; empty before the first."""

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
    """Run the program *argv* to its end, and return how it ended; see Ended.check().

    operation     the operation it belongs to, which runs one program at a time: the program is
                  started after its identity is durable, continues if the daemon is killed, and
                  gets the operation's identity in RECONCILED_* variables
    output        directory for its output, made if missing; by default the operation's; without
                  an operation pass ``request.output``. Output is appended to NAME.log there
    name          its action, as in ``apply``; by default the program's file name
    environment   added to the daemon's, without the variables meant for the daemon alone
    directory     its working directory; an argument 0 with a slash is relative to it
    output_limit  bytes of output to keep, the newest

    Raises ProgramFailed if it cannot be started. A cancellation ends the program and its session
    (SIGTERM, then SIGKILL at the end of the cleanup allowance) before trio.Cancelled is raised;
    inside a critical section the program continues until shortly before the deadline.
    """
    arguments = _checked_arguments(argv)
    action = name or Path(arguments[0]).name
    if output is None and operation is None:
        raise TypeError("run_program() needs an output directory: pass output=request.output")
    with _exclusive_program(operation):
        variables = program_environment({**(environment or {}), **_operation_variables(operation)})
        launch = Launch(arguments, directory, variables, stdin)
        file = (output or (operation.directory if operation else Path())) / f"{action}.log"
        try:
            log = Output.open(file, output_limit)
        except OSError as error:
            message = f"cannot start {arguments[0]}: its output file {file}: {error.strerror}"
            raise ProgramFailed(message) from error
        with contextlib.closing(log):
            return await _run(launch, log, operation, action)


@contextlib.contextmanager
def _exclusive_program(operation: JournaledOperation | None) -> Iterator[None]:
    """Exclude a second program of *operation*: its records have room for one."""
    running = current_children().operations
    if operation is None:
        yield
        return
    if operation.id in running:
        raise RuntimeError(f"operation {operation.id} already runs a program: wait for its end")
    running.add(operation.id)
    try:
        yield
    finally:
        running.discard(operation.id)


def _operation_variables(operation: JournaledOperation | None) -> dict[str, str]:
    """The RECONCILED_* variables of a program of *operation*."""
    if operation is None:
        return {}
    try:
        steps = read_steps(operation.directory)
    except (StepsDamaged, OSError) as error:
        raise ProgramFailed(f"cannot read the operation's recorded steps: {error}") from error
    return {
        "RECONCILED_OPERATION": operation.id,
        "RECONCILED_ATTEMPT": str(operation.attempt),
        "RECONCILED_STEP": steps[-1].name if steps else operation.last_step,
        "RECONCILED_EPOCH": str(operation.epoch),
        "RECONCILED_HANDLE": format_handle(operation.directory.absolute(), operation.attempt),
    }


async def _run(
    launch: Launch, log: Output, operation: JournaledOperation | None, action: str
) -> Ended:
    section = covering_section()
    children = current_children()
    for earlier in children.given_up(trio.lowlevel.current_task().name):
        # A member of the key's earlier program is alive: none may run beside it.
        await earlier.wait_gone()
        children.forget(earlier)
    began = trio.current_time()
    child = await _start(launch, log, _supervision(operation, action, section), section)
    warned = False
    try:
        if section is not None:
            with section.scope_before_deadline(min(TERM_LEAD, section.budget / 4)):
                await _wait_ended(child, log)
            warned = not child.ended
        if warned:
            child.signal(signal.SIGTERM)
        await _wait_ended(child, log)
    finally:
        kill_at = _kill_deadline(child, section, warned=warned)
        with trio.CancelScope(deadline=kill_at + KILL_TIMEOUT, shield=True):
            await _end_members(child, log, kill_at)
            await child.release()
        code, number = _reap_or_abandon(child)
        log.compact()
    if child.members():  # one survives SIGKILL, or may not be signalled
        await child.wait_gone()
        children.forget(child)
    tail = log.tail(current_children().redact)
    ended = Ended(launch.arguments[0], code, number, trio.current_time() - began, tail)
    if warned and section is not None and code is None:
        # The daemon's signal ended it: the section was cut, and the program did not fail. The
        # section reports that and need not wait for its deadline.
        section.cut(f"the SIGTERM before its deadline: {ended}")
        await trio.sleep_forever()
    return ended


def _supervision(
    operation: JournaledOperation | None, action: str, section: Section | None
) -> Supervision:
    # In monotonic time of this boot, which the next daemon and ``reap`` can read as well.
    deadline = None if section is None else time.monotonic() + section.remaining
    return Supervision(
        None if operation is None else operation.directory.absolute(),
        Assignment(
            boot_id(),
            0 if operation is None else operation.attempt,
            action,
            section is not None,
            deadline,
            getattr(operation, "key", ""),  # a plugin's own stand-in in a test may have none
        ),
    )


async def _start(
    launch: Launch, log: Output, supervision: Supervision, section: Section | None
) -> Child:
    """Start it in a thread; a cancellation meanwhile acts at the next checkpoint."""
    children = current_children()
    task = trio.lowlevel.current_task().name
    owner = Owner(launch.arguments[0], task, section is not None)

    def start() -> ProgramHandle:
        return launch.start(log, supervision, children.supervisors)

    try:
        return await in_thread(partial(children.start, start, owner), limiter=children.limiter)
    except (OSError, ValueError) as error:
        raise ProgramFailed(explain_start_failure(launch, error)) from error


async def _wait_ended(child: Child, log: Output) -> None:
    """Wait for the end of the program itself, and keep its output bounded."""
    while not child.ended:
        with trio.move_on_after(POLL_INTERVAL):
            await child.wait()
        await _trim_output(log)


async def _trim_output(log: Output) -> None:
    if log.is_over_limit:
        # Freeing 300 MB takes 10-50 ms, too long for the event loop.
        await in_thread(log.trim, limiter=current_children().limiter)


def _kill_deadline(child: Child, section: Section | None, *, warned: bool) -> float:
    """When living members get SIGKILL, in trio's time."""
    if warned and not child.ended:
        return trio.current_time()
    allowance = cleanup_scope().deadline
    return allowance if section is None else min(allowance, section.deadline)


async def _end_members(child: Child, log: Output, kill_at: float) -> None:
    """End each living member: SIGTERM, and SIGKILL at *kill_at*."""
    if child.ended and not child.members():
        return
    if kill_at > trio.current_time():
        child.signal(signal.SIGTERM)
        with trio.CancelScope(deadline=kill_at):
            await _wait_members_ended(child, log)
            return
    child.signal(signal.SIGKILL)
    await _wait_members_ended(child, log, again=signal.SIGKILL)


async def _wait_members_ended(child: Child, log: Output, again: int = 0) -> None:
    """Return when the program and all members have ended; signals new ones by *again*."""
    pause = 0.002
    while not child.ended or child.members():
        if again:
            child.signal(again)
        await trio.sleep(pause)
        pause = min(pause * 2, 0.1)
        await _trim_output(log)


def _reap_or_abandon(child: Child) -> tuple[int | None, int | None]:
    """Reap it; leave one that SIGKILL did not end to the orphan reaper."""
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
