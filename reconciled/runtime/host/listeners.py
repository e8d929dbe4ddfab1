"""The daemon's listeners: opened before its loop, kept by the manager, changed by a reload.

1. A socket that the service manager keeps is served again by the next start, so that over a
   restart nobody is refused, however the daemon ended. What it keeps has names of its own:
   ``control`` alone is that of ``reconciled.socket``, which nobody may store a second time.
2. They are there before the first controller and until the last one has ended: a start and a
   stop answer that they are not ready, instead of not answering.
3. A reload opens a new one before the swap, so that a port in use is a problem of the new
   configuration (C13.3), and closes the old one after it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.config.model import Config, HttpConfig
from reconciled.control.addresses import is_served_by, open_control, open_http
from reconciled.control.connections import Connections
from reconciled.control.server import ControlServer, Verb
from reconciled.core.errors import ListenRefused
from reconciled.observe.bound_log import BoundLog
from reconciled.service.notify import Notifier
from reconciled.service.sockets import InheritedSockets
from reconciled.threads import in_thread

ACTIVATED = "control"
# The manager closes what it is to forget within so many seconds, looked for so often.
FORGOTTEN_WITHIN, PAUSE = 2.0, 0.02
KEPT_CONTROL, KEPT_HTTP = "kept-control", "kept-http"


@attrs.define(eq=False)
class Change:
    """What the http section of a new configuration needs, open and not served yet."""

    listeners: Listeners
    config: HttpConfig | None
    opened: list[socket.socket]

    def commit(self) -> None:
        """Serve the new listeners, and close the old ones; connections that are open go on."""
        self.listeners.take_over(self.config, self.opened)

    def discard(self) -> None:
        """Close the new ones: the old configuration runs on."""
        for each in self.opened:
            each.close()


@attrs.define(eq=False)
class Listeners:
    """All of them. Made by opened(), served by serve(), and in the end close()d."""

    path: Path
    section: HttpConfig | None
    log: BoundLog
    notifier: Notifier
    # The first is the daemon's own, unless the manager listens at its path.
    _control: list[socket.socket]
    _http: list[socket.socket]
    _own: bool
    _kept: bool = False
    _unready: Callable[[], list[str]] | None = attrs.field(default=None, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    _health: Connections | None = attrs.field(default=None, init=False)
    # Around the acceptors of the http listeners of now.
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    @classmethod
    def open(
        cls, config: Config, inherited: InheritedSockets, notifier: Notifier, log: BoundLog
    ) -> Listeners:
        """Open what *config* says, with what was kept where it still fits.

        Raises ListenRefused. What else was *inherited* is closed: nobody knows it.
        """
        control = inherited.take(ACTIVATED)
        kept, kept_http = inherited.take(KEPT_CONTROL), inherited.take(KEPT_HTTP)
        names = inherited.close_rest()
        if names:
            log.warning("listener.unknown", names=names)
        for name in {KEPT_CONTROL, KEPT_HTTP, *names}:
            # What fits is stored anew: so what does not is not kept for ever.
            notifier.remove_fd(name)
        own = not any(is_served_by(config.control, each) for each in control)
        if own:
            control.insert(0, open_control(config.control, kept))
        else:
            for each in kept:
                each.close()
        try:
            http = _open_at_start(config.http, kept_http)
        except ListenRefused:
            for each in control:
                each.close()
            raise
        listeners = cls(config.control, config.http, log, notifier, control, http, own)
        listeners._keep(was_kept={each.fileno() for each in (*kept, *kept_http)})
        return listeners

    def _keep(self, was_kept: set[int]) -> None:
        if self._own:
            self._kept = self.notifier.store_fd(KEPT_CONTROL, self._control[0].fileno())
        for each in self._http:
            self.notifier.store_fd(KEPT_HTTP, each.fileno())
        for each in (*self._control, *self._http):
            self.log.info(
                "listener.opened", at=_format_address(each), kept=each.fileno() in was_kept
            )

    async def serve(self, verbs: Mapping[str, Verb], unready: Callable[[], list[str]]) -> None:
        """Serve them until cancelled."""
        server = ControlServer(verbs, self.log)
        self._unready = unready
        async with trio.open_nursery() as self._nursery:
            for each in self._control:
                listener = _listener(each)
                name = f"accept at {_format_address(each)}"
                accept = server.connections.accept
                self._nursery.start_soon(accept, listener, self._nursery, name=name)
            self._serve_http()

    async def change(self, config: Config) -> Change | None:
        """Open what *config* needs beside what is open; None: nothing changes.

        Raises ListenRefused.
        """
        if config.http == self.section:
            return None
        try:
            # In a thread, as a name may have to be looked up, and h11 be read. A stop does not
            # wait for it: what it opens then goes with the process.
            opened = await in_thread(
                partial(_open, config.http, ()),
                limiter=trio.CapacityLimiter(1),
                abandon_on_cancel=True,
            )
        except ListenRefused as refused:
            now, new = self.section, config.http
            if refused.in_use and now is not None and new is not None and now.port == new.port:
                raise ListenRefused(
                    f"{new.listen} cannot be listened on beside {now.listen}, which is in use "
                    "until the change: take another port, or restart the daemon"
                ) from refused
            raise
        return Change(self, config.http, opened)

    def take_over(self, config: HttpConfig | None, opened: list[socket.socket]) -> None:
        """Serve *opened* in place of the http listeners so far."""
        self._scope.cancel(reason="a reload has other listeners")
        self._scope = trio.CancelScope()
        self.notifier.remove_fd(KEPT_HTTP)
        self.section, self._http = config, opened
        for each in opened:
            self.notifier.store_fd(KEPT_HTTP, each.fileno())
            self.log.info("listener.opened", at=_format_address(each), kept=False)
        self._serve_http()

    def _serve_http(self) -> None:
        if not self._http or self._nursery is None or self._unready is None:
            return
        if self._health is None:
            from reconciled.control.health import Health

            self._health = Health(self.log, self._unready).connections
        sockets, name = list(self._http), f"accept at {_format_address(self._http[0])}"
        self._nursery.start_soon(self._accept, sockets, self._health, self._scope, name=name)

    async def _accept(
        self, sockets: list[socket.socket], health: Connections, scope: trio.CancelScope
    ) -> None:
        """Accept until *scope* is cancelled; then these listeners are closed."""
        assert self._nursery is not None
        with scope, contextlib.ExitStack() as closing:
            async with trio.open_nursery() as accepting:
                for each in sockets:
                    listener = _listener(each)
                    closing.callback(listener.socket.close)
                    accepting.start_soon(health.accept, listener, self._nursery)

    def close(self) -> None:
        """The process is about to end. A kept control socket stays, with its file."""
        # What is at the path may be another's by now, and to remove it may be refused: a file that
        # nobody serves is in nobody's way.
        with contextlib.suppress(OSError):
            if self._own and not self._kept and is_served_by(self.path, self._control[0]):
                self.path.unlink()
        for each in (*self._control, *self._http):
            each.close()


def _open_at_start(config: HttpConfig | None, kept: Sequence[socket.socket]) -> list[socket.socket]:
    """As _open(); what was kept and does not fit may be in the way until the manager closes it.

    It has been told to, and does so in its own time, of which it says nothing.
    """
    give_up = time.monotonic() + (FORGOTTEN_WITHIN if kept else 0.0)
    while True:
        try:
            return _open(config, [each for each in kept if each.fileno() >= 0])
        except ListenRefused as refused:
            if not refused.in_use or time.monotonic() >= give_up:
                raise
        time.sleep(PAUSE)  # before the loop: nothing else waits


def _open(config: HttpConfig | None, kept: Sequence[socket.socket]) -> list[socket.socket]:
    if config is None:
        for each in kept:
            each.close()
        return []
    opened = open_http(config.host, config.port, kept)
    # Here, where nobody waits for it: it is read for those alone who have http.
    import reconciled.control.health  # noqa: F401

    return opened


def _listener(opened: socket.socket) -> trio.SocketListener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened))


def _format_address(opened: socket.socket) -> str:
    """The address as people write it."""
    name = opened.getsockname()
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return name if isinstance(name, str) else name.decode(errors="replace")
