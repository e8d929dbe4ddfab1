"""Programs that outlived their daemon: found by identity, waited for or ended, outcome taken over.

1. A process is the recorded one only by number, start time and boot together. Its group is
   signalled only while the program itself holds the number; without it, a member is one only
   if its environment names the operation, and it is signalled through a descriptor.
2. How a program ended is what its small parent recorded. No record, no outcome.
3. A survivor is over when neither program nor small parent lives, nor anybody of its group.
   That the small parent sees to, or whoever waits here where it was killed.

Imports trio where something is waited for by it alone: ``reconciled reap`` needs the rest.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from reconciled.core.errors import RecordDamaged
from reconciled.programs.cgroup import is_hidden
from reconciled.programs.processes import Process, all_processes, find_process
from reconciled.programs.program_records import (
    Assignment,
    ChildRecord,
    EndRecord,
    Identity,
    boot_id,
    read_child,
    read_end,
    write_end,
)

POLL_INTERVAL = 0.05  # seconds between two scans where no event reports the end of a process
TERM_GRACE = 5.0  # seconds from SIGTERM to SIGKILL for an ordinary survivor
KILL_TIMEOUT = 2.0  # seconds for the kernel to end it and the small parent to record that
_ESCALATION = ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, KILL_TIMEOUT))


@attrs.define(eq=False)
class Survivor:
    """The last program of an operation, as it stands now; close() it.

    Made by find(). ``alive`` is False where only its record is left.
    """

    directory: Path
    record: ChildRecord
    _same_boot: bool  # of this boot of this machine
    _program: int = -1  # pidfd; -1: it does not live
    _parent: int = -1

    def __repr__(self) -> str:
        assignment = self.assignment
        state = "alive" if self.alive else "gone"
        kind = "critical " if assignment.critical else ""
        return f"<Survivor {kind}{assignment.action} pid {self.record.program.pid}: {state}>"

    @property
    def assignment(self) -> Assignment:
        """What it was started for: attempt, action, whether critical, deadline."""
        return self.record.assignment

    @property
    def alive(self) -> bool:
        """Whether the program, its small parent, or anybody else of its group still lives."""
        return _is_alive(self._program) or _is_alive(self._parent) or bool(self.remaining_members())

    @property
    def end(self) -> EndRecord | None:
        """How it ended; None: not yet, or nobody took note. Raises Damaged, OSError."""
        end = read_end(self.directory)
        return end if end is not None and end.matches(self.record) else None

    def remaining(self, now: Callable[[], float] = time.monotonic) -> float:
        """Seconds left of its budget; 0 for an ordinary one, which has none."""
        deadline = self.assignment.deadline
        return 0.0 if deadline is None else max(0.0, deadline - now())

    async def wait(self) -> EndRecord | None:
        """Wait until it is over; how it ended, None where nobody took note.

        Ends what has outlived the program in its group, if the small parent cannot. A
        cancellation leaves everything as it is. Raises Damaged, OSError.
        """
        import trio

        for descriptor in (self._program, self._parent):
            if descriptor >= 0:
                await trio.lowlevel.wait_readable(descriptor)
        for number, patience in _ESCALATION:
            with trio.move_on_after(patience):
                if self.remaining_members():
                    self.signal(number)
                while self.remaining_members():  # noqa: ASYNC110 - no event comes from a stranger's child
                    await trio.sleep(POLL_INTERVAL)
                return self.end
        return self.end

    async def terminate(self, term: float = TERM_GRACE) -> EndRecord | None:
        """End its group: SIGTERM, SIGKILL after *term* seconds; how it ended, as wait() says.

        When cancelled, it has got SIGTERM. Raises Damaged, OSError.
        """
        import trio

        for number, patience in ((signal.SIGTERM, term), (signal.SIGKILL, KILL_TIMEOUT)):
            self.signal(number)
            with trio.move_on_after(patience):
                return await self.wait()
        self.kill_parent()
        return self.end

    def signal(self, number: int) -> bool:
        """Send *number* to whoever is left of its group; False where certainly nobody is.

        A program that has ended and is not reaped yet holds the number of its group.
        """
        program = self.record.program
        if not self._same_boot or not _is_running(program):
            sent = [send_signal(process, number) for process in self.remaining_members()]
            return any(sent)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.pid, number)
            return True
        return False

    def kill_parent(self) -> None:
        """End the small parent, which outlives its program for as long as it cannot take note."""
        if _is_alive(self._parent):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._parent, signal.SIGKILL)

    def remaining_members(self) -> list[Process]:
        """Who lives in the group of a program that is gone, where no small parent ends them."""
        if (
            _is_alive(self._program)
            or _is_alive(self._parent)
            or not self._same_boot
            or self._has_end()
        ):
            return []
        group = self.record.program.pid
        return [
            each
            for each in all_processes()
            if each.group == group and each.alive and has_operation_variable(each, self.directory)
        ]

    def _has_end(self) -> bool:
        """Whether an end is recorded; one that cannot be read says nothing about who is left."""
        try:
            return self.end is not None
        except (RecordDamaged, OSError):
            return False

    def record_end(self, number: int) -> None:
        """Record that ``reap`` ended it by signal *number*, unless its end is recorded.

        Raises Damaged, OSError.
        """
        if self.end is None:
            record = self.record
            end = EndRecord(record.assignment, record.program, None, number, time.time(), "reap")
            write_end(self.directory, end)

    def close(self) -> None:
        """Let go of its descriptors; harmless when repeated."""
        for descriptor in (self._program, self._parent):
            if descriptor >= 0:
                os.close(descriptor)
        self._program = self._parent = -1


def find_survivor(directory: Path) -> Survivor | None:
    """The last program of the operation in *directory*; None where it never ran one.

    Of another boot nothing lives. Raises Damaged: then nothing may be concluded, and OSError.
    So it is where the sandbox hides the process: what cannot be seen need not be gone.
    """
    record = read_child(directory)
    if record is None:
        return None
    if not record.assignment.boot_id or record.assignment.boot_id != boot_id():
        return Survivor(directory, record, same_boot=False)
    for identity in (record.program, record.parent):
        if is_hidden(identity.pid):
            raise RecordDamaged(
                f"process {identity.pid} of it runs and cannot be seen from here: remove"
                " PrivateUsers= from the unit, or end that process"
            )
    program = _open_pidfd(record.program)
    try:
        return Survivor(directory, record, True, program, _open_pidfd(record.parent))  # noqa: FBT003
    except BaseException:
        if program >= 0:
            os.close(program)
        raise


def _open_pidfd(identity: Identity) -> int:
    """A descriptor for the process of that very identity, -1 where it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return -1
    # Opened first: from here on the number may go to somebody else, the descriptor never.
    if _is_running(identity):
        return descriptor
    os.close(descriptor)
    return -1


def _is_running(identity: Identity) -> bool:
    process = find_process(identity.pid)
    return process is not None and process.started == identity.started


def _is_alive(descriptor: int) -> bool:
    """Whether the process of a pidfd has not ended; a zombie has."""
    if descriptor < 0:
        return False
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)


def has_operation_variable(process: Process, directory: Path) -> bool:
    """Whether the environment of *process* names the operation of *directory*."""
    mark = f"RECONCILED_OPERATION={directory.name}".encode()
    try:
        return mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send_signal(process: Process, number: int) -> bool:
    """Send *number* to that very process; False where it is gone or not ours to signal."""
    identity = Identity(process.pid, process.started)
    descriptor = _open_pidfd(identity)
    if descriptor < 0:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(descriptor)
    return True
