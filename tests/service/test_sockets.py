"""Sockets passed by the manager: taken by name, each by one owner, and never inherited."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciled.service import sockets
from reconciled.service.sockets import InheritedSockets

# Instead of 3, which belongs to the test runner: beyond what a long run of tests has open, and
# below what every process may have.
BASE = 800


@pytest.fixture(autouse=True)
def descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], int]]:
    """Passes descriptors from number 3 on, as a manager does, and closes them afterwards."""
    monkeypatch.setattr(sockets, "LISTEN_FDS_START", BASE)
    count = 0

    def pass_down(fd: int) -> int:
        nonlocal count
        os.dup2(fd, BASE + count, inheritable=True)
        count += 1
        return BASE + count - 1

    yield pass_down
    for fd in range(BASE, BASE + count):
        try:
            os.close(fd)
        except OSError:
            continue


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def environment(count: int, names: str | None = None, pid: int | None = None) -> dict[str, str]:
    environ = {"LISTEN_PID": str(pid or os.getpid()), "LISTEN_FDS": str(count), "OTHER": "1"}
    return environ if names is None else environ | {"LISTEN_FDNAMES": names, "LISTEN_PIDFDID": "7"}


def test_sockets_are_taken_by_name(descriptors: Callable[[int], int]) -> None:
    """Sockets of one name are in their order; each is taken once."""
    with listening() as one, listening() as two, listening() as three:
        for each in (one, two, three):
            descriptors(each.fileno())
        inherited = InheritedSockets.from_environ(environment(3, "api:control:api"))
        first, second = inherited.take("api")
        assert [first.getsockname(), second.getsockname()] == [
            one.getsockname(),
            three.getsockname(),
        ]
        assert inherited.take("api") == []
        (control,) = inherited.take("control")
        assert control.getsockname() == two.getsockname()
        assert inherited.close_rest() == []
        for each in (first, second, control):
            assert each.gettimeout() == 0
            each.close()


def test_programs_inherit_neither_sockets_nor_variables(descriptors: Callable[[int], int]) -> None:
    """The variables are removed from the environment, and the descriptors close on exec."""
    environ = environment(1, "x")
    with listening() as one:
        fd = descriptors(one.fileno())
        assert os.get_inheritable(fd)
        inherited = InheritedSockets.from_environ(environ)
        assert not os.get_inheritable(fd)
        assert environ == {"OTHER": "1"}
        inherited.close_rest()


@pytest.mark.parametrize(
    "environ",
    [
        environment(1, "x", pid=1),
        environment(1, "x") | {"LISTEN_FDS": "-1"},
        environment(1, "x") | {"LISTEN_FDS": "many"},
        environment(1, "x") | {"LISTEN_FDS": "99999999"},
        environment(1, "x") | {"LISTEN_FDS": "00000099999999999"},
        environment(1, "x") | {"LISTEN_FDS": "9" * 5000},
        environment(1, "x") | {"LISTEN_FDS": "\u0661"},
        {"LISTEN_FDS": "1"},
        {},
    ],
)
def test_sockets_of_another_process_are_left_alone(
    descriptors: Callable[[int], int], environ: dict[str, str]
) -> None:
    """With another process's or malformed variables no descriptor is touched."""
    environ = dict(environ)
    with listening() as one:
        fd = descriptors(one.fileno())
        inherited = InheritedSockets.from_environ(environ)
        assert inherited.take("x") == []
        assert inherited.close_rest() == []
        assert os.get_inheritable(fd)
        assert environ.keys() <= {"OTHER"}


def test_unknown_sockets_are_closed_and_named(descriptors: Callable[[int], int]) -> None:
    """Sockets with unknown names, and those that do not listen, are closed and named once."""
    read, write = os.pipe()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams, socket.socket() as idle:
        fds = [descriptors(fd) for fd in (datagrams.fileno(), read, idle.fileno(), write)]
        inherited = InheritedSockets.from_environ(environment(5, "control:control:control:odd"))
        assert inherited.take("control") == []
        assert inherited.close_rest() == ["control", "odd"]
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
    os.close(read)
    os.close(write)


def test_sockets_without_names_are_unknown(descriptors: Callable[[int], int]) -> None:
    """Sockets that the manager passes without names are unknown, and closed."""
    with listening() as one:
        descriptors(one.fileno())
        assert InheritedSockets.from_environ(environment(1)).close_rest() == ["unknown"]


WRITTEN = st.one_of(
    st.integers(-2, 10**6).map(str),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
    st.binary().map(lambda data: data.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
    st.lists(st.sampled_from(["control", "kept-http", "", "\udcff", "a" * 300])).map(":".join),
)


@settings(deadline=None)
@given(count=WRITTEN, names=WRITTEN, ours=st.booleans(), kinds=st.lists(st.integers(0, 3)))
def test_any_variables_and_descriptors_are_accepted(
    count: str,
    names: str,
    ours: bool,  # noqa: FBT001 - drawn
    kinds: list[int],
) -> None:
    """Any variables and descriptors of any kind raise nothing and leave nothing open.

    Descriptors beyond the passed ones are never touched.
    """
    fds: list[int] = []
    with pytest.MonkeyPatch.context() as patched, contextlib.ExitStack() as closing:
        patched.setattr(sockets, "LISTEN_FDS_START", BASE)
        for position, kind in enumerate(kinds):
            opened = closing.enter_context(OPEN[kind]())
            os.dup2(opened.fileno(), BASE + position, inheritable=True)
            fds.append(BASE + position)
        environ = {"LISTEN_FDS": count, "LISTEN_FDNAMES": names, "LISTEN_PID": "1"}
        environ |= {"LISTEN_PID": str(os.getpid())} if ours else {}
        inherited = InheritedSockets.from_environ(environ)
        assert environ == {}
        held = [fd for found in inherited._descriptors.values() for fd in found]
        assert set(held) <= set(fds)
        assert len(held) == len(set(held))
        for name in list(inherited._descriptors):
            for each in inherited.take(name):
                assert each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                each.close()
        inherited.close_rest()
        for fd in fds:
            assert (fd in held) is not _is_open(fd)
            with contextlib.suppress(OSError):
                os.close(fd)


OPEN: list[Callable[[], Any]] = [
    listening,
    lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    lambda: open(os.devnull),  # noqa: PTH123, SIM115 - the caller closes it
    socket.socket,
]


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
