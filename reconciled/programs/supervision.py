"""A program of an operation as its daemon sees it: with a small parent of ours in between.

1. The outcome is what the small parent recorded, never an exit status that somebody may have
   lost: no record, no outcome.
2. The small parent is gone when the program is let go. Where this process gives up or dies, it
   sees that from the closed socket, deals with the group by itself, and goes.
3. The program's group is signalled only while its number is certainly its own: the small
   parent, who does not reap it, may have been killed.
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
from reconciled.programs.attempts import fence_unsynced
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import Assignment, Identity, read_end

_MESSAGE = 64  # bytes; longer ones are never sent
# The small parent's code is handed to it compiled: from its file it takes 3-6 ms more of about
# 11, and an upgrade of the package under a running daemon could take the file away.
_CODE = marshal.dumps(
    SourceFileLoader(small_parent.__name__, small_parent.__file__).get_code(small_parent.__name__)
)
_BOOT = (
    "import marshal, sys; code = marshal.load(open(int(sys.argv[1]), 'rb', 0, closefd=False));"
    " exec(code, {'__name__': '__main__'})"
)


@attrs.frozen
class Supervision:
    """For which operation a program is started, and what is noted of it beside its identity."""

    directory: Path  # STATE/operations/ID
    assignment: Assignment


@attrs.define(eq=False)
class SupervisedHandle:
    """The program, over it its small parent; made by start()."""

    pid: int
    started: int
    _supervision: Supervision
    _parent: subprocess.Popen[bytes]
    _pidfd: int  # of the program
    _socket: socket.socket
    _orphaned: bool = attrs.field(default=False, init=False)  # its small parent is gone
    _reported: tuple[int | None, int | None] | None = attrs.field(default=None, init=False)

    @property
    def supervisor(self) -> int:
        """The small parent's pid."""
        return self._parent.pid

    @property
    def ended(self) -> bool:
        """Whether its end is recorded, or it has ended and nobody is left to record that."""
        self._listen()
        return self._reported is not None or (self._orphaned and self._has_ended())

    @property
    def holds_pgid(self) -> bool:
        """Whether the program is there, be it as a zombie."""
        process = find_process(self.pid)
        return process is not None and process.started == self.started

    async def wait(self) -> None:
        """Return when the small parent has said something, or the orphaned program has ended."""
        await trio.lowlevel.wait_readable(self._pidfd if self._orphaned else self._socket)

    async def release(self) -> None:
        """Tell the small parent to reap it, and wait for that; when cancelled, it is told."""
        with contextlib.suppress(OSError):
            self._socket.send(b"r")
        pidfd = os.pidfd_open(self._parent.pid)  # unreaped by us: it is there
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal, as recorded; none where there is no record."""
        self._listen()
        outcome = self._reported or self._read_outcome()
        # An orphan of its small parent is our own child now, if we adopt orphans.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._parent.pid, os.WEXITED | os.WNOHANG)
        self.abandon()
        return outcome

    def abandon(self) -> None:
        """Close everything; the small parent goes on by itself, and ends after its program."""
        self._socket.close()
        os.close(self._pidfd)
        self._parent.returncode = 0  # we wait past its back; it would warn otherwise

    def _listen(self) -> None:
        """Take what the small parent has said since."""
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
    """Start what *order* says under a small small_parent. Blocks, and syncs: for a thread.

    run_parent  starts a command with two more descriptors, in a group of its own
    parents     gets the small parent's pid at once, before anybody can wonder whose it is

    Raises OSError, with the program's own error number where that could not be executed.
    """
    try:
        fence_unsynced(supervision.directory, supervision.assignment.attempt)
    except OSError as error:
        raise _record_failed(supervision.directory, error) from error
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as failing:
        failing.callback(ours.close)
        source = os.memfd_create("order", os.MFD_CLOEXEC)
        with theirs, os.fdopen(source, "r+b") as file:
            file.write(_CODE + launch_request)
            file.seek(0)
            pair = (source, theirs.fileno())
            # The last argument is for whoever reads a list of processes.
            words = (*map(str, pair), f"over operation {supervision.directory.name}")
            popen = run_parent([sys.executable, "-I", "-S", "-E", "-c", _BOOT, *words], pair)
        parents.add(popen.pid)
        failing.callback(parents.discard, popen.pid)
        # Closed first, the socket makes it go; what it has forked is not executed then.
        failing.callback(popen.wait)
        failing.callback(ours.close)
        pid, started = map(int, _receive(ours, b"P", supervision.directory))
        pidfd = os.pidfd_open(pid)  # it waits for our word, or for the end of the socket
        failing.callback(os.close, pidfd)
        with contextlib.suppress(OSError):  # its end is told by what comes, or does not
            ours.send(b"g")
        why = int(next(_receive(ours, b"S", supervision.directory), 0))
        if why:
            raise OSError(why, os.strerror(why))
        failing.pop_all()
        return SupervisedHandle(pid, started, supervision, popen, pidfd, ours)


def _receive(ours: socket.socket, wanted: bytes, directory: Path) -> Iterator[bytes]:
    """The numbers that come with message *wanted*."""
    message = ours.recv(_MESSAGE)
    kind, *numbers = message.split() or [b""]
    if kind == b"X":
        raise _record_failed(directory, OSError(int(numbers[0]), os.strerror(int(numbers[0]))))
    if kind != wanted:
        # Ended before the program was let go, or by that very program: only then it runs.
        if wanted == b"P":
            raise OSError("the process that should note its end was ended before it began")
        return iter(())
    return iter(numbers)


def _record_failed(directory: Path, error: OSError) -> OSError:
    # Without an error number: it is not the program's own.
    return OSError(f"that it runs cannot be noted durably in {directory}: {error.strerror}")


def encode_launch_request(
    supervision: Supervision,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    where: Path | None,
) -> bytes:
    """What the small parent is to do: a small_parent.Order.

    Raises ValueError for what no program can be given.
    """
    words = [_checked(os.fsencode(argument)) for argument in arguments]
    variables = {
        _checked(os.fsencode(name)): _checked(os.fsencode(value))
        for name, value in environment.items()
    }
    name = words[0]
    places = [name]
    if b"/" not in name:
        path = os.get_exec_path(dict(environment))
        places = [os.path.join(os.fsencode(each), name) for each in path]  # noqa: PTH118 bytes
    plain: small_parent.LaunchRequest = (
        os.fsencode(supervision.directory),
        words,
        places,
        variables,
        None if where is None else os.fsencode(where),
        supervision.assignment.to_json_prefix(),
    )
    return marshal.dumps(plain)


def _checked(text: bytes) -> bytes:
    if b"\0" in text:
        raise ValueError("embedded null byte")
    return text
