"""The daemon's side of a program under a small parent: start, wait, release.

1. The outcome is what the small parent recorded, never an exit status read elsewhere: without a
   record there is no outcome.
2. release() returns after the small parent has exited. If the daemon abandons the program or dies,
   the small parent detects the closed socket, ends the group and exits.
3. The program's group is signalled only while its pid certainly belongs to it: a killed small
   parent no longer keeps the program unreaped.
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
from reconciled.programs.processes import find_process
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
    """The operation of a program, and what is recorded beside the program's identity."""

    directory: Path  # STATE/operations/ID
    assignment: Assignment


@attrs.define(eq=False)
class SupervisedHandle:
    """A program with its small parent; made by start_supervised()."""

    pid: int
    started: int
    _supervision: Supervision
    _parent: subprocess.Popen[bytes]
    _pidfd: int  # of the program
    _socket: socket.socket
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

    @property
    def holds_pgid(self) -> bool:
        """Whether the program exists, alive or as a zombie."""
        process = find_process(self.pid)
        return process is not None and process.started == self.started

    async def wait(self) -> None:
        """Return at a message of the small parent, or at the end of the orphaned program."""
        await trio.lowlevel.wait_readable(self._pidfd if self._orphaned else self._socket)

    async def release(self) -> None:
        """Make the small parent reap it, and wait for that; a cancellation ends the wait only."""
        with contextlib.suppress(OSError):
            self._socket.send(b"r")
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
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._parent.pid, os.WEXITED | os.WNOHANG)
        self.abandon()
        return outcome

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

    def _has_ended(self) -> bool:
        process = find_process(self.pid)
        return process is None or process.started != self.started or not process.alive

    def _read_outcome(self) -> tuple[int | None, int | None]:
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

    run_parent  starts a command with two more descriptors, in a process group of its own
    parents     gets the small parent's pid at once, so that no scan takes it for an orphan

    Raises OSError, with an error number only if the program itself could not be executed.
    """
    try:
        fence_unsynced(supervision.directory, supervision.assignment.attempt)
    except OSError as error:
        raise _record_failed(supervision.directory, error) from error
    daemon_end, parent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as failing:
        failing.callback(daemon_end.close)
        source = os.memfd_create("order", os.MFD_CLOEXEC)
        with parent_end, os.fdopen(source, "r+b") as file:
            file.write(_CODE + launch_request)
            file.seek(0)
            pair = (source, parent_end.fileno())
            # The last argument is for people who read the process list.
            words = (*map(str, pair), f"over operation {supervision.directory.name}")
            popen = run_parent([sys.executable, "-I", "-S", "-E", "-c", _BOOT, *words], pair)
        parents.add(popen.pid)
        failing.callback(parents.discard, popen.pid)
        # The socket is closed first: the small parent then exits without executing the program.
        failing.callback(popen.wait)
        failing.callback(daemon_end.close)
        pid, started = map(int, _receive(daemon_end, b"P", supervision.directory))
        pidfd = os.pidfd_open(pid)  # the fork waits for the approval, or for the end of the socket
        failing.callback(os.close, pidfd)
        with contextlib.suppress(OSError):  # it has ended: the next receive shows that
            daemon_end.send(b"g")
        why = int(next(_receive(daemon_end, b"S", supervision.directory), 0))
        if why:
            raise OSError(why, os.strerror(why))
        failing.pop_all()
        return SupervisedHandle(pid, started, supervision, popen, pidfd, daemon_end)


def _receive(daemon_end: socket.socket, wanted: bytes, directory: Path) -> Iterator[bytes]:
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


def _record_failed(directory: Path, error: OSError) -> OSError:
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
        os.fsencode(supervision.directory),
        words,
        files,
        variables,
        None if where is None else os.fsencode(where),
        supervision.assignment.to_json_prefix(),
    )
    return marshal.dumps(plain)


def _checked(text: bytes) -> bytes:
    if b"\0" in text:
        raise ValueError("embedded null byte")
    return text
