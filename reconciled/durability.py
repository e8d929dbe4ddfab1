"""Durable writes: a file is replaced whole, and a power cut leaves the old or the new one.

Every file of the daemon that is not in the store is written by replace() or replace_at(). There
are two other implementations: the small parent above a program has one, since it imports
nothing of the package, and ``files`` has one that also keeps owners and attributes of
third-party files.

Each call blocks for a sync, milliseconds and on a busy disk seconds: in the loop, call it in a
thread. This module imports only what ``reconciled step`` can afford.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


def sync(path: Path) -> None:
    """Sync *path*, a file or a directory: durable when this returns. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(path: Path, data: bytes) -> None:
    """Replace the file *path* with *data*, mode 0600; durable when this returns.

    Raises OSError: then *path* is unchanged, or holds all of *data* where only the sync of the
    directory failed.
    """
    # The loop and the last resort may both write, and so may two verbs at once: each writer has
    # a temporary file of its own until the rename.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        _write(os.open(temporary, _OPEN_NEW, 0o600), data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def replace_at(directory: int, name: str, data: bytes) -> None:
    """Replace the file *name* in the open *directory*, which the caller has locked and syncs.

    Raises OSError: then *name* is unchanged.
    """
    temporary = f".{name}.ours"
    _write(os.open(temporary, _OPEN_NEW, 0o600, dir_fd=directory), data)
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def sync_parent(directory: int) -> None:
    """Sync the parent of the open *directory*, whose entry there may be new."""
    above = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def _write(handle: int, data: bytes) -> None:
    try:
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)
