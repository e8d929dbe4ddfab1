"""The control group of the unit that this process belongs to, and which numbers are in it.

1. Only a unit's own group counts, and only for a process that the service manager itself has
   started: in a shell, in a CI job, in a container the others are none of our business.
2. The group shows who is there and never who is critical: that is told by the records alone.
   So the unit needs no delegation, and the group stays read-only for it.
3. Nothing heavy is imported: that nobody is left is all that most stops have to find out. Who
   somebody is stands in ``members``.

Rejected: a group below the unit's for each operation. It would need ``Delegate=``, with it a
writable tree of groups inside the sandbox, and say nothing that the records do not say already.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
from collections.abc import Iterable, Iterator

from reconciled.pids import pid_exists
from reconciled.programs.processes import Process, find_process

_OWN_CGROUP = Path("/proc/self/cgroup")
# The second where the machine keeps its controllers in version 1.
_MOUNT_POINTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def cgroup_of_control_process(environ: Mapping[str, str]) -> Path | None:
    """The unit's group, for one of its control processes such as ``ExecStopPost=``; else None.

    Only a service manager sets $SERVICE_RESULT, and only for these.
    """
    return own_cgroup() if "SERVICE_RESULT" in environ else None


def cgroup_of_main_process(environ: Mapping[str, str]) -> Path | None:
    """The unit's group, for a process that the service manager itself has executed; else None.

    Whatever else it sets is inherited by everything below it, a runner of CI jobs included.
    """
    return own_cgroup() if environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) else None


def own_cgroup() -> Path | None:
    """The group of the service that this process is in, whoever started it; else None."""
    try:
        text = _OWN_CGROUP.read_text()
    except OSError:
        return None
    place = _unit_of(text)
    for mounted in _MOUNT_POINTS if place else ():
        if (mounted / "cgroup.procs").exists():
            group = mounted / place
            return group if (group / "cgroup.procs").exists() else None
    return None


def _unit_of(text: str) -> str:
    """The service's group in what /proc says of a process, without the first slash; or empty.

    With delegation there is a leaf in between: ``.control`` for control processes, or one of
    any name for the others. A scope or a slice of somebody's own manager is no such leaf.
    """
    for line in text.splitlines():
        number, _, path = line.split(":", 2)
        parts = path.strip("/").split("/")
        if number == "0" and ".." not in parts:
            if len(parts) > 1 and "." not in parts[-1].removeprefix("."):
                parts.pop()
            return "/".join(parts) if parts[-1].endswith(".service") else ""
    return ""


def pids_in(group: Path) -> list[int]:
    """The processes of *group* and below it, by number alone."""
    found: list[int] = []
    for file in sorted(group.rglob("cgroup.procs")):
        with contextlib.suppress(OSError):  # the group went meanwhile
            found += [int(line) for line in file.read_text().split()]
    return found


# -- Who is in a control group, and whose they are.


def members_of(group: Path) -> Iterator[Process]:
    """Who is in *group* or below it, without this process and those above it."""
    above = set(self_and_ancestors(os.getpid()))
    for pid in pids_in(group):
        process = None if pid in above else find_process(pid)
        if process is not None:
            yield process


def hidden_in(group: Path) -> list[int]:
    """Numbers of members of *group* that cannot be looked at, which says nothing good or bad.

    The sandbox may hide processes that run with other rights, be it in another user namespace.
    """
    return [pid for pid in pids_in(group) if find_process(pid) is None and pid_exists(pid)]


def is_hidden(pid: int) -> bool:
    """Whether *pid* is a process of our own group that cannot be looked at."""
    if find_process(pid) is not None or not pid_exists(pid):
        return False
    group = own_cgroup()
    return group is not None and pid in pids_in(group)


def belongs_to(process: Process, pids: Iterable[int]) -> bool:
    """Whether *process* is, descends from, or is in the process group of one of *spared*."""
    known = set(pids)
    return process.group in known or not known.isdisjoint(self_and_ancestors(process.pid))


def self_and_ancestors(pid: int) -> Iterator[int]:
    """*pid*, its parent, and so on."""
    while pid > 0:
        yield pid
        process = find_process(pid)
        pid = 0 if process is None else process.parent
