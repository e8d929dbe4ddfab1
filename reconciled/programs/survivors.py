"""Programs that outlived their daemon: found by identity, then waited for or ended.

1. A process is the recorded one only if pid, start time and boot agree. Its members are found and
   signalled as ``members`` describes.
2. The outcome of a program is what its small parent recorded: without a record there is none.
3. A record in a copy of the state directory names a program of the original: for the copy it has
   ended, and it is never signalled. If only the device differs, as in a snapshot or after a
   remount, it may be either: it is waited for and never signalled.
4. A survivor is over when the program, its small parent and all members have ended. The small
   parent ends members that outlive the program; if it was killed, wait() and terminate() do.

trio is imported only where the code waits with it: ``reconciled reap`` needs the rest.
"""

from __future__ import annotations

import contextlib
import enum
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from reconciled.core.errors import RecordDamaged
from reconciled.programs.cgroup import is_hidden
from reconciled.programs.members import Members
from reconciled.programs.processes import Process, find_process
from reconciled.programs.program_records import (
    Assignment,
    ChildRecord,
    Directory,
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
    """The last program of an operation; close() it.

    Made by find_survivor(). ``alive`` is False if only its record is left.
    """

    directory: Path
    record: ChildRecord
    _same_boot: bool  # recorded during the current boot
    _program: int = -1  # pidfd; -1: it has ended
    _parent: int = -1
    # The record was written in this state directory: not in a copy or snapshot of it.
    owned: bool = True
    _members: Members = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        record = self.record
        self._members = Members(
            record.parent, record.program, self.directory, record.assignment.attempt, "reap"
        )

    def __repr__(self) -> str:
        assignment = self.assignment
        state = "alive" if self.alive else "ended"
        kind = "critical " if assignment.critical else ""
        return f"<Survivor {kind}{assignment.action} pid {self.record.program.pid}: {state}>"

    @property
    def assignment(self) -> Assignment:
        """The attempt, action and deadline that it was started for."""
        return self.record.assignment

    @property
    def alive(self) -> bool:
        """Whether the program, its small parent, or another member is alive."""
        return _is_alive(self._program) or _is_alive(self._parent) or bool(self.remaining_members())

    @property
    def end(self) -> EndRecord | None:
        """How it ended; None if it has not, or no record exists. Raises RecordDamaged, OSError."""
        end = read_end(self.directory)
        return end if end is not None and end.matches(self.record) else None

    def remaining(self, now: Callable[[], float] = time.monotonic) -> float:
        """Seconds left of its budget; 0 for an ordinary program, which has none."""
        deadline = self.assignment.deadline
        return 0.0 if deadline is None else max(0.0, deadline - now())

    async def wait(self) -> EndRecord | None:
        """Wait until it is over; returns how it ended, None without a record.

        Ends members that outlived the program if the small parent was killed. A cancellation
        sends no signal. Raises RecordDamaged, OSError.
        """
        import trio

        for descriptor in (self._program, self._parent):
            if descriptor >= 0:
                await trio.lowlevel.wait_readable(descriptor)
        for number, timeout in _ESCALATION:
            with trio.move_on_after(timeout):
                if self.remaining_members():
                    self.signal(number)
                while self.remaining_members():  # noqa: ASYNC110 - no event reports the end of a non-child
                    await trio.sleep(POLL_INTERVAL)
                return self.end
        while self.remaining_members():  # noqa: ASYNC110 - as above; they may not be signalled
            await trio.sleep(POLL_INTERVAL)
        return self.end

    async def terminate(self, term: float = TERM_GRACE) -> EndRecord | None:
        """End its members: SIGTERM, SIGKILL after *term* seconds; returns how it ended, as wait().

        A cancellation leaves it with SIGTERM sent. Raises RecordDamaged, OSError.
        """
        import trio

        for number, timeout in ((signal.SIGTERM, term), (signal.SIGKILL, KILL_TIMEOUT)):
            self.signal(number)
            with trio.move_on_after(timeout):
                return await self.wait()
        self.kill_parent()
        return self.end

    def signal(self, number: int) -> bool:
        """Send *number* to its members; False if none received it."""
        return self.owned and self._same_boot and self._members.signal(number)

    def members(self) -> list[Process]:
        """Its living members, the program included."""
        return self._members.find() if self._same_boot else []

    def kill_parent(self) -> None:
        """Kill a small parent that cannot record the end or is halted, unless a member lives."""
        if self.owned and _is_alive(self._parent) and not self.members():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._parent, signal.SIGKILL)

    def remaining_members(self) -> list[Process]:
        """Living members if both the program and its small parent have ended."""
        if _is_alive(self._program) or _is_alive(self._parent):
            return []
        return self.members()

    @property
    def runs_elsewhere(self) -> bool:
        """Whether it is a live program of the directory that this one is a copy of."""
        copied = not self.owned and not self._same_boot
        return copied and _is_running(self.record.program)

    def record_end(self, number: int) -> None:
        """Record that ``reap`` ended it by signal *number*, unless its end is recorded.

        Raises RecordDamaged, OSError.
        """
        if self.end is None:
            record = self.record
            end = EndRecord(record.assignment, record.program, None, number, time.time(), "reap")
            write_end(self.directory, end)

    def close(self) -> None:
        """Close its descriptors; may be repeated."""
        for descriptor in (self._program, self._parent):
            if descriptor >= 0:
                os.close(descriptor)
        self._program = self._parent = -1


def find_survivor(directory: Path) -> Survivor | None:
    """The last program of the operation in *directory*; None if it never ran one.

    A program of another boot has ended. Raises OSError, and RecordDamaged if the record is
    damaged or the sandbox hides the process: whether it has ended is unknown then.
    """
    record = read_child(directory)
    if record is None:
        return None
    if not record.assignment.boot_id or record.assignment.boot_id != boot_id():
        return Survivor(directory, record, same_boot=False)
    origin = _compare_state(record.state, directory)
    if origin is _Origin.COPIED:
        return Survivor(directory, record, same_boot=False, owned=False)
    for identity in (record.program, record.parent):
        if is_hidden(identity.pid):
            raise RecordDamaged(
                f"the sandbox hides its process {identity.pid}: remove PrivateUsers= from the"
                " unit, or end that process by hand"
            )
    program = _open_pidfd(record.program)
    try:
        parent = _open_pidfd(record.parent)
        return Survivor(directory, record, True, program, parent, origin is _Origin.OURS)  # noqa: FBT003
    except BaseException:
        if program >= 0:
            os.close(program)
        raise


class _Origin(enum.Enum):
    """In which state directory a record was written."""

    OURS = enum.auto()
    OTHER_DEVICE = enum.auto()
    COPIED = enum.auto()


def _compare_state(recorded: Directory, directory: Path) -> _Origin:
    """Compare the state directory of a record with that of the operation's *directory*."""
    state = (directory / "../..").stat()
    if not recorded.inode or recorded == Directory(state.st_ino, state.st_dev):
        return _Origin.OURS
    return _Origin.OTHER_DEVICE if recorded.inode == state.st_ino else _Origin.COPIED


def _open_pidfd(identity: Identity) -> int:
    """A pidfd for the process with this identity; -1 if it has ended."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return -1
    # Opened before the check: the pid may be reused at any time, the pidfd never refers to
    # another process.
    if _is_running(identity):
        return descriptor
    os.close(descriptor)
    return -1


def _is_running(identity: Identity) -> bool:
    process = find_process(identity.pid)
    return process is not None and process.started == identity.started


def _is_alive(descriptor: int) -> bool:
    """Whether the process of a pidfd is running; False for a zombie."""
    if descriptor < 0:
        return False
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(descriptor, select.POLLIN)
    return not poll.poll(0)


def has_operation_variable(process: Process, directory: Path) -> bool:
    """Whether the environment of *process* names the operation of *directory*."""
    variable = f"RECONCILED_OPERATION={directory.name}".encode()
    try:
        return variable in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def send_signal(process: Process, number: int) -> bool:
    """Send *number* to *process*; False if it has ended or may not be signalled."""
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
