"""The state directory and its lock: one daemon at a time, on a file system that keeps promises.

1. The lock is the kernel's (flock): it goes with its process, however that ends. The process
   id in the file is for messages and never proves anything.
2. No program inherits it: the handle is close-on-exec.
3. The lock file is never removed: a second one under the same name could be locked as well.
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

WAIT = 5.0  # seconds: a restart overlaps with its predecessor's last moments
POLL = 0.1
# flock, fsync and SQLite's shared memory mean less there than the journal needs, or depend on
# servers that we know nothing about. Other FUSE file systems are whatever their program makes
# of them; fuse-overlayfs is the usual root of rootless containers and local.
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
    """The held lock; made by acquire(). warnings: what a person should know about the place."""

    state: Path
    warnings: tuple[str, ...]
    _handle: int

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

        Synchronous: nothing runs yet that could be held up. Raises StateRefused or Locked.
        """
        warnings = _prepare(state)
        try:
            handle = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise StateRefused(f"{state}/lock: {exc.strerror}") from exc
        try:
            _lock(handle, state, clock() + wait, clock, sleep)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        return cls(state, warnings, handle)

    def release(self) -> None:
        """Give the lock back. Once only, after the store is closed."""
        os.close(self._handle)
        self._handle = -1


def probe(state: Path) -> None:
    """Raises Locked if somebody holds *state*; takes nothing, and makes nothing. Raises OSError.

    With a shared lock for an instant: a daemon that starts in that very instant tries again,
    and two who probe do not see each other.
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
            sleep(POLL)
        except OSError as exc:
            raise StateRefused(f"{state}/lock cannot be locked: {exc.strerror}") from exc
        else:
            return


def _holder(handle: int) -> int | None:
    text = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
    return int(text) if text.isdigit() else None


def _prepare(state: Path) -> tuple[str, ...]:
    """Make *state* if it is missing, and judge owner, mode and file system."""
    try:
        _make(state)
    except OSError as exc:
        raise StateRefused(f"{state} cannot be made: {exc.strerror}") from exc
    try:
        handle = os.open(state, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        if exc.errno == errno.ENOTDIR:
            raise StateRefused(f"{state} is not a directory") from exc
        raise StateRefused(f"{state} cannot be opened: {exc.strerror}") from exc
    try:
        _check_owner(state, os.fstat(handle))
        return _check_file_system(state, file_system(handle))
    finally:
        os.close(handle)


def _make(state: Path) -> None:
    if state.exists():
        return
    state.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another start was faster; the lock decides
        state.mkdir(mode=0o700)
    sync(state.parent)


def _check_owner(state: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StateRefused(
            f"{state} belongs to uid {status.st_uid}, and this is uid {os.geteuid()}: run as its "
            f"owner, or chown it"
        )
    if stat.S_IMODE(status.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise StateRefused(
            f"{state} has mode {stat.S_IMODE(status.st_mode):04o}, so that others may write to "
            f"it: chmod 0700 {state}"
        )


def _check_file_system(state: Path, kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return (f"the file system of {state} is unknown: it has to be a local one",)
    if kind in _REMOTE or (kind.startswith("fuse") and kind not in _LOCAL_FUSE):
        raise StateRefused(
            f"{state} is on {kind}, where locks and syncs cannot be relied on: "
            f"use a local file system"
        )
    if kind in _VOLATILE:
        return (f"{state} is on {kind}: a reboot forgets what was applied",)
    return ()


def file_system(handle: int) -> str | None:
    """The type of the file system of an open file, as ``mount`` names it; None if unknown.

    By the mount's id, not by statfs(2): its numbers tell no kind of FUSE from another, and
    Python does not give them.
    """
    try:
        information = Path(f"/proc/self/fdinfo/{handle}").read_text()
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    found = re.search(r"^mnt_id:\s*(\d+)$", information, re.MULTILINE)
    if found is None:
        return None
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        if before.split(" ", 1)[0] == found[1]:
            return behind.split(" ", 1)[0]
    return None
