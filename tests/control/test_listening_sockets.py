"""Opening listeners: file mode, which sockets are replaced, refused or kept, and errors."""

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

# Listens at argv[1], sends its socket over descriptor 0, and ends or keeps running (argv[2]).
LISTENS = """
import socket, sys
made = socket.socket(socket.AF_UNIX)
made.bind(sys.argv[1])
made.listen()
socket.send_fds(socket.socket(fileno=0), [b"x"], [made.fileno()])
if sys.argv[2] == "run":
    sys.stdin.read()
"""


@contextlib.contextmanager
def other(path: Path, *, runs: bool = False) -> Iterator[socket.socket]:
    """The listener of another process at *path*; the process has ended unless it *runs*."""
    mine, theirs = socket.socketpair()
    mode = "run" if runs else "end"
    process = subprocess.Popen([sys.executable, "-c", LISTENS, str(path), mode], stdin=theirs)
    theirs.close()
    _, fds, _, _ = socket.recv_fds(mine, 1, 1)
    try:
        if not runs:
            process.wait(20)
        with socket.socket(fileno=fds[0]) as received:
            yield received
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


def test_the_file_is_private_from_its_creation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has mode 0600 as soon as it exists, for any umask."""
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


def test_an_unserved_file_is_replaced(tmp_path: Path) -> None:
    """The socket file of a killed daemon is replaced by the next one."""
    path = tmp_path / "s"
    open_control(path).close()
    assert path.exists()
    with open_control(path):
        assert connects(path)


@pytest.mark.processes
def test_a_served_socket_is_refused(tmp_path: Path) -> None:
    """The path of a running server is refused, with its pid and the remedy."""
    path = tmp_path / "s"
    with other(path, runs=True):
        with pytest.raises(
            ListenRefused, match=r"process \d+ serves it: end that process, or choose"
        ):
            open_control(path)
        assert connects(path)


@pytest.mark.processes
def test_a_socket_whose_server_has_ended_is_replaced(tmp_path: Path) -> None:
    """A listener that is only kept in a descriptor store is unserved: its path is replaced."""
    path = tmp_path / "s"
    with other(path) as stored:
        assert connects(path)  # although no process accepts
        with open_control(path) as opened, socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            assert peer_of(client).pid == os.getpid()
            assert opened.fileno() != stored.fileno()


def test_another_file_at_the_path_is_refused(tmp_path: Path) -> None:
    """A file that is not a socket is never removed."""
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ListenRefused, match="the file is not a socket: remove it"):
        open_control(path)
    assert path.read_text() == "precious"


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    """A path in a missing directory is an error with path and reason."""
    with pytest.raises(
        ListenRefused, match=r"cannot open the control socket .*none/s: No such file or directory"
    ):
        open_control(tmp_path / "none/s")


def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    """A path longer than a socket address is opened, replaced and kept like others.

    A state directory may have any path.
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
    """The kept socket at the path is reused, with its waiting connections; others are closed."""
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
def test_a_kept_socket_without_its_file_is_replaced(tmp_path: Path, lost: str) -> None:
    """If its file was removed, or belongs to another unserved socket, a new socket is bound."""
    path = tmp_path / "s"
    with other(path) as kept:
        path.unlink()
        instead = other(path) if lost == "another's" else contextlib.nullcontext()
        with instead, open_control(path, [kept]) as opened:
            assert opened is not kept
            assert kept.fileno() == -1
            assert connects(path)


def test_a_kept_socket_with_a_full_queue_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept socket is reused although its queue is full, so that no probe can connect."""
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
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def close(*opened: socket.socket) -> None:
    for each in opened:
        each.close()


def test_a_port_in_use_is_refused(port: int) -> None:
    """A port that another process uses is never shared; the error names it and the remedy."""
    with (
        socket.create_server(("127.0.0.1", port), reuse_port=True),
        pytest.raises(ListenRefused, match=f"cannot listen on 127.0.0.1:{port}: another process"),
    ):
        open_http("127.0.0.1", port)


def test_a_kept_http_socket_is_reused_for_its_address(port: int) -> None:
    """A kept socket is reused for its own address; another address on its port gets a new one."""
    (kept,) = open_http("127.0.0.1", port)
    assert open_http("127.0.0.1", port, [kept]) == [kept]
    (everywhere,) = open_http("", port, [kept])  # with the old one open, bind() would fail
    assert kept.fileno() == -1
    close(everywhere)


def test_all_addresses_are_both_families(port: int) -> None:
    """An empty host listens on IPv6 and IPv4 with one socket, reused only for an empty host."""
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
    """R6: without IPv6, an empty host and localhost listen on IPv4 only."""
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
def test_an_unusable_address_is_an_error(host: str, why: str, port: int) -> None:
    """An address of another machine or an unknown name is an error with a reason."""
    with pytest.raises(ListenRefused, match=why):
        open_http(host, port)


def test_a_failure_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """If the second address of a name is in use, the first one is closed."""
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


def test_a_socket_with_a_full_queue_is_refused(tmp_path: Path) -> None:
    """A socket whose queue is full belongs to a running server, and is refused."""
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
def test_a_file_name_longer_than_an_address(tmp_path: Path, name: str) -> None:
    """A file name that is too long for a socket address is an error of server and client."""
    with pytest.raises(ListenRefused, match="too long"):
        open_control(tmp_path / name)
    with pytest.raises(NoDaemon, match="too long"):
        send_request(tmp_path / name, ControlRequest("tell"))
