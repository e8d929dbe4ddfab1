"""Sockets that the service manager hands to a process at its start, sd_listen_fds(3).

Those of a ``.socket`` unit and those from the descriptor store come in the same way, told apart
by their names alone. So what the daemon has stored carries other names than what is activated.

1. The variables leave the environment as they are read, and the descriptors are not inherited:
   a program of ours that had them would keep an address taken after the daemon's end.
2. Every descriptor has one owner in the end: whoever takes it by its name, or close_rest().
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import MutableMapping

import attrs

# The first descriptor that is handed down, by convention.
LISTEN_FDS_START = 3
# More than a manager keeps for anybody; what is above is no number that it wrote.
MAX_FDS = 4096
VARIABLES = ("LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES")


@attrs.define(eq=False)
class InheritedSockets:
    """What was handed down and is not taken yet: descriptors by name, several of one name too."""

    _descriptors: dict[str, list[int]] = attrs.field(factory=dict)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> InheritedSockets:
        """Take the variables out of *environ*; empty where they are meant for another process.

        Call it before anything is opened or spawned: the numbers are what is known.
        """
        pid, _, count, names = (environ.pop(name, "") for name in VARIABLES)
        if pid != str(os.getpid()):
            return cls()
        inherited, given = cls(), names.split(":") if names else []
        for position in range(_number(count)):
            # As sd_listen_fds_with_names(3) calls what has no name.
            name = given[position] if position < len(given) else "unknown"
            try:
                fcntl.fcntl(LISTEN_FDS_START + position, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            except OSError:
                continue  # closed by whoever started us
            inherited._descriptors.setdefault(name, []).append(LISTEN_FDS_START + position)
        return inherited

    def take(self, name: str) -> list[socket.socket]:
        """The listening stream sockets called *name*; whatever else is called so is left."""
        found = self._descriptors.get(name, [])
        mine = [fd for fd in found if _is_listening_stream(fd)]
        self._descriptors[name] = [fd for fd in found if fd not in mine]
        taken = [socket.socket(fileno=fd) for fd in mine]
        for each in taken:
            each.settimeout(0)
        return taken

    def close_rest(self) -> list[str]:
        """Close what nobody took; the names of that, sorted."""
        left = {name: fds for name, fds in self._descriptors.items() if fds}
        self._descriptors.clear()
        for fds in left.values():
            for fd in fds:
                os.close(fd)
        return sorted(left)


def _number(written: str) -> int:
    """How many were handed down; 0 for what no manager writes."""
    number = int(written) if re.fullmatch("[0-9]{1,4}", written) else 0
    return number if number <= MAX_FDS else 0


def _is_listening_stream(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        peek = socket.socket(fileno=fd)
    except OSError:
        return False
    try:
        return peek.type == socket.SOCK_STREAM and bool(
            peek.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        )
    finally:
        peek.detach()
