"""The daemon's listeners: what is kept over a restart, and what a reload or an end changes."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import structlog
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import WholeDaemon

from reconciled.api import Result, done
from reconciled.config.model import Config, HttpConfig
from reconciled.control.listening_sockets import Peer, open_control
from reconciled.control.protocol import ControlReply
from reconciled.core.errors import ListenRefused
from reconciled.runtime.daemon import reload
from reconciled.runtime.daemon.control_verbs import ControlVerbs
from reconciled.runtime.host import listeners
from reconciled.runtime.host.listeners import Listeners
from reconciled.service.notify import Notifier
from reconciled.service.sockets import InheritedSockets


def free() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


async def get(port: int, target: str = "/livez") -> str | None:
    """The whole reply; None: nothing listens."""
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
    except OSError:
        return None
    async with stream:
        await stream.send_all(f"GET {target} HTTP/1.0\r\n\r\n".encode())
        return b"".join([part async for part in stream]).decode()


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


# -- at the start ------------------------------------------------------------------------------


@attrs.define
class RecordingManager:
    """In place of the service manager: messages() gives what was received since the last call."""

    heard: socket.socket
    notifier: Notifier

    def messages(self) -> list[str]:
        """Verb, name and number of descriptors of each message."""
        found = []
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(self.heard, 4096, 4)
                for fd in fds:
                    socket.socket(fileno=fd).close()
                words = dict(line.split("=") for line in data.decode().splitlines())
                verb = "store" if "FDSTORE" in words else "remove"
                found.append(f"{verb} {words['FDNAME']} {len(fds)}")
        except BlockingIOError:
            return found

    def stored(self) -> list[str]:
        """The same, without removals."""
        return [each for each in self.messages() if each.startswith("store")]


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[RecordingManager]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(0)
        notifier = Notifier.from_environ({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        yield RecordingManager(heard, notifier)
        assert notifier._socket is not None
        notifier._socket.close()


def config(tmp_path: Path, http: str | None = None) -> Config:
    listen = HttpConfig(http) if http else None
    return Config(tmp_path, {}, tmp_path / "s", http=listen)


def pass_sockets(**sockets: list[socket.socket]) -> InheritedSockets:
    """Sockets passed by a manager: duplicates, because it keeps its own."""
    names = {name.replace("_", "-"): found for name, found in sockets.items()}
    return InheritedSockets({name: [each.dup().detach() for each in names[name]] for name in names})


def test_the_manager_keeps_both_listeners(tmp_path: Path, manager: RecordingManager) -> None:
    """Both listeners are stored under their own names, and the file of the socket is kept."""
    port = free()
    with structlog.testing.capture_logs() as log:
        ours = Listeners.open(
            config(tmp_path, f"127.0.0.1:{port}"),
            InheritedSockets(),
            manager.notifier,
            structlog.get_logger(),
        )
    assert [(line["at"], line["kept"]) for line in log] == [
        (str(tmp_path / "s"), False),
        (f"127.0.0.1:{port}", False),
    ]
    assert manager.stored() == [
        "store kept-control 1",
        "store kept-http 1",
    ]
    ours.close()
    assert (tmp_path / "s").exists()


def test_without_a_manager_nothing_is_kept(tmp_path: Path) -> None:
    """Without a manager, close() removes the file of the socket."""
    ours = Listeners.open(config(tmp_path), InheritedSockets(), Notifier(), structlog.get_logger())
    assert (tmp_path / "s").exists()
    ours.close()
    assert not (tmp_path / "s").exists()


def test_kept_sockets_are_served_again(tmp_path: Path, manager: RecordingManager) -> None:
    """The next start serves both, and sockets that it does not use are kept no longer."""
    port = free()
    before = Listeners.open(
        config(tmp_path, f"127.0.0.1:{port}"),
        InheritedSockets(),
        manager.notifier,
        structlog.get_logger(),
    )
    manager.messages()
    with structlog.testing.capture_logs() as log:
        again = Listeners.open(
            config(tmp_path, f"127.0.0.1:{port}"),
            pass_sockets(kept_control=before._control, kept_http=before._http, odd=before._http),
            manager.notifier,
            structlog.get_logger(),
        )
    assert [line["kept"] for line in log if line["event"] == "listener.opened"] == [True, True]
    assert [line["names"] for line in log if line["event"] == "listener.unknown"] == [["odd"]]
    said = manager.messages()
    assert sorted(said[:3]) == ["remove kept-control 0", "remove kept-http 0", "remove odd 0"]
    assert said[3:] == ["store kept-control 1", "store kept-http 1"]
    other = Listeners.open(
        config(tmp_path),
        pass_sockets(kept_control=before._control, kept_http=before._http),
        manager.notifier,
        structlog.get_logger(),
    )
    assert other._http == []
    assert manager.stored() == ["store kept-control 1"]
    for each in (before, again, other):
        each.close()


@pytest.mark.parametrize("place", ["beside", "at its own path"])
def test_an_activated_socket_is_the_managers(
    tmp_path: Path, manager: RecordingManager, place: str
) -> None:
    """An activated socket is served beside or instead of the daemon's own, and never stored."""
    path = tmp_path / ("s" if place == "at its own path" else "activated")
    with socket.socket(socket.AF_UNIX) as bound, open_control(tmp_path / "earlier") as old:
        bound.bind(str(path))
        bound.listen()
        ours = Listeners.open(
            config(tmp_path),
            pass_sockets(control=[bound], kept_control=[old]),
            manager.notifier,
            structlog.get_logger(),
        )
    names = [each.getsockname() for each in ours._control]
    own = [str(tmp_path / "s")]
    assert names == ([*own, str(path)] if place == "beside" else own)
    stored = manager.stored()
    assert stored == (["store kept-control 1"] if place == "beside" else [])
    with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "earlier"))  # neither we nor the manager have it open
    ours.close()
    assert path.exists()


def test_c13_3_a_port_in_use_at_the_start(tmp_path: Path) -> None:
    """C13.3: the start fails with a message, and leaves nothing open."""
    port = free()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ListenRefused, match="another process listens"),
    ):
        Listeners.open(
            config(tmp_path, f"127.0.0.1:{port}"),
            InheritedSockets(),
            Notifier(),
            structlog.get_logger(),
        )


@pytest.mark.parametrize("closes", [True, False])
def test_a_removed_socket_may_still_hold_the_address(
    tmp_path: Path, manager: RecordingManager, monkeypatch: pytest.MonkeyPatch, *, closes: bool
) -> None:
    """The start waits for a kept address that overlaps the new one: the manager closes it late."""
    port = free()
    before = Listeners.open(
        config(tmp_path, f"127.0.0.1:{port}"),
        InheritedSockets(),
        manager.notifier,
        structlog.get_logger(),
    )
    manager.messages()  # takes the descriptors that are under way
    waits = 0

    def sleep(_: float) -> None:
        nonlocal waits
        waits += 1
        if waits == 3 and closes:
            before._http[0].close()

    monkeypatch.setattr(listeners.time, "sleep", sleep)
    monkeypatch.setattr(listeners, "REMOVAL_TIMEOUT", 0.2)
    inherited = pass_sockets(kept_control=before._control, kept_http=before._http)
    arguments = (config(tmp_path, f":{port}"), inherited, manager.notifier, structlog.get_logger())
    if closes:
        Listeners.open(*arguments).close()
        assert waits == 3
    else:
        with pytest.raises(ListenRefused, match="another process listens"):
            Listeners.open(*arguments)
    before.close()


# -- reload and stop -----------------------------------------------------------------------------


def listen(whole_daemon: WholeDaemon, port: int | None) -> None:
    """The configuration of one controller, with or without HTTP."""
    whole_daemon.listening = True
    whole_daemon.configure("a")
    if port is not None:
        http = f"http: {{listen: '127.0.0.1:{port}'}}\n"
        whole_daemon.config.write_text(http + whole_daemon.config.read_text())


async def reloaded(whole_daemon: WholeDaemon) -> ControlReply:
    daemon = whole_daemon.daemon
    return await ControlVerbs(daemon.context, daemon.commands).reload(Peer(1, 0))


async def test_a_reload_changes_the_listener(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Only the configured port answers: none, one, another, the same, none again."""
    first, second = free(), free()
    listen(whole_daemon, None)
    async with whole_daemon.running():
        for port in (first, second, second, None):
            listen(whole_daemon, port)
            assert (await reloaded(whole_daemon)).code == 0
            await whole_daemon.wait_all_blocked()
            answers = {each: await get(each) is not None for each in (first, second)}
            assert answers == {first: port == first, second: port == second}
    assert len(whole_daemon.log_lines("listener.opened")) == 3  # the control socket's, and two
    assert whole_daemon.exit_code == 0


async def test_c13_3_a_port_in_use_changes_nothing(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """C13.3: the new configuration is rejected at its line, and the old listener answers."""
    port, taken = free(), free()
    listen(whole_daemon, port)
    async with whole_daemon.running() as daemon:
        before = dict(daemon.controllers)
        listen(whole_daemon, taken)
        whole_daemon.config.write_text(whole_daemon.config.read_text().replace("  a:", "  b:"))
        with socket.create_server(("127.0.0.1", taken)):
            answer = await reloaded(whole_daemon)
        assert answer.code == 78
        assert answer.lines[0] == (
            f"{whole_daemon.config}:1:8: cannot listen on 127.0.0.1:{taken}:"
            " another process listens there: end it, or choose another port"
        )
        assert daemon.controllers == before
        assert "200 OK" in str(await get(port))
        # The port is free now: the same configuration is valid.
        assert (await reloaded(whole_daemon)).code == 0
        assert "200 OK" in str(await get(taken))


async def test_an_address_that_overlaps_the_present_one(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Both cannot be open at once: the reload is rejected with a remedy."""
    port = free()
    listen(whole_daemon, port)
    async with whole_daemon.running():
        text = whole_daemon.config.read_text()
        whole_daemon.config.write_text(text.replace("127.0.0.1:", "0.0.0.0:"))
        answer = await reloaded(whole_daemon)
        assert answer.code == 78
        assert f"cannot listen on 0.0.0.0:{port}: 127.0.0.1:{port} uses the port" in answer.lines[0]
        assert "restart the daemon" in answer.lines[0]
        assert "200 OK" in str(await get(port))


async def test_an_open_connection_outlives_the_change(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A connection to the old address is served until it ends."""
    old, new = free(), free()
    listen(whole_daemon, old)
    async with whole_daemon.running(), await trio.open_tcp_stream("127.0.0.1", old) as stream:
        await stream.send_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await stream.receive_some()
        listen(whole_daemon, new)
        assert (await reloaded(whole_daemon)).code == 0
        assert await get(old) is None
        await stream.send_all(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await stream.receive_some()


async def test_a_swap_after_the_begin_of_a_stop(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new listener is closed, and the old one answers until the end."""
    old, new = free(), free()
    listen(whole_daemon, old)
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    real = reload.compare

    def compare(*arguments: Any) -> Any:
        whole_daemon.signal()
        return real(*arguments)

    async with whole_daemon.running():
        monkeypatch.setattr(reload, "compare", compare)
        listen(whole_daemon, new)
        await whole_daemon.reload()
        assert await get(new) is None
        assert "503 Service Unavailable" in str(await get(old, "/readyz"))
    assert await get(old) is None


async def test_it_answers_in_each_stage(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Live from the start to the end of the last run; ready only between start and stop."""
    port = free()
    listen(whole_daemon, port)
    whole_daemon.declared["a"] = [thing("x")]
    go_on = trio.Event()

    async def late(report: Any) -> None:
        await go_on.wait()
        await trio.sleep_forever()

    async def critical(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(45)
        return done()

    whole_daemon.source_runs["a"] = [late]
    whole_daemon.acts["a/x"] = critical
    async with whole_daemon.running():
        assert "\r\n\r\nstarting: " in str(await get(port, "/readyz"))
        assert "200 OK" in str(await get(port))
        await trio.sleep(11)
        assert "\r\n\r\nready" in str(await get(port, "/readyz"))
        whole_daemon.declare("a", thing("x"))
        await whole_daemon.wait_all_blocked()
        whole_daemon.signal()
        await trio.sleep(30)
        assert "\r\n\r\nstopping: SIGTERM" in str(await get(port, "/readyz"))
        assert "200 OK" in str(await get(port))
    assert await get(port) is None
    assert whole_daemon.exit_code == 0


@pytest.mark.processes
def test_h11_is_imported_only_with_http() -> None:
    """A daemon without http.listen never imports h11, which would delay its start."""
    script = "import sys, reconciled.runtime.daemon.startup; print('h11' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"False\n"


@pytest.mark.parametrize("other", ["directory", "another's socket", "closed directory"])
def test_another_file_at_its_path_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """close() removes only its own socket, and ignores a refusal of that."""
    path = tmp_path / "s"
    ours = Listeners.open(config(tmp_path), InheritedSockets(), Notifier(), structlog.get_logger())
    anothers = socket.socket(socket.AF_UNIX)
    if other == "directory":
        path.unlink()
        path.mkdir()
    elif other == "another's socket":
        path.unlink()
        anothers.bind(str(path))
    else:

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError

        monkeypatch.setattr(Path, "unlink", refuse)
    ours.close()
    assert path.exists()
    anothers.close()
