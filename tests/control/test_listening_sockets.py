"""Where listeners listen: the mode of the file, what is replaced and what is not, what is kept."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reconciled.control.client import send_request
from reconciled.control.listening_sockets import open_control, open_http, peer_of
from reconciled.control.protocol import ControlRequest
from reconciled.core.errors import ListenRefused, NoDaemon

# Listens at argv[1], hands its socket over descriptor 0, and ends or stays as argv[2] says.
LISTENS = """
import socket, sys
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1])
made.listen()
socket.send_fds(socket.socket(fileno=0), [b"x"], [made.fileno()])
if sys.argv[2] == "stay":
    sys.stdin.read()
"""


@contextlib.contextmanager
def other(path: Path, *, stays: bool = False) -> Iterator[socket.socket]:
    """What another process listens with at *path*; that has ended unless it *stays*."""
    mine, theirs = socket.socketpair()
    word = "stay" if stays else "end"
    process = subprocess.Popen([sys.executable, "-c", LISTENS, str(path), word], stdin=theirs)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(mine, 1, 1)
    try:
        if not stays:
            process.wait(20)
        with socket.socket(fileno=fds[0]) as handed:
            yield handed
    finally:
        mine.close()
        process.wait(20)


def connects(path: Path | str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
        return True


# -- the control socket ------------------------------------------------------------------------


def test_nobody_else_can_connect_from_the_first_instant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has mode 0600 as soon as it is there, whatever the umask lets through."""
    path, seen = tmp_path / "s", []
    real = socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        real(self, address)
        seen.append(stat.S_IMODE(path.stat().st_mode))

    monkeypatch.setattr(socket.socket, "bind", bind)
    umask = os.umask(0)
    try:
        open_control(path).close()
    finally:
        os.umask(umask)
    assert seen == [0o600]


def test_a_file_that_nobody_serves_is_replaced(tmp_path: Path) -> None:
    """What a daemon leaves that was killed keeps the next one from nothing."""
    path = tmp_path / "s"
    open_control(path).close()
    assert path.exists()
    with open_control(path):
        assert connects(path)


@pytest.mark.processes
def test_a_socket_that_somebody_serves_is_left(tmp_path: Path) -> None:
    """The path of a living server is refused, with its process and what to do."""
    path = tmp_path / "s"
    with other(path, stays=True):
        with pytest.raises(
            ListenRefused, match=r"process \d+ serves it: end that process, or choose"
        ):
            open_control(path)
        assert connects(path)


@pytest.mark.processes
def test_a_socket_whose_server_is_dead_is_replaced(tmp_path: Path) -> None:
    """A descriptor that only a store still holds is served by nobody: its path is free."""
    path = tmp_path / "s"
    with other(path) as stored:
        assert connects(path)  # although nobody would ever answer
        with open_control(path) as opened, socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            assert peer_of(client).pid == os.getpid()
            assert opened.fileno() != stored.fileno()


def test_something_else_at_the_path_is_left(tmp_path: Path) -> None:
    """A file that is no socket is never removed."""
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ListenRefused, match="the file is not a socket: remove it"):
        open_control(path)
    assert path.read_text() == "precious"


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    """A path that cannot be is named, with the reason."""
    with pytest.raises(
        ListenRefused, match=r"cannot open the control socket .*none/s: No such file or directory"
    ):
        open_control(tmp_path / "none/s")


def test_a_deep_path(tmp_path: Path) -> None:
    """A path that is longer than the kernel's addresses works, and is replaced and kept as others.

    A state directory may lie anywhere.
    """
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    open_control(deep / "s").close()
    opened = open_control(deep / "s")
    assert stat.S_IMODE((deep / "s").stat().st_mode) == 0o600
    assert open_control(deep / "s", [opened]) is opened
    opened.close()


@pytest.mark.processes
def test_a_kept_socket_is_served_again(tmp_path: Path) -> None:
    """A kept one to which the path leads is taken, with those who wait at it; others are closed."""
    path = tmp_path / "s"
    with (
        other(path) as kept,
        other(tmp_path / "else") as stray,
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(str(path))
        assert open_control(path, [stray, kept]) is kept
        assert stray.fileno() == -1
        waiting, _ = kept.accept()
        waiting.send(b"x")
        assert client.recv(1) == b"x"
        waiting.close()


@pytest.mark.processes
@pytest.mark.parametrize("lost", ["removed", "another's"])
def test_a_kept_socket_without_its_path(tmp_path: Path, lost: str) -> None:
    """Where the path is gone, or leads to another dead one, it is bound anew."""
    path = tmp_path / "s"
    with other(path) as kept:
        path.unlink()
        instead = other(path) if lost == "another's" else contextlib.nullcontext()
        with instead, open_control(path, [kept]) as opened:
            assert opened is not kept
            assert kept.fileno() == -1
            assert connects(path)


def test_a_kept_socket_that_is_full_is_known_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many wait at it that no probe gets in: it is served again all the same."""
    monkeypatch.setattr("reconciled.control.listening_sockets.BACKLOG", 0)
    path = tmp_path / "s"
    with open_control(path) as kept, contextlib.ExitStack() as clients:
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                client = clients.enter_context(socket.socket(socket.AF_UNIX))
                client.settimeout(0)
                client.connect(str(path))
            pytest.fail("it is not full")
        assert open_control(path, [kept]) is kept


# -- HTTP --------------------------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    """One that is free."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def close(*opened: socket.socket) -> None:
    for each in opened:
        each.close()


def test_a_port_in_use_is_refused(port: int) -> None:
    """Somebody else's port is never shared; it is named, and what to do."""
    with (
        socket.create_server(("127.0.0.1", port), reuse_port=True),
        pytest.raises(ListenRefused, match=f"cannot listen on 127.0.0.1:{port}: another process"),
    ):
        open_http("127.0.0.1", port)


def test_a_kept_one_that_fits_is_served_again(port: int) -> None:
    """The same address: the same socket. Another one: a new one, although the port is the same."""
    (kept,) = open_http("127.0.0.1", port)
    assert open_http("127.0.0.1", port, [kept]) == [kept]
    (everywhere,) = open_http("", port, [kept])  # which the old one would be in the way of
    assert kept.fileno() == -1
    close(everywhere)


def test_all_addresses_are_both_families(port: int) -> None:
    """An empty host takes IPv6 and IPv4 on one socket, and is kept as such alone."""
    (opened,) = open_http("", port)
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as client:
            client.connect((host, port))
    assert open_http("", port, [opened]) == [opened]
    (only6,) = open_http("::", port, [opened])
    assert opened.fileno() == -1
    assert only6.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    close(only6)


@pytest.mark.parametrize("number", [errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL])
def test_r06_without_ipv6(monkeypatch: pytest.MonkeyPatch, port: int, number: int) -> None:
    """R6: where IPv6 is off, all addresses and localhost are those of IPv4."""
    real = socket.socket.bind

    def bind(self: socket.socket, address: Any) -> None:
        if self.family == socket.AF_INET6:
            raise OSError(number, os.strerror(number))
        real(self, address)

    monkeypatch.setattr(socket.socket, "bind", bind)
    everyone = open_http("", port)
    assert [each.getsockname() for each in everyone] == [("0.0.0.0", port)]
    close(*everyone)
    local = open_http("localhost", port)
    assert [each.getsockname() for each in local] == [("127.0.0.1", port)]
    close(*local)
    with pytest.raises(ListenRefused, match=rf"cannot listen on \[::1\]:{port}"):
        open_http("::1", port)


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("192.0.2.1", "this machine does not have that address"),
        ("no-such-host.invalid", "no-such-host.invalid: "),
        ("x" * 80, "cannot listen on"),
    ],
)
def test_an_address_that_cannot_be(host: str, why: str, port: int) -> None:
    """A foreign address or a name that nobody knows is told, with what is wrong."""
    with pytest.raises(ListenRefused, match=why):
        open_http(host, port)


def test_a_failure_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Where the second address of a name is in use, the first is not listened on either."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [
            (socket.AF_INET, 0, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")
        ],
    )
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ListenRefused):
        open_http("twice", port)
    socket.create_server(("127.0.0.2", port)).close()


def test_a_socket_whose_queue_is_full_is_somebodys(tmp_path: Path) -> None:
    """Whoever has a server so busy that nobody gets to it is told that there is one."""
    path = tmp_path / "s"
    with open_control(path) as opened, socket.socket(socket.AF_UNIX) as waits:
        opened.listen(0)
        waits.connect(str(path))
        with pytest.raises(
            ListenRefused, match="a process that does not accept connections serves it"
        ):
            open_control(path)
        assert path.exists()


@pytest.mark.parametrize("name", ["x" * 150, "x" * 300])
def test_a_name_that_no_address_holds(tmp_path: Path, name: str) -> None:
    """A file name that is too long for a socket is told with the reason, on both sides."""
    with pytest.raises(ListenRefused, match="too long"):
        open_control(tmp_path / name)
    with pytest.raises(NoDaemon, match="too long"):
        send_request(tmp_path / name, ControlRequest("tell"))
