"""Listening sockets at the addresses of the configuration: kept ones where they fit, else new.

A kept socket is one that the service manager held over a restart. It fits when clients still get
to it: nobody is refused then, neither before nor after the daemon is back.

1. The control socket has mode 0600 from the instant at which its file exists: the mode is that
   of the socket before it is bound. Rejected: umask(), which threads share, and chmod() after it.
2. A file that nobody serves any more is replaced; one that somebody serves never is.
3. All or nothing: a failure leaves no new socket open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import trio

from reconciled.control.protocol import address_of
from reconciled.core.errors import ListenRefused
from reconciled.pids import pid_exists

# Who connects while the daemon is busy or away waits here.
BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


@attrs.frozen
class Peer:
    """The process at the other end of a unix socket, as the kernel knows it."""

    pid: int
    uid: int


def peer_of(connection: socket.socket | trio.socket.SocketType) -> Peer:
    """Who connected; on the side of a client, who listens."""
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


# -- the control socket ------------------------------------------------------------------------


def open_control(path: Path, kept: Sequence[socket.socket] = ()) -> socket.socket:
    """Listen at *path*: with that of *kept* to which it leads, or anew. The others are closed.

    Raises ListenRefused.
    """
    try:
        fitting = next((each for each in kept if is_served_by(path, each)), None)
        for each in kept:
            if each is not fitting:
                each.close()
        return fitting or _bind(path)
    except OSError as error:
        message = f"the control socket {path} cannot be opened: {error.strerror or error}"
        raise ListenRefused(message) from error


def _bind(path: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        os.fchmod(opened.fileno(), 0o600)
        with address_of(path) as address:
            try:
                opened.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                _remove_stale_socket(path)
                opened.bind(address)
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def _remove_stale_socket(path: Path) -> None:
    """Remove the file of a socket that nobody serves. Raises ListenRefused for any other."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ListenRefused(
            f"the control socket {path} cannot be opened: something else is there: remove it, or "
            "choose another path in control.socket"
        )
    try:
        server = _find_server(path)
    except BlockingIOError as error:
        who = "a process that does not take its connections"
        raise _in_use_error(path, who) from error
    # A socket in a descriptor store outlives the process that called listen(); nothing serves it.
    if server is not None and pid_exists(server.pid):
        raise _in_use_error(path, f"process {server.pid}")
    path.unlink(missing_ok=True)


def _in_use_error(path: Path, who: str) -> ListenRefused:
    return ListenRefused(
        f"the control socket {path} cannot be opened: {who} serves it: end that, or choose another "
        "path in control.socket"
    )


def _find_server(path: Path) -> Peer | None:
    """Who listens at *path*; None: nobody. Raises BlockingIOError where too many wait there."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(0)
        try:
            with address_of(path) as address:
                probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        return peer_of(probe)


def is_served_by(path: Path, kept: socket.socket) -> bool:
    """Whether who connects to *path* gets to *kept*.

    Its name alone does not tell: the file may be another's by now. listen() makes this process
    the one that a client sees at the other end.
    """
    if kept.family != socket.AF_UNIX:
        return False
    kept.listen(BACKLOG)
    try:
        server = _find_server(path)
    except BlockingIOError:
        return bool(kept.getsockname() == str(path))
    except OSError:
        return False
    return server is not None and server.pid == os.getpid()


# -- HTTP --------------------------------------------------------------------------------------


@attrs.frozen
class _Address:
    family: int
    host: str
    port: int
    dual_stack: bool = False  # an IPv6 socket that takes IPv4 as well
    fallback_only: bool = False  # only where none before it could be opened

    def fits(self, kept: socket.socket) -> bool:
        """Whether *kept* listens here."""
        if kept.family != self.family or kept.getsockname()[:2] != (self.host, self.port):
            return False
        if self.family != socket.AF_INET6:
            return True
        only = kept.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return bool(only) is not self.dual_stack


def open_http(host: str, port: int, kept: Sequence[socket.socket] = ()) -> list[socket.socket]:
    """Listen at *host* (empty: everywhere), with those of *kept* that fit. The others are closed.

    Blocks while a name is looked up. Raises ListenRefused.
    """
    wanted = list(_addresses(host, port))
    fitting: dict[_Address, socket.socket] = {}
    for each in kept:
        place = next((address for address in wanted if address.fits(each)), None)
        # Closed before anything is opened, which it may be in the way of.
        if place is None or fitting.setdefault(place, each) is not each:
            each.close()
    opened: list[socket.socket] = []
    # Names differ from machine to machine: localhost has an IPv6 address where there is no IPv6.
    missing: OSError | None = None
    with contextlib.ExitStack() as undo:
        for address in wanted:
            if address.fallback_only and opened:
                continue
            try:
                new = fitting.get(address) or _listen(address)
            except OSError as error:
                if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    raise ListenRefused(_listen_error(host, port, error)) from error
                missing = error
            else:
                opened.append(undo.enter_context(new))
        if not opened:
            assert missing is not None
            raise ListenRefused(_listen_error(host, port, missing)) from missing
        undo.pop_all()
    return opened


def _addresses(host: str, port: int) -> Iterator[_Address]:
    if not host:
        yield _Address(socket.AF_INET6, "::", port, dual_stack=True)
        yield _Address(socket.AF_INET, "0.0.0.0", port, fallback_only=True)  # noqa: S104 - as the configuration asks
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ListenRefused(f"{host}:{port} cannot be listened on: {host}: {why}") from error
    for family, _, _, _, address in dict.fromkeys(found):
        yield _Address(family, str(address[0]), port)


def _listen(address: _Address) -> socket.socket:
    opened = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # An address is free again at once, although connections of an earlier life wait for their
        # end; it still cannot be taken from somebody who listens.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not address.dual_stack)
        opened.bind((address.host, address.port))
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def _listen_error(host: str, port: int, error: OSError) -> str:
    remedies = {
        errno.EADDRINUSE: "something listens there already: end that, or choose another port",
        errno.EADDRNOTAVAIL: "this machine has no such address: choose one of its own",
        errno.EAFNOSUPPORT: "this machine has no addresses of that kind: choose another",
        errno.EACCES: "it may not be used: choose a port above 1023",
    }
    why = remedies.get(error.errno or 0, error.strerror or str(error))
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{port} cannot be listened on: {why}"
