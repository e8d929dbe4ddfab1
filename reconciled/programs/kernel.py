"""Calls of the Linux kernel that the standard library lacks, each as one function.

Synchronous; an error of the kernel is an OSError.
"""

from __future__ import annotations

import ctypes
import os

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_GET_CHILD_SUBREAPER = 37
_KEEP_SIZE = 0x01  # linux/falloc.h
_PUNCH_HOLE = 0x02


def set_child_subreaper() -> None:
    """Let processes below this one fall to it, not to PID 1, when their parents end."""
    _check(_libc().prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def is_child_subreaper() -> bool:
    """Whether orphans below this process fall to it."""
    if os.getpid() == 1:
        return True
    answer = ctypes.c_int()
    _check(_libc().prctl(_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0))
    return bool(answer.value)


def punch_hole(file: int, offset: int, length: int) -> None:
    """Give a part of *file* back to the file system; it reads as zeros, nothing moves."""
    libc = _libc()
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    _check(libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, offset, length))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
