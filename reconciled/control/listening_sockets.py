"""Listening sockets at the configured addresses: kept ones where they fit, else new ones.

A kept socket is one that the service manager held over a restart. It fits when clients still reach
it: then no client is refused, neither before nor after the daemon has restarted.

1. The control socket has mode 0600 from the instant at which its file exists: the mode is set
   before bind(). Rejected: umask(), which threads share, and chmod() after bind().
2. A socket file that no process serves is replaced; a file that a process serves never is.
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

# The kernel's queue of connections while the daemon is busy or restarting.
BACKLOG = 1024
_CREDENTIALS = struct.Struct("3i")


@attrs.frozen
class Peer:
    """The process at the other end of a unix socket, as the kernel reports it."""

    pid: int
    uid: int


def peer_of(connection: socket.socket | trio.socket.SocketType) -> Peer:
    """The process that connected; on a client's socket, the process that called listen()."""
    size = _CREDENTIALS.size
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)


# -- the control socket ------------------------------------------------------------------------


def open_control(path: Path, kept: Sequence[socket.socket] = ()) -> socket.socket:
    """Listen at *path*: with the socket of *kept* that serves it, or a new one. Close the others.

    Raises ListenRefused.
    """
    try:
        fitting = next((each for each in kept if is_served_by(path, each)), None)
        for each in kept:
            if each is not fitting:
                each.close()
        return fitting or _bind(path)
    except OSError as error:
        message = f"cannot open the control socket {path}: {error.strerror or error}"
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
    """Remove a socket file that no process serves. Raises ListenRefused for any other."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise ListenRefused(
            f"cannot open the control socket {path}: the file is not a socket: remove it, or choose"
            " another path in control.socket"
        )
    try:
        server = _find_server(path)
    except BlockingIOError as error:
        raise _in_use_error(path, "a process that does not accept connections") from error
    # A socket in a descriptor store outlives the process that called listen(); nothing serves it.
    if server is not None and pid_exists(server.pid):
        raise _in_use_error(path, f"process {server.pid}")
    path.unlink(missing_ok=True)


def _in_use_error(path: Path, server: str) -> ListenRefused:
    return ListenRefused(
        f"cannot open the control socket {path}: {server} serves it: end that process, or choose "
        "another path in control.socket"
    )


def _find_server(path: Path) -> Peer | None:
    """The process that listens at *path*; None: none. Raises BlockingIOError: its queue is full."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(0)
        try:
            with address_of(path) as address:
                probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        return peer_of(probe)


def is_served_by(path: Path, kept: socket.socket) -> bool:
    """Whether a client that connects to *path* reaches *kept*.

    The name of *kept* is not enough: the file may belong to another socket by now. listen() makes
    this process the one that a client sees at the other end.
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
    fallback_only: bool = False  # only if no address before it could be opened

    def fits(self, kept: socket.socket) -> bool:
        """Whether *kept* listens here."""
        if kept.family != self.family or kept.getsockname()[:2] != (self.host, self.port):
            return False
        if self.family != socket.AF_INET6:
            return True
        only = kept.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        return bool(only) is not self.dual_stack


def open_http(host: str, port: int, kept: Sequence[socket.socket] = ()) -> list[socket.socket]:
    """Listen at *host* (empty: all addresses), with those of *kept* that fit. Close the others.

    Blocks during name resolution. Raises ListenRefused.
    """
    wanted = list(_addresses(host, port))
    fitting: dict[_Address, socket.socket] = {}
    for each in kept:
        fits = next((address for address in wanted if address.fits(each)), None)
        # Closed before anything is opened: it may occupy an address that is needed.
        if fits is None or fitting.setdefault(fits, each) is not each:
            each.close()
    opened: list[socket.socket] = []
    # A name may resolve to unusable addresses: localhost to an IPv6 one where there is no IPv6.
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
        raise ListenRefused(f"cannot listen on {host}:{port}: {host}: {why}") from error
    for family, _, _, _, address in dict.fromkeys(found):
        yield _Address(family, str(address[0]), port)


def _listen(address: _Address) -> socket.socket:
    opened = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Without it an address is blocked while connections of an earlier process are in
        # TIME_WAIT. An address on which another process listens still cannot be taken.
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
        errno.EADDRINUSE: "another process listens there: end it, or choose another port",
        errno.EADDRNOTAVAIL: "this machine does not have that address: choose one that it has",
        errno.EAFNOSUPPORT: "this machine does not support that kind of address: choose another",
        errno.EACCES: "permission denied: choose a port above 1023",
    }
    why = remedies.get(error.errno or 0, error.strerror or str(error))
    shown = f"[{host}]" if ":" in host else host
    return f"cannot listen on {shown}:{port}: {why}"
