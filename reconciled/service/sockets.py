"""Sockets that the service manager passes to a process at its start, sd_listen_fds(3).

Sockets of a ``.socket`` unit and sockets from the descriptor store arrive in the same way,
distinguished by their names alone. So stored sockets have other names than activated ones.

1. The variables are removed from the environment as they are read, and the descriptors are not
   inheritable: a program of the daemon that had them would keep an address in use after the
   daemon's end.
2. Every descriptor gets one owner: the caller of take(), or close_rest() closes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from collections.abc import MutableMapping

import attrs

# The first passed descriptor, by convention.
LISTEN_FDS_START = 3
# More than a manager stores for a unit; a larger number was not written by one.
MAX_FDS = 4096
VARIABLES = ("LISTEN_PID", "LISTEN_PIDFDID", "LISTEN_FDS", "LISTEN_FDNAMES")


@attrs.define(eq=False)
class InheritedSockets:
    """The passed descriptors that are not taken yet, by name; a name may have several."""

    _descriptors: dict[str, list[int]] = attrs.field(factory=dict)

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> InheritedSockets:
        """Remove the variables from *environ*; empty where they are for another process.

        Call it before anything is opened or spawned: the descriptors are known by number only.
        """
        pid, _, count, names = (environ.pop(name, "") for name in VARIABLES)
        if pid != str(os.getpid()):
            return cls()
        inherited, given = cls(), names.split(":") if names else []
        for position in range(_number(count)):
            # The name that sd_listen_fds_with_names(3) gives to an unnamed one.
            name = given[position] if position < len(given) else "unknown"
            try:
                fcntl.fcntl(LISTEN_FDS_START + position, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
            except OSError:
                continue  # closed by the process that started this one
            inherited._descriptors.setdefault(name, []).append(LISTEN_FDS_START + position)
        return inherited

    def take(self, name: str) -> list[socket.socket]:
        """The listening stream sockets called *name*; others of that name are left."""
        found = self._descriptors.get(name, [])
        listening = [fd for fd in found if _is_listening_stream(fd)]
        self._descriptors[name] = [fd for fd in found if fd not in listening]
        taken = [socket.socket(fileno=fd) for fd in listening]
        for each in taken:
            each.settimeout(0)
        return taken

    def close_rest(self) -> list[str]:
        """Close what was not taken; return the names, sorted."""
        left = {name: fds for name, fds in self._descriptors.items() if fds}
        self._descriptors.clear()
        for fds in left.values():
            for fd in fds:
                os.close(fd)
        return sorted(left)


def _number(written: str) -> int:
    """The count of LISTEN_FDS; 0 where it is invalid."""
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
