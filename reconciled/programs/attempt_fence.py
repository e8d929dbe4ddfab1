"""The current attempt of an operation, and the fence that excludes programs of older attempts.

1. The file ``attempt`` holds the number of the current attempt, or "closed" after the operation
   has ended. It is durable before a program of that attempt runs.
2. One lock on the operation's directory covers changes of the attempt and records of steps. A
   step that was reported durable was recorded by the attempt that was current at that time.

This module imports nothing heavy: ``reconciled step`` has 50 ms in total.
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
    """The current attempt in the directory *handle*: a number or CLOSED; empty before the first."""
    try:
        file = os.open(ATTEMPT, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=handle)
    except FileNotFoundError:
        return ""
    try:
        return os.read(file, 64).decode("ascii", "replace").strip()
    finally:
        os.close(file)


def fence(directory: str | os.PathLike[str], attempt: int) -> None:
    """Make *attempt* the current one, durably: programs of others cannot record steps any more.

    Blocks, so call it in a thread: it syncs, and waits for a step that is being recorded. Raises
    OSError.
    """
    with lock_directory(directory) as handle:
        if _set_attempt(handle, str(attempt)):
            os.fsync(handle)
            sync_parent(handle)


def fence_unsynced(directory: str | os.PathLike[str], attempt: int) -> None:
    """As fence(), but durable only once the directory and its parent directory are synced.

    The small parent syncs both before it starts a program, so this saves two syncs.
    """
    with lock_directory(directory) as handle:
        _set_attempt(handle, str(attempt))


def close_attempts(directory: str | os.PathLike[str]) -> None:
    """Close the operation: no attempt is current any more. Raises OSError.

    Does nothing if the directory does not exist: then the operation never ran a program.
    """
    with contextlib.suppress(FileNotFoundError), lock_directory(directory) as handle:
        if _set_attempt(handle, CLOSED):
            os.fsync(handle)


def _set_attempt(handle: int, text: str) -> bool:
    """Write *text* as the current attempt; False if it was already."""
    if read_attempt(handle) == text:
        return False
    replace_at(handle, ATTEMPT, text.encode() + b"\n")
    return True


@contextlib.contextmanager
def lock_directory(directory: str | os.PathLike[str]) -> Iterator[int]:
    """Open and lock *directory*; gives its descriptor. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)
