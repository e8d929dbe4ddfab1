"""Who is in a control group, and whose they are.

A member is looked at by number and start time, and signalled through a descriptor. One that cannot
be looked at is neither there nor gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from reconciled.programs.cgroup import numbers_in, own_group
from reconciled.programs.processes import Process, look_up


def members_of(group: Path) -> Iterator[Process]:
    """Who is in *group* or below it, without this process and those above it."""
    above = set(line_of(os.getpid()))
    for pid in numbers_in(group):
        process = None if pid in above else look_up(pid)
        if process is not None:
            yield process


def hidden_in(group: Path) -> list[int]:
    """Numbers of members of *group* that cannot be looked at, which says nothing good or bad.

    The sandbox may hide processes that run with other rights, be it in another user namespace.
    """
    return [pid for pid in numbers_in(group) if look_up(pid) is None and _exists(pid)]


def is_hidden(pid: int) -> bool:
    """Whether *pid* is a process of our own group that cannot be looked at."""
    if look_up(pid) is not None or not _exists(pid):
        return False
    group = own_group()
    return group is not None and pid in numbers_in(group)


def _exists(pid: int) -> bool:
    """Whether there is such a process, seen or not; cheaper than to read a group."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def belongs(process: Process, spared: Iterable[int]) -> bool:
    """Whether *process* is, descends from, or is in the process group of one of *spared*."""
    known = set(spared)
    return process.group in known or not known.isdisjoint(line_of(process.pid))


def line_of(pid: int) -> Iterator[int]:
    """*pid*, its parent, and so on."""
    while pid > 0:
        yield pid
        process = look_up(pid)
        pid = 0 if process is None else process.parent
