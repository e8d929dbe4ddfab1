"""Processes as /proc shows them, and the kernel's rule which process adopts orphans.

1. The kernel reuses pids: code that keeps a pid keeps the start time beside it.
2. Each function is synchronous. A process that ends while it is read counts as absent.

``ctypes`` is imported only where it is used: it takes 5 ms, and ``reconciled reap`` needs /proc
alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

_PROC = Path("/proc")
_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_GET_CHILD_SUBREAPER = 37


@attrs.frozen
class Process:
    """One process, as it was when /proc was read."""

    pid: int
    parent: int
    group: int
    session: int
    state: str  # one letter, as in proc(5): R, S, D, Z …
    started: int  # clock ticks after boot; identifies the process together with the pid
    name: str  # of its executable, at most 15 bytes; arguments are not read: they may hold secrets

    @property
    def alive(self) -> bool:
        """False for a zombie: it has ended and executes nothing."""
        return self.state not in "ZX"


def find_process(pid: int) -> Process | None:
    """The process *pid*; None if it does not exist or is hidden from this process."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name is in parentheses and may contain any byte, parentheses included.
    head, _, tail = text.rpartition(b")")
    fields = tail.split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        state=fields[0].decode(),
        started=int(fields[19]),
        name=head.partition(b"(")[2].decode(errors="replace"),
    )


def children_of(pid: int) -> Iterator[Process]:
    """The children of *pid*, zombies included.

    Reads the lists of its threads, because a pass over the whole of /proc costs 15 µs for each
    process of the machine.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for thread in os.listdir(_PROC / str(pid) / "task"):  # noqa: PTH208 names are all we need
            yield from _children_of_thread(pid, thread)


def _children_of_thread(pid: int, thread: str) -> Iterator[Process]:
    # A thread may end between the listing and the read: another thread then has its children.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for child in (_PROC / str(pid) / "task" / thread / "children").read_bytes().split():
            process = find_process(int(child))
            if process is not None:
                yield process


def descendants_of(pid: int) -> Iterator[Process]:
    """All descendants of *pid*, parents before their children, zombies included."""
    waiting = [pid]
    seen = {pid}
    while waiting:
        for process in children_of(waiting.pop()):
            # A process that changes parents during the walk would otherwise be listed twice.
            if process.pid not in seen:
                seen.add(process.pid)
                waiting.append(process.pid)
                yield process


def all_processes() -> Iterator[Process]:
    """Every process that is not hidden from this one."""
    for name in os.listdir(_PROC):  # noqa: PTH208 names are all we need
        if name.isdigit():
            process = find_process(int(name))
            if process is not None:
                yield process


def set_child_subreaper() -> None:
    """Make this process the new parent of orphans below it, in place of PID 1. Raises OSError."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def is_child_subreaper() -> bool:
    """Whether this process becomes the parent of orphans below it. Raises OSError."""
    if os.getpid() == 1:
        return True
    import ctypes

    answer = ctypes.c_int()
    _prctl(_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def _prctl(option: int, argument: Any) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
