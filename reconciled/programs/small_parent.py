"""The small parent of one program: it outlives the daemon, records the end and owns the session.

It runs as ``python -I -S -E`` and leads a session of its own, so that no controlling terminal can
stop its program. It has two descriptors as arguments. The first holds this module's code and the
launch request, both marshalled by the same interpreter; the second is a socket to the daemon,
whose end of file means that the daemon has ended or has abandoned the program.

1. The program is executed after its identity is recorded in ``child``, and after the daemon has
   received that identity and approved the start. For an operation the record is durable.
2. The end is durable in ``end`` before the daemon is informed. If it cannot be written, the daemon
   is informed at once, and writing is retried.
3. Members are the processes of this session, and each descendant whose chain of parents to this
   process runs through living processes: this process adopts orphans below it. Detached is what
   has a session of its own and was re-parented to this process before the first signal of ours:
   it is neither signalled nor waited for.
4. Who sends the first signal records that in ``signalled`` before, together with what was detached
   by then. An end after that is an interruption, whatever the exit code.
5. This process ignores the signals that stop a service, and exits when no member is left: while
   it lives, its session does. It records that exit in ``gone``, which saves later searches.
6. A program outside operations is ended when its daemon ends. Members that outlive their program
   are ended by the daemon, or by this process if the daemon has ended.

It imports only built-in modules, and ``_ctypes`` for one system call, so it starts in 8 ms: ``os``
would add 1 ms, ``json`` 9 ms.
Rejected: a shell, which starts in 1 ms, but can neither read start times nor sync a directory; a
process group, which ``timeout`` and every interactive shell leave.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal proper builds enums for 3 ms
import marshal
import posix
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

IGNORED_SIGNALS = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT)
RESTORED_SIGNALS = (
    _signal.SIGPIPE,
    _signal.SIGXFSZ,
)  # Python ignores both; programs expect the default
GRACE = 5.0  # seconds from SIGTERM to SIGKILL for members that outlive the program
WRITE_RETRY_TIMEOUT = 600.0  # seconds for which a failed write of the end is retried
NOT_STARTED = 127
_NOT_FOUND = (2, 20)  # ENOENT, ENOTDIR: the next directory of PATH is tried
_WRITE_RETRY_INTERVAL = 0.05

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_UMASK = 0o022
SIGNALLED, GONE = "signalled", "gone"

# Directory of the records (empty: nothing is recorded), arguments, files to execute in turn,
# environment, working directory, the beginning of both records (a JSON object without its last
# fields), and whether it belongs to an operation: then the records are durable, and the program
# outlives the daemon.
LaunchRequest = tuple[
    bytes, list[bytes], list[bytes], dict[bytes, bytes], "bytes | None", bytes, bool
]
# Pid, start time and session of a process.
Member = tuple[int, int, int]


def main() -> int:
    """Start, wait, record and clean up; no process reads the exit code."""
    source, daemon = int(sys.argv[1]), int(sys.argv[2])
    posix.set_inheritable(daemon, False)  # noqa: FBT003 - it takes no keywords
    request = _read_launch_request(source)
    adopt_orphans()
    children_ended = _catch_ends()
    directory = -1
    if request[0]:
        directory = posix.open(request[0], posix.O_RDONLY | posix.O_DIRECTORY)
    pid, go, failed = _fork(request)
    for number in IGNORED_SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    program = pid, _start_time(b"%d" % pid)
    me = posix.getpid(), _start_time(b"self")
    record = request[5] + b'"program": {"pid": %d, "started": %d}' % program
    mine = b'"parent": {"pid": %d, "started": %d}' % me
    durable = request[6]
    try:
        if directory >= 0:
            for name in (SIGNALLED, GONE):  # of an earlier program
                _remove(directory, name)
            child = record + b", " + mine + b", " + _state_directory(directory) + b"}\n"
            _write(directory, "child", child, durable=durable)
            if durable:
                _sync_parent_directory(directory)
    except OSError as error:
        return _abort_start(pid, go, daemon, b"X %d" % (error.errno or 0))
    _send(daemon, b"P %d %d" % program)
    if _receive(daemon) != b"g":
        return _abort_start(pid, go, daemon, b"")
    _send(go, b"g")
    posix.close(go)
    why = posix.read(failed, 16) or b"0"
    _send(daemon, b"S " + why)
    Session(me[0], program, directory, daemon, children_ended, record, durable).watch()
    if directory >= 0:
        _try_write(directory, GONE, b"%d %d\n" % me, durable=False)
    return 0


def adopt_orphans() -> None:
    """Become the parent of orphans below this process. Not inherited by what it forks."""
    import _ctypes

    this: Any = None  # the library that the interpreter is linked with
    prctl = _ctypes.dlsym(_ctypes.dlopen(this, 0), "prctl")
    if _ctypes.call_function(prctl, (_SET_CHILD_SUBREAPER, 1, 0, 0, 0)):
        raise OSError("prctl failed")


def _catch_ends() -> int:
    """A descriptor that becomes readable when a child ends."""
    read, write = posix.pipe()
    for descriptor in (read, write):
        posix.set_blocking(descriptor, False)
    _signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _signal.signal(_signal.SIGCHLD, lambda *_: None)
    return read


def _read_launch_request(source: int) -> LaunchRequest:
    data = b""
    while part := posix.read(source, 65536):
        data += part
    posix.close(source)
    request: LaunchRequest = marshal.loads(data)  # noqa: S302 - the daemon wrote it, in memory
    return request


def _fork(request: LaunchRequest) -> tuple[int, int, int]:
    """Fork the program: its pid, a pipe that lets it execute, one that returns an error number."""
    may_go, go = posix.pipe()
    failed, why = posix.pipe()
    pid = posix.fork()
    if pid == 0:
        code = NOT_STARTED
        try:
            posix.setpgid(0, 0)
            posix.close(go)
            if posix.read(may_go, 1) == b"g":
                posix.write(why, b"%d" % _execute(request))
        finally:
            posix._exit(code)  # noqa: SLF001 - its public name
    # In both processes, since either may run first.
    posix.setpgid(pid, pid)
    posix.close(may_go)
    posix.close(why)
    return pid, go, failed


def _execute(request: LaunchRequest) -> int:
    """Execute the program; returns the error number if that fails."""
    _, arguments, files, environment, where, _, _ = request
    for number in RESTORED_SIGNALS:
        _signal.signal(number, _signal.SIG_DFL)
    posix.umask(_UMASK)
    raise_oom_score(b"/proc/self/oom_score_adj")
    try:
        if where is not None:
            posix.chdir(where)
    except OSError as error:
        return error.errno or 0
    found = last = 0
    for file in files:
        try:
            posix.execve(file, arguments, environment)
        except OSError as error:
            last = error.errno or 0
            if last not in _NOT_FOUND:
                found = found or last
    return found or last


def raise_oom_score(file: bytes) -> None:
    """Raise a negative out-of-memory score in *file* to 0, so that the program is ended first.

    A unit gives the daemon a score below 0, and programs inherit it. Raising it needs no
    privilege. An error is ignored: the kernel refused, or the process has ended.
    """
    try:
        score = posix.open(file, posix.O_RDONLY)
        low = posix.read(score, 16).startswith(b"-")
        posix.close(score)
        if low:
            score = posix.open(file, posix.O_WRONLY | posix.O_TRUNC)
            posix.write(score, b"0")
            posix.close(score)
    except OSError:
        return


def _abort_start(pid: int, go: int, daemon: int, message: bytes) -> int:
    posix.close(go)
    posix.waitpid(pid, 0)
    _send(daemon, message)
    return 1


class Session:
    """The session of one program, as its small parent sees it."""

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        leader: int,
        program: tuple[int, int],
        directory: int,
        daemon: int,
        children_ended: int,
        record: bytes,
        of_operation: bool,  # noqa: FBT001
    ) -> None:
        self.leader = leader
        self.program = program
        self.directory = directory
        self.daemon = daemon
        self.children_ended = children_ended
        self.record = record
        self.of_operation = of_operation
        self.status: int | None = None  # of the program, once it has ended
        self.end = b""  # its record, until that is written
        self.detached: list[Member] | None = None  # before the first signal
        self.answer = b""  # "r": release, "-": the daemon has ended
        self.signals: list[int] = []  # to send in turn, to members
        self.next_at = 0.0

    def watch(self) -> None:
        """Return when the program has ended, no member is left, and its end is recorded."""
        import select

        poll = select.poll()
        poll.register(self.children_ended, select.POLLIN)
        poll.register(self.daemon, select.POLLIN)
        until = 0.0
        while True:
            self._reap()
            if self.status is not None:
                until = until or time.monotonic() + WRITE_RETRY_TIMEOUT
                self._retry_end(until)
                if self.detached is None and self.directory >= 0:
                    found = read_signalled(self.directory)  # by another sender
                    self.detached = None if found is None else found[2]
                if not find_members(self.leader, self.detached)[0] and not self.end:
                    return
            timeout = self._escalate()
            ready = poll.poll(None if timeout is None else 1000 * timeout)
            for descriptor, _ in ready:
                if descriptor == self.children_ended:
                    posix.read(descriptor, 4096)
                else:
                    self.answer = _receive(self.daemon)[:1] or b"-"
                    poll.unregister(self.daemon)

    def _reap(self) -> None:
        """Reap every child that has ended; record the end of the program."""
        try:
            while True:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
                if pid == 0:
                    return
                if pid == self.program[0]:
                    self.status = status
                    self._record_end(status)
        except ChildProcessError:
            return

    def _record_end(self, status: int) -> None:
        number = b"%d" % posix.WTERMSIG(status) if posix.WIFSIGNALED(status) else b"null"
        code = b"%d" % posix.WEXITSTATUS(status) if posix.WIFEXITED(status) else b"null"
        found = read_signalled(self.directory) if self.directory >= 0 else None
        more = b""
        if found is not None and found[1] and code != b"null":
            # It answered a signal of ours: an interruption, whatever its exit code.
            more = b', "exit": ' + code
            code, number = b"null", b"%d" % found[0]
        fields = b', "code": %s, "signal": %s, "at": %.3f%s}\n' % (code, number, time.time(), more)
        self.end = self.record + fields
        if self.directory < 0 or _try_write(
            self.directory, "end", self.end, durable=self.of_operation
        ):
            self.end = b""
        _send(self.daemon, b"E %s %s" % (code, number))

    def _retry_end(self, until: float) -> None:
        """Write an end that could not be written. A living daemon journals the outcome itself."""
        if self.end and (
            self.answer == b"r"
            or time.monotonic() > until
            or _try_write(self.directory, "end", self.end, durable=self.of_operation)
        ):
            self.end = b""

    def _escalate(self) -> float | None:
        """Send the signals that are due; seconds until the next measure, None for no limit."""
        timeout = _WRITE_RETRY_INTERVAL if self.end else None
        if self.answer == b"r":
            self.signals = [_signal.SIGKILL]
        elif self._is_alone() and not self.signals:
            self.signals = [_signal.SIGTERM, _signal.SIGKILL]
            self._signal_members(self.signals[0])
            self.next_at = time.monotonic() + GRACE
        if len(self.signals) == 2 and time.monotonic() >= self.next_at:  # noqa: PLR2004
            del self.signals[0]
        if len(self.signals) == 1:
            # At each end of a child as well: what a killed member had started is adopted then.
            self._signal_members(_signal.SIGKILL)
        if len(self.signals) == 2:  # noqa: PLR2004
            rest = max(0.0, self.next_at - time.monotonic())
            timeout = rest if timeout is None else min(timeout, rest)
        return timeout

    def _is_alone(self) -> bool:
        """Whether the daemon has ended, and ending the members is left to this process."""
        return bool(self.answer) and (self.status is not None or not self.of_operation)

    def _signal_members(self, number: int) -> None:
        if self.detached is None:
            self.detached = record_signal(
                self.directory, self.leader, number, b"parent", ended=self.status is not None
            )
        for pid, started, _ in find_members(self.leader, self.detached)[0]:
            send_signal(pid, started, number)


def find_members(leader: int, detached: list[Member] | None) -> tuple[list[Member], list[Member]]:
    """The living members of the session that the small parent *leader* leads, and the detached.

    detached  what was detached at the first signal; None before it
    """
    members, apart = [], []
    waiting, seen = [leader], {leader}
    while waiting:
        above = waiting.pop()
        for pid in _children(above):
            fields = [] if pid in seen else _stat(b"%d" % pid)
            if not fields:
                continue
            seen.add(pid)
            member = pid, int(fields[19]), int(fields[3])
            if above == leader and member[2] != leader and is_detached(member, detached):
                apart.append(member)
                continue
            waiting.append(pid)
            if fields[0] not in b"ZX":
                members.append(member)
    return members, apart


def is_detached(member: Member, detached: list[Member] | None) -> bool:
    """Whether *member*, an orphan with a session of its own, was detached before the first signal.

    What a detached process starts later stays in its session, as a rule.
    """
    return detached is None or any(
        member[:2] == each[:2] or member[2] == each[2] for each in detached
    )


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in posix.listdir(b"/proc/%d/task" % pid):
            file = posix.open(b"/proc/%d/task/%s/children" % (pid, thread), posix.O_RDONLY)
            try:
                data = b""
                while part := posix.read(file, 65536):
                    data += part
            finally:
                posix.close(file)
            found += map(int, data.split())
    except OSError:  # it has ended
        return found
    return found


def record_signal(
    directory: int, leader: int, number: int, sender: bytes, *, ended: bool
) -> list[Member]:
    """Record that a signal of ours is about to be sent; returns what is detached, for good.

    directory  descriptor of the records; -1: nothing is recorded
    ended      whether the program had ended before

    The record of the first sender counts, and needs no sync: after a power cut the outcome in
    ``end``, which is durable, says the same. On a full disk an empty record is left, which counts
    as a signal too.
    """
    if directory >= 0 and (found := read_signalled(directory)) is not None:
        return found[2]
    members, detached = find_members(leader, None)
    shared = {session for _, _, session in members}
    detached = [(pid, at, 0 if sid in shared else sid) for pid, at, sid in detached]
    lines = [b"%d %d %s\n" % (number, ended, sender)]
    lines += [b"%d %d %d\n" % each for each in detached]
    if directory >= 0 and not _try_write(directory, SIGNALLED, b"".join(lines), durable=False):
        _create_empty(directory, SIGNALLED)
    return detached


def _create_empty(directory: int, name: str) -> None:
    try:
        posix.close(posix.open(name, posix.O_WRONLY | posix.O_CREAT, 0o600, dir_fd=directory))
    except OSError:
        return


def read_signalled(directory: int) -> tuple[int, bool, list[Member]] | None:
    """The first signal, whether it interrupted the program, and what was detached; or None."""
    try:
        file = posix.open(SIGNALLED, posix.O_RDONLY | posix.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return None
    try:
        first, *others = posix.read(file, 65536).splitlines() or [b""]
        number, ended, _ = first.split() or [b"15", b"0", b""]
        return int(number), ended == b"0", [_member(line) for line in others]
    except (OSError, ValueError):
        return int(_signal.SIGTERM), True, []
    finally:
        posix.close(file)


def _member(line: bytes) -> Member:
    pid, started, session = map(int, line.split())
    return pid, started, session


def send_signal(pid: int, started: int, number: int) -> bool:
    """Send *number* to a process, by a descriptor of it; False if it has not received it."""
    try:
        descriptor = posix.pidfd_open(pid)
    except OSError:
        return False
    try:
        # Compared after the descriptor is open: a pid may be reused, a descriptor never.
        if _start_time(b"%d" % pid) != started:
            return False
        _signal.pidfd_send_signal(descriptor, number)
    except OSError:  # ended, or of another user
        return False
    finally:
        posix.close(descriptor)
    return True


def _try_write(directory: int, name: str, data: bytes, *, durable: bool) -> bool:
    try:
        _write(directory, name, data, durable=durable)
    except OSError:
        return False
    return True


def _write(directory: int, name: str, data: bytes, *, durable: bool) -> None:
    """Replace the file *name* in *directory*, and sync both if *durable*. Raises OSError."""
    temporary = f".{name}.new"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW
    file = posix.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        while data:
            data = data[posix.write(file, data) :]
        if durable:
            posix.fsync(file)
    finally:
        posix.close(file)
    posix.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    if durable:
        posix.fsync(directory)


def _remove(directory: int, name: str) -> None:
    try:
        posix.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return


def _state_directory(directory: int) -> bytes:
    """Which state directory this record belongs to: a copy of it has another inode."""
    state = posix.stat("../..", dir_fd=directory)
    return b'"state": {"inode": %d, "device": %d}' % (state.st_ino, state.st_dev)


def _sync_parent_directory(directory: int) -> None:
    """Sync the parent directory: *directory* itself may be new."""
    above = posix.open("..", posix.O_RDONLY | posix.O_DIRECTORY, dir_fd=directory)
    posix.fsync(above)
    posix.close(above)


def _start_time(who: bytes) -> int:
    """Start time in ticks after boot; 0 if the process has ended."""
    return int(fields[19]) if (fields := _stat(who)) else 0


def _stat(who: bytes) -> list[bytes]:
    try:
        file = posix.open(b"/proc/" + who + b"/stat", posix.O_RDONLY)
        try:
            return posix.read(file, 4096).rpartition(b")")[2].split()
        finally:
            posix.close(file)
    except OSError:
        return []


def _send(listener: int, message: bytes) -> None:
    try:
        posix.write(listener, message)
    except OSError:  # the receiver has ended
        return


def _receive(daemon: int) -> bytes:
    """The daemon's next message; empty if the daemon has ended."""
    try:
        return posix.read(daemon, 16)
    except OSError:
        return b""


if __name__ == "__main__":
    posix._exit(main())  # noqa: SLF001 - its public name; the interpreter's shutdown takes 2 ms
