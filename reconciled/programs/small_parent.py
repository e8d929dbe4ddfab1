"""The small parent of one program of an operation: it outlives the daemon and records the end.

It runs as ``python -I -S -E`` in a process group of its own, with two descriptors as arguments.
The first holds this module's code and the launch request, both marshalled by the same
interpreter; the second is a socket to the daemon, whose end of file means that the daemon has
ended.

1. The program is executed after its identity is durable in ``child``, and after the daemon has
   received that identity and approved the start.
2. The end is durable in ``end`` before the daemon is informed. If it cannot be written, the daemon
   is informed at once, and writing is retried.
3. The ended program is reaped after its group has ended: until then it keeps the group's number.
   The daemon ends the group, or this process does if the daemon has ended.
4. It ignores the signals that stop a service, and exits soon after its program has ended.

It imports only built-in modules, so it starts in 8 ms: ``os`` would add 1 ms, ``json`` 9 ms.
Rejected: a shell, which starts in 1 ms, but can neither read start times nor sync a directory.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # signal proper builds enums for 3 ms
import marshal
import posix
import sys
import time

IGNORED_SIGNALS = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT)
RESTORED_SIGNALS = (
    _signal.SIGPIPE,
    _signal.SIGXFSZ,
)  # Python ignores both; programs expect the default
GRACE = 5.0  # seconds from SIGTERM to SIGKILL for members that outlive the program
WRITE_RETRY_TIMEOUT = 600.0  # seconds for which a failed write of the end is retried
NOT_STARTED = 127
_NOT_FOUND = (2, 20)  # ENOENT, ENOTDIR: the next directory of PATH is tried
_POLL_INTERVAL = 0.05

# Operation's directory, arguments, files to execute in turn, environment, working directory, and
# the beginning of both records: a JSON object without its last fields.
LaunchRequest = tuple[bytes, list[bytes], list[bytes], dict[bytes, bytes], "bytes | None", bytes]


def main() -> int:
    """Start, wait, record and clean up; no process reads the exit code."""
    source, daemon = int(sys.argv[1]), int(sys.argv[2])
    posix.set_inheritable(daemon, False)  # noqa: FBT003 - it takes no keywords
    request = _read_launch_request(source)
    directory = posix.open(request[0], posix.O_RDONLY | posix.O_DIRECTORY)
    pid, go, failed = _fork(request)
    for number in IGNORED_SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    started = _start_time(b"%d" % pid)
    record = request[5] + b'"program": {"pid": %d, "started": %d}' % (pid, started)
    mine = b'"parent": {"pid": %d, "started": %d}' % (posix.getpid(), _start_time(b"self"))
    try:
        child = record + b", " + mine + b", " + _state_directory(directory) + b"}\n"
        _write_durably(directory, "child", child)
        _sync_parent_directory(directory)
    except OSError as error:
        return _abort_start(pid, go, daemon, b"X %d" % (error.errno or 0))
    _send(daemon, b"P %d %d" % (pid, started))
    if _receive(daemon) != b"g":
        return _abort_start(pid, go, daemon, b"")
    _send(go, b"g")
    posix.close(go)
    why = posix.read(failed, 16) or b"0"
    _send(daemon, b"S " + why)
    _watch(pid, directory, daemon, record)
    return 0


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
    _, arguments, files, environment, where, _ = request
    for number in RESTORED_SIGNALS:
        _signal.signal(number, _signal.SIG_DFL)
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


def _watch(pid: int, directory: int, daemon: int, record: bytes) -> None:
    """Wait for the program, record its end, and reap it after its group has ended."""
    status = posix.waitid(posix.P_PID, pid, posix.WEXITED | posix.WNOWAIT)
    number = b"null" if status is None else b"%d" % status.si_status
    if status is not None and status.si_code == posix.CLD_EXITED:
        code, number = number, b"null"
    else:
        code = b"null"
    fields = b', "code": %s, "signal": %s, "at": %.3f}\n' % (code, number, time.time())
    durable = _try_write_end(directory, record + fields)
    _send(daemon, b"E %s %s" % (code, number))
    until = time.monotonic() + WRITE_RETRY_TIMEOUT
    while not durable and not _has_message(daemon) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL)
        durable = _try_write_end(directory, record + fields)
    alone = _receive(daemon) != b"r"
    if alone:
        _end_group(pid, _signal.SIGTERM, GRACE)
    _end_group(pid, _signal.SIGKILL, 1.0)
    posix.waitpid(pid, 0)
    # A running daemon has recorded the outcome in its journal.
    while alone and not durable and time.monotonic() < until:
        time.sleep(1)
        durable = _try_write_end(directory, record + fields)


def _try_write_end(directory: int, data: bytes) -> bool:
    try:
        _write_durably(directory, "end", data)
    except OSError:
        return False
    return True


def _write_durably(directory: int, name: str, data: bytes) -> None:
    temporary = f".{name}.new"
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_NOFOLLOW
    file = posix.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        while data:
            data = data[posix.write(file, data) :]
        posix.fsync(file)
    finally:
        posix.close(file)
    posix.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    posix.fsync(directory)


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


def _end_group(pid: int, number: int, timeout: float) -> None:
    """Signal the program's group and wait for its members. *pid* is unreaped, so not reused."""
    posix.killpg(pid, number)
    until = time.monotonic() + timeout
    while _has_members(pid) and time.monotonic() < until:
        time.sleep(_POLL_INTERVAL)


def _has_members(group: int) -> bool:
    wanted = b"%d" % group
    for name in posix.listdir(b"/proc"):
        fields = _stat(name) if name.isdigit() and name != wanted else []
        if fields and fields[2] == wanted and fields[0] not in b"ZX":
            return True
    return False


def _send(listener: int, message: bytes) -> None:
    try:
        posix.write(listener, message)
    except OSError:  # the receiver has ended
        return


def _has_message(daemon: int) -> bool:
    """Whether a message of the daemon waits, or the daemon has ended. Receives nothing."""
    import select

    return bool(select.select([daemon], [], [], 0)[0])


def _receive(daemon: int) -> bytes:
    """The daemon's next message; empty if the daemon has ended."""
    try:
        return posix.read(daemon, 16)
    except OSError:
        return b""


if __name__ == "__main__":
    posix._exit(main())  # noqa: SLF001 - its public name; the interpreter's shutdown takes 2 ms
