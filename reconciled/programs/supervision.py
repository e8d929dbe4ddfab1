"""The daemon's side of a program under a small parent: start, wait, release.

1. The outcome is what the small parent recorded, never an exit status read elsewhere: without a
   record there is no outcome.
2. release() returns after the small parent has exited. If the daemon abandons the program or dies,
   the small parent detects the closed socket, ends the group and exits.
3. A program outside operations has no durable record, and is ended when its daemon ends.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

import attrs
import trio

from reconciled.core.errors import RecordDamaged
from reconciled.programs import small_parent
from reconciled.programs.attempt_fence import fence_unsynced
from reconciled.programs.members import Members, is_alive
from reconciled.programs.processes import Process, find_process
from reconciled.programs.program_records import Assignment, Identity, read_end

_MESSAGE = 64  # bytes; longer ones are never sent
# The small parent gets its code compiled: reading the file adds 3-6 ms to about 11, and an upgrade
# of the package under a running daemon may remove the file.
_CODE = marshal.dumps(
    SourceFileLoader(small_parent.__name__, small_parent.__file__).get_code(small_parent.__name__)
)
_BOOT = (
    "import marshal, sys; code = marshal.load(open(int(sys.argv[1]), 'rb', 0, closefd=False));"
    " exec(code, {'__name__': '__main__'})"
)


@attrs.frozen
class Supervision:
    """Where a program is recorded, and what is recorded beside its identity.

    directory  STATE/operations/ID; None: it is recorded nowhere
    """

    directory: Path | None
    assignment: Assignment

    @property
    def of_operation(self) -> bool:
        """Whether it is a program of an operation, which outlives the daemon."""
        return self.assignment.attempt > 0


@attrs.define(eq=False)
class SupervisedHandle:
    """A program with its small parent; made by start_supervised()."""

    pid: int
    started: int
    _supervision: Supervision
    _parent: subprocess.Popen[bytes]
    _pidfd: int  # of the program
    _socket: socket.socket
    _members: Members
    _left: bool = attrs.field(default=False, init=False)
    _orphaned: bool = attrs.field(default=False, init=False)  # its small parent has ended
    _reported: tuple[int | None, int | None] | None = attrs.field(default=None, init=False)

    @property
    def supervisor(self) -> int:
        """The small parent's pid."""
        return self._parent.pid

    @property
    def ended(self) -> bool:
        """Whether its end was reported, or it has ended and no small parent can record that."""
        self._listen()
        return self._reported is not None or (self._orphaned and self._has_ended())

    def members(self) -> list[Process]:
        """The living members of its session, the program included."""
        return [] if self._has_left() else self._members.find()

    def signal(self, number: int) -> bool:
        """Send *number* to every member; False if none received it. For any thread."""
        return self._members.signal(number)

    async def wait(self) -> None:
        """Return at a message of the small parent, or at the end of the orphaned program."""
        await trio.lowlevel.wait_readable(self._pidfd if self._orphaned else self._socket)

    async def release(self) -> None:
        """Make the small parent reap it, and wait for that; a cancellation ends the wait only."""
        with contextlib.suppress(OSError):
            self._socket.send(b"r")
        await self.wait_gone()

    async def wait_gone(self) -> None:
        """Return when the small parent has ended, which outlives every member."""
        if self._has_left():
            return
        pidfd = os.pidfd_open(self._parent.pid)  # a child that is not reaped yet, so it exists
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal, as recorded; both None without a record."""
        self._listen()
        outcome = self._reported or self._read_outcome()
        # If its small parent was killed, it is a child of this process, which adopts orphans.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        self._has_left()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._parent.pid, os.WEXITED | os.WNOHANG)
        self.abandon()
        by = self._members.interrupted_by
        # Without a record the small parent does not know of the signal; nor on a full disk.
        return (None, by) if by is not None and outcome[0] is not None else outcome

    def abandon(self) -> None:
        """Close everything; the small parent continues alone and ends after its program."""
        self._socket.close()
        os.close(self._pidfd)
        self._parent.returncode = 0  # its status is read without Popen, which would warn

    def _listen(self) -> None:
        """Receive the small parent's messages since the last call."""
        while self._reported is None and not self._orphaned:
            try:
                message = self._socket.recv(_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._orphaned = True
            elif message.startswith(b"E "):
                code, number = message.split()[1:]
                self._reported = _number(code), _number(number)

    def _has_left(self) -> bool:
        """Whether the small parent has ended by itself, after the last member."""
        if not self._left:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            with contextlib.suppress(ChildProcessError):
                status = os.waitid(os.P_PID, self._parent.pid, options)
                self._left = status is not None and status.si_code == os.CLD_EXITED
        return self._left

    def _has_ended(self) -> bool:
        return not is_alive(Identity(self.pid, self.started))

    def _read_outcome(self) -> tuple[int | None, int | None]:
        if self._supervision.directory is None:
            return None, None
        try:
            end = read_end(self._supervision.directory)
        except (RecordDamaged, OSError):
            return None, None
        mine = (self._supervision.assignment, Identity(self.pid, self.started))
        if end is None or (end.assignment, end.program) != mine:
            return None, None
        return end.code, end.signal


def _number(text: bytes) -> int | None:
    return None if text == b"null" else int(text)


def start_supervised(
    supervision: Supervision,
    launch_request: bytes,
    run_parent: Callable[[Sequence[str], tuple[int, int]], subprocess.Popen[bytes]],
    parents: set[int],
) -> SupervisedHandle:
    """Start *launch_request* under a small parent. Blocks and syncs: call it in a thread.

    run_parent  starts a command with two more descriptors, in a session of its own
    parents     gets the small parent's pid at once, so that no scan takes it for an orphan

    Raises OSError, with an error number only if the program itself could not be executed.
    """
    directory = supervision.directory
    try:
        if directory is not None and supervision.of_operation:
            fence_unsynced(directory, supervision.assignment.attempt)
    except OSError as error:
        raise _record_failed(directory, error) from error
    daemon_end, parent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as failing:
        failing.callback(daemon_end.close)
        source = os.memfd_create("order", os.MFD_CLOEXEC)
        with parent_end, os.fdopen(source, "r+b") as file:
            file.write(_CODE + launch_request)
            file.seek(0)
            pair = (source, parent_end.fileno())
            # The last argument is for people who read the process list.
            words = (*map(str, pair), f"over {_describe(supervision)}")
            popen = run_parent([sys.executable, "-I", "-S", "-E", "-c", _BOOT, *words], pair)
        parents.add(popen.pid)
        failing.callback(parents.discard, popen.pid)
        # The socket is closed first: the small parent then exits without executing the program.
        failing.callback(popen.wait)
        failing.callback(daemon_end.close)
        pid, started = map(int, _receive(daemon_end, b"P", directory))
        pidfd = os.pidfd_open(pid)  # the fork waits for the approval, or for the end of the socket
        failing.callback(os.close, pidfd)
        with contextlib.suppress(OSError):  # it has ended: the next receive shows that
            daemon_end.send(b"g")
        why = int(next(_receive(daemon_end, b"S", directory), 0))
        if why:
            raise OSError(why, os.strerror(why))
        failing.pop_all()
        members = _members(supervision, popen.pid, Identity(pid, started))
        return SupervisedHandle(pid, started, supervision, popen, pidfd, daemon_end, members)


def _members(supervision: Supervision, parent: int, program: Identity) -> Members:
    found = find_process(parent)
    identity = Identity(parent, 0 if found is None else found.started)
    attempt = supervision.assignment.attempt
    return Members(identity, program, supervision.directory, attempt, "daemon")


def _describe(supervision: Supervision) -> str:
    if supervision.of_operation and supervision.directory is not None:
        return f"operation {supervision.directory.name}"
    return supervision.assignment.action


def _receive(daemon_end: socket.socket, wanted: bytes, directory: Path | None) -> Iterator[bytes]:
    """The numbers in the small parent's message *wanted*."""
    message = daemon_end.recv(_MESSAGE)
    kind, *numbers = message.split() or [b""]
    if kind == b"X":
        raise _record_failed(directory, OSError(int(numbers[0]), os.strerror(int(numbers[0]))))
    if kind != wanted:
        # The small parent was killed. Before "P" the program was not executed; after it the
        # program may run.
        if wanted == b"P":
            raise OSError("its small parent was killed before the program was executed")
        return iter(())
    return iter(numbers)


def _record_failed(directory: Path | None, error: OSError) -> OSError:
    # Without an error number, since it is not the program's.
    return OSError(f"cannot record the start durably in {directory}: {error.strerror}")


def encode_launch_request(
    supervision: Supervision,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    where: Path | None,
) -> bytes:
    """A marshalled small_parent.LaunchRequest.

    Raises ValueError for arguments and variables that no program can be given.
    """
    words = [_checked(os.fsencode(argument)) for argument in arguments]
    variables = {
        _checked(os.fsencode(name)): _checked(os.fsencode(value))
        for name, value in environment.items()
    }
    name = words[0]
    files = [name]
    if b"/" not in name:
        path = os.get_exec_path(dict(environment))
        files = [os.path.join(os.fsencode(each), name) for each in path]  # noqa: PTH118 bytes
    plain: small_parent.LaunchRequest = (
        b"" if supervision.directory is None else os.fsencode(supervision.directory),
        words,
        files,
        variables,
        None if where is None else os.fsencode(where),
        supervision.assignment.to_json_prefix(),
        supervision.of_operation,
    )
    return marshal.dumps(plain)


def _checked(text: bytes) -> bytes:
    if b"\0" in text:
        raise ValueError("embedded null byte")
    return text
