"""The state directory and its lock: one daemon at a time, on a reliable file system.

1. The lock is the kernel's (flock): it is released when its process ends, however that happens.
   The process id in the file is for messages only and proves nothing.
2. No program inherits it: the descriptor is close-on-exec.
3. The lock file is never removed: a second file of the same name could be locked as well.
4. If another process deletes, moves or exchanges the directory or the lock file, a second daemon
   can lock what is at the path now. lost() detects that, by comparing the path with the open
   descriptors: an inode number is not reused while a descriptor is open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from reconciled.core.errors import StateLocked, StateRefused
from reconciled.durability import sync

WAIT = 5.0  # seconds: a restart overlaps with the end of its predecessor
POLL_INTERVAL = 0.1
# Their flock, fsync and shared memory for SQLite are weaker than the journal needs, or depend on
# an unknown server. A FUSE file system gives only the guarantees of its program; fuse-overlayfs,
# the usual root of rootless containers, is local.
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph"}) | {
    "lustre",
    "gfs2",
    "ocfs2",
    "gpfs",
    "beegfs",
    "orangefs",
    "virtiofs",
}
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuseblk"})
_VOLATILE = frozenset({"tmpfs", "ramfs"})


@attrs.define(eq=False)
class StateLock:
    """The held lock; made by acquire(). warnings: weaknesses of the file system, for a log."""

    state: Path
    warnings: tuple[str, ...]
    _handle: int
    _directory: int

    @classmethod
    def acquire(
        cls,
        state: Path,
        *,
        wait: float = WAIT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> StateLock:
        """Prepare *state* and lock it, waiting up to *wait* seconds for another holder.

        Blocks: nothing else runs yet. Raises StateRefused or StateLocked.
        """
        until = clock() + wait
        while True:
            lock = cls._acquire(state.absolute(), until, clock, sleep)
            if not lock.lost():
                return lock
            lock.release()  # deleted or exchanged meanwhile: lock what is there now

    @classmethod
    def _acquire(
        cls, state: Path, until: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> StateLock:
        directory, warnings = _prepare(state)
        try:
            handle = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            os.close(directory)
            raise StateRefused(f"cannot open {state}/lock: {exc.strerror}") from exc
        try:
            _lock(handle, state, until, clock, sleep)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            os.close(directory)
            raise
        return cls(state, warnings, handle, directory)

    def lost(self) -> str:
        """Why another process can hold a lock at the same path; empty: none can.

        Two system calls that touch no disk. A path that cannot be examined does not count as lost.
        """
        for path, handle in ((self.state, self._directory), (self.state / "lock", self._handle)):
            try:
                found = path.stat(follow_symlinks=path == self.state)
            except (FileNotFoundError, NotADirectoryError):
                return f"{path} was deleted or moved while the daemon was running"
            except OSError:
                continue
            if not os.path.samestat(found, os.fstat(handle)):
                return f"{path} was exchanged while the daemon was running"
        return ""

    def release(self) -> None:
        """Release the lock; once only, after the store is closed."""
        os.close(self._handle)
        os.close(self._directory)
        self._handle = self._directory = -1


def probe(state: Path) -> None:
    """Raise StateLocked if a process holds *state*; locks and creates nothing. Raises OSError.

    Takes a shared lock for an instant: a daemon that starts in this instant tries again, and two
    concurrent probes do not see each other.
    """
    try:
        handle = os.open(state / "lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StateLocked(state, _holder(handle)) from None
    finally:
        os.close(handle)


def _lock(
    handle: int,
    state: Path,
    until: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock() >= until:
                raise StateLocked(state, _holder(handle)) from None
            sleep(POLL_INTERVAL)
        except OSError as exc:
            raise StateRefused(f"cannot lock {state}/lock: {exc.strerror}") from exc
        else:
            return


def _holder(handle: int) -> int | None:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdigit() else None


def _prepare(state: Path) -> tuple[int, tuple[str, ...]]:
    """Make *state* if it is missing, and check it; its descriptor, and the warnings."""
    try:
        _make(state)
    except OSError as exc:
        raise StateRefused(
            f"cannot create {state}: {exc.strerror}: create it for the daemon's user, or set"
            " another directory as state:"
        ) from exc
    try:
        handle = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        if exc.errno == errno.ENOTDIR:
            raise StateRefused(f"{state} is not a directory") from exc
        raise StateRefused(
            f"cannot open {state}: {exc.strerror}: run as root, or as the daemon's user"
        ) from exc
    try:
        _check_owner(state, os.fstat(handle))
        return handle, _check_file_system(state, file_system(handle))
    except BaseException:
        os.close(handle)
        raise


def _make(state: Path) -> None:
    if state.exists():
        return
    state.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another start made it first; the lock decides
        state.mkdir(mode=0o700)
    sync(state.parent)


def _check_owner(state: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StateRefused(
            f"{state} is owned by uid {status.st_uid}, but this process has uid {os.geteuid()}:"
            " run it as the owner, or chown the directory"
        )
    if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateRefused(
            f"{state} is writable for other users (mode {stat.S_IMODE(status.st_mode):04o}):"
            f" chmod 0700 {state}"
        )


def _check_file_system(state: Path, kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return (f"the file system of {state} cannot be determined: it must be a local one",)
    if kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        raise StateRefused(
            f"{state} is on {kind}, where locks and syncs are not reliable: use a directory on a"
            " local file system"
        )
    if kind in _VOLATILE:
        return (f"{state} is on {kind}: what was applied is lost at a reboot",)
    return ()


def file_system(handle: int) -> str | None:
    """The type of the file system of the open file *handle*, as in ``mount``; None if unknown.

    Found by the mount id, not by statfs(2), whose numbers are the same for every FUSE file system
    and which Python does not offer.
    """
    try:
        fdinfo = Path(f"/proc/self/fdinfo/{handle}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    found = re.search(r"^mnt_id:\s*(\d+)$", fdinfo, re.MULTILINE)
    if found is None:
        return None
    for line in mounts.splitlines():
        mount, _, options = line.partition(" - ")
        if mount.split(" ", 1)[0] == found[1]:
            return options.split(" ", 1)[0]
    return None
