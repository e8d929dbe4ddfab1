"""Which attempt of an operation is the current one: the fence before programs of older ones.

1. ``attempt`` holds its number, or "closed" when the operation is over. It is durable before
   anything of that attempt runs.
2. It is changed, and steps are noted, under one lock on the operation's directory: whoever is
   told that a step is durable belonged to the current attempt when it was written.

Nothing heavy is imported here: ``reconciled step`` has 50 ms for everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from reconciled.durability import replace_at, sync_parent

ATTEMPT = "attempt"
CLOSED = "closed"


def read_attempt(handle: int) -> str:
    """The current attempt in the directory *handle*: a number, CLOSED, or empty if none was."""
    try:
        file = os.open(ATTEMPT, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=handle)
    except FileNotFoundError:
        return ""
    try:
        return os.read(file, 64).decode("ascii", "replace").strip()
    finally:
        os.close(file)


def fence(directory: str | os.PathLike[str], attempt: int) -> None:
    """Let *attempt* be the current one, durably: programs of others are refused their steps.

    For a thread: it syncs, and waits for a step that is being noted. Raises OSError.
    """
    with lock_directory(directory) as handle:
        if _set_attempt(handle, str(attempt)):
            os.fsync(handle)
            sync_parent(handle)


def fence_unsynced(directory: str | os.PathLike[str], attempt: int) -> None:
    """The same, but durable only once the directory and the one above it are synced.

    The small parent does that anyway before it lets a program go: two syncs fewer.
    """
    with lock_directory(directory) as handle:
        _set_attempt(handle, str(attempt))


def close_attempts(directory: str | os.PathLike[str]) -> None:
    """Let no attempt be current any more: the operation is over. Raises OSError.

    Harmless where the directory was never made: then no program of it ever ran.
    """
    with contextlib.suppress(FileNotFoundError), lock_directory(directory) as handle:
        if _set_attempt(handle, CLOSED):
            os.fsync(handle)


def _set_attempt(handle: int, text: str) -> bool:
    """Whether it was another one before."""
    if read_attempt(handle) == text:
        return False
    replace_at(handle, ATTEMPT, text.encode() + b"\n")
    return True


@contextlib.contextmanager
def lock_directory(directory: str | os.PathLike[str]) -> Iterator[int]:
    """The directory's descriptor, under its lock. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
