"""Reads files that decide what runs: whole, bounded, and only if no other user can write them.

A user who can write the configuration or a plugin can run programs as the daemon. For a symbolic
link its target is checked, since a mounted configuration consists of links.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from reconciled.config.yaml.encoding import MAX_BYTES

_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def untrusted_reason(path: Path, status: os.stat_result) -> str | None:
    """Why *path*, which has *status*, must not be used; None: it may be used."""
    if not status.st_mode & _OTHERS:
        return None
    who = "all users" if status.st_mode & stat.S_IWOTH else "its group"
    return f"can be written by {who}: chmod go-w {shlex.quote(str(path))}"


def read_trusted(path: Path) -> bytes:
    """The content of *path*, cut after MAX_BYTES + 1.

    Raises ValueError if another user can write it or it is not a regular file, and OSError.
    """
    # Without blocking: opening a FIFO that has no writer would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        # Of the open descriptor: the path may name another file by then.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file")
        reason = untrusted_reason(path, status)
        if reason is not None:
            raise ValueError(reason)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
