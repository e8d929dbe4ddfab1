"""The small parent over one program of an operation: it outlives the daemon, and keeps the end.

Run as ``python -I -S -E`` in a group of its own, with two descriptors as arguments: from the
first comes the order, marshalled by the same interpreter (before it, this module's own code);
the second is a socket to the daemon, and its end of file means that the daemon is gone.

1. The program is executed only once its identity is durable in ``child``, and the daemon that
   wants it, which is told of it, has said so.
2. How it ended is durable in ``end`` before anybody is told; where that cannot be written, the
   daemon is told at once and the writing is tried on.
3. The ended program is not reaped before its group is dealt with: until then it holds the
   number of the group. The daemon does that, or this process where the daemon is gone.
4. No signal meant to stop a service ends it: it ends by itself, soon after its program.

It imports only what is inside the interpreter, which takes 8 ms: ``os`` adds 1, ``json`` 9.
Rejected: a shell, which starts in 1 ms, but has neither start times nor a sync of directories.
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
)  # Python ignores them; no program expects that
GRACE = 5.0  # seconds between SIGTERM and SIGKILL for what outlives a program and its daemon
WRITE_RETRY_TIMEOUT = 600.0  # seconds for which an end that cannot be written is tried again
NOT_STARTED = 127
_NOT_FOUND = (2, 20)  # ENOENT, ENOTDIR: the next directory of PATH may have it
_POLL_INTERVAL = 0.05

# directory, arguments, files to execute in turn, environment, working directory,
# and the beginning of both records: a JSON object that lacks its last fields.
LaunchRequest = tuple[bytes, list[bytes], list[bytes], dict[bytes, bytes], "bytes | None", bytes]


def main() -> int:
    """Start, watch, record and clean up; the exit code interests nobody."""
    source, daemon = int(sys.argv[1]), int(sys.argv[2])
    posix.set_inheritable(daemon, False)  # noqa: FBT003 - it takes no keywords
    order = _read_launch_request(source)
    directory = posix.open(order[0], posix.O_RDONLY | posix.O_DIRECTORY)
    pid, go, failed = _fork(order)
    for number in IGNORED_SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    started = _start_time(b"%d" % pid)
    record = order[5] + b'"program": {"pid": %d, "started": %d}' % (pid, started)
    mine = b'"parent": {"pid": %d, "started": %d}' % (posix.getpid(), _start_time(b"self"))
    try:
        _write_durably(directory, "child", record + b", " + mine + b"}\n")
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
    order: LaunchRequest = marshal.loads(data)  # noqa: S302 - our own daemon wrote it, in memory
    return order


def _fork(order: LaunchRequest) -> tuple[int, int, int]:
    """The waiting program: its pid, what lets it go, and what tells why it could not."""
    may_go, go = posix.pipe()
    failed, why = posix.pipe()
    pid = posix.fork()
    if pid == 0:
        code = NOT_STARTED
        try:
            posix.setpgid(0, 0)
            posix.close(go)
            if posix.read(may_go, 1) == b"g":
                posix.write(why, b"%d" % _execute(order))
        finally:
            posix._exit(code)  # noqa: SLF001 - its public name
    # Here too: whichever of the two is first.
    posix.setpgid(pid, pid)
    posix.close(may_go)
    posix.close(why)
    return pid, go, failed


def _execute(order: LaunchRequest) -> int:
    """Become the program; the error number if that fails."""
    _, arguments, files, environment, where, _ = order
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
    """Where memory runs out, the program is ended before its daemon, and before this process.

    A unit gives the daemon a score below 0, which would be inherited. To raise it takes no
    right; where the kernel refuses all the same, or the process is gone, nothing is lost.
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
    """Wait for the program, record its end, and let go of it when its group is dealt with."""
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
    # A daemon that lives has the end in its own journal.
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


def _sync_parent_directory(directory: int) -> None:
    """The directory itself may be new."""
    above = posix.open("..", posix.O_RDONLY | posix.O_DIRECTORY, dir_fd=directory)
    posix.fsync(above)
    posix.close(above)


def _start_time(who: bytes) -> int:
    """Start time in ticks after boot: with the pid, its identity; 0 where it is gone."""
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
    """Signal the program's group and wait for its members; *pid* is unreaped, so it is its own."""
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
    except OSError:  # whoever listened is gone
        return


def _has_message(daemon: int) -> bool:
    """Whether the daemon has said something or is gone; takes nothing out of the socket."""
    import select

    return bool(select.select([daemon], [], [], 0)[0])


def _receive(daemon: int) -> bytes:
    """What the daemon says next; empty when it is gone."""
    try:
        return posix.read(daemon, 16)
    except OSError:
        return b""


if __name__ == "__main__":
    posix._exit(main())  # noqa: SLF001 - its public name; the interpreter's own end takes 2 ms
