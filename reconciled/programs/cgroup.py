"""The control group of this process's unit, and the processes in it.

1. Only a unit's own group counts, and only in a process that the service manager executed. In a
   shell, a CI job or a container the other processes of the group are unrelated to the daemon.
2. The group shows which processes exist, never which are critical: the operations' records show
   that. So the unit needs no delegation, and the group stays read-only.
3. This module imports nothing heavy: most runs of ``reconciled reap`` only check that the group
   is empty.

Rejected: a group below the unit's for each operation. It would need ``Delegate=``, and with it a
writable tree of groups inside the sandbox, and would show nothing that the records do not.
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
# The second path is used on machines that keep their controllers in version 1.
_MOUNT_POINTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def cgroup_of_control_process(environ: Mapping[str, str]) -> Path | None:
    """The unit's group if this is one of its control processes (``ExecStopPost=``), else None.

    Only a service manager sets $SERVICE_RESULT, and only for control processes.
    """
    return own_cgroup() if "SERVICE_RESULT" in environ else None


def cgroup_of_main_process(environ: Mapping[str, str]) -> Path | None:
    """The unit's group if the service manager executed this process itself, else None.

    $SYSTEMD_EXEC_PID is checked, because other variables of the manager are inherited: a CI
    runner that is a service passes them to every job.
    """
    return own_cgroup() if environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) else None


def own_cgroup() -> Path | None:
    """The group of the service that this process is in, however it was started; else None."""
    try:
        text = _OWN_CGROUP.read_text()
    except OSError:
        return None
    path = _service_group(text)
    for mounted in _MOUNT_POINTS if path else ():
        if (mounted / "cgroup.procs").exists():
            group = mounted / path
            return group if (group / "cgroup.procs").exists() else None
    return None


def _service_group(text: str) -> str:
    """The service's group in *text* from /proc/PID/cgroup, without the first slash; or empty.

    With delegation the process is in a leaf below it: ``.control`` for control processes, or one
    of any name for the others. A scope or slice of a user's own manager is not such a leaf.
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
    """The pids in *group* and below it."""
    found: list[int] = []
    for file in sorted(group.rglob("cgroup.procs")):
        with contextlib.suppress(OSError):  # the group was removed meanwhile
            found += [int(line) for line in file.read_text().split()]
    return found


def members_of(group: Path) -> Iterator[Process]:
    """The processes in *group* and below it, except this process and its ancestors."""
    above = set(self_and_ancestors(os.getpid()))
    for pid in pids_in(group):
        process = None if pid in above else find_process(pid)
        if process is not None:
            yield process


def hidden_in(group: Path) -> list[int]:
    """Pids in *group* whose /proc entries the sandbox hides; they may be any process.

    The sandbox can hide processes with other privileges or of another user namespace.
    """
    return [pid for pid in pids_in(group) if find_process(pid) is None and pid_exists(pid)]


def is_hidden(pid: int) -> bool:
    """Whether *pid* is a process of this unit's group whose /proc entry the sandbox hides."""
    if find_process(pid) is not None or not pid_exists(pid):
        return False
    group = own_cgroup()
    return group is not None and pid in pids_in(group)


def belongs_to(process: Process, pids: Iterable[int]) -> bool:
    """Whether *process* is, descends from, or is in the process group of one of *pids*."""
    known = set(pids)
    return process.group in known or not known.isdisjoint(self_and_ancestors(process.pid))


def self_and_ancestors(pid: int) -> Iterator[int]:
    """*pid*, its parent, and so on up to PID 1."""
    while pid > 0:
        yield pid
        process = find_process(pid)
        pid = 0 if process is None else process.parent
