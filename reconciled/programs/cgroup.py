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

TYPE_CHECKING = False  # typing itself takes 4 ms
if TYPE_CHECKING:
    from collections.abc import Mapping

_OWN = Path("/proc/self/cgroup")
# The second where the machine keeps its controllers in version 1.
_MOUNTED = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))


def group_of_control_process(environ: Mapping[str, str]) -> Path | None:
    """The unit's group, for one of its control processes such as ``ExecStopPost=``; else None.

    Only a service manager sets $SERVICE_RESULT, and only for these.
    """
    return own_group() if "SERVICE_RESULT" in environ else None


def group_of_main_process(environ: Mapping[str, str]) -> Path | None:
    """The unit's group, for a process that the service manager itself has executed; else None.

    Whatever else it sets is inherited by everything below it, a runner of CI jobs included.
    """
    return own_group() if environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()) else None


def own_group() -> Path | None:
    """The group of the service that this process is in, whoever started it; else None."""
    try:
        text = _OWN.read_text()
    except OSError:
        return None
    place = _unit_of(text)
    for mounted in _MOUNTED if place else ():
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


def numbers_in(group: Path) -> list[int]:
    """The processes of *group* and below it, by number alone."""
    found: list[int] = []
    for file in sorted(group.rglob("cgroup.procs")):
        with contextlib.suppress(OSError):  # the group went meanwhile
            found += [int(line) for line in file.read_text().split()]
    return found
