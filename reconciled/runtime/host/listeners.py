"""The daemon's listeners: opened before its loop, kept by the manager, changed by a reload.

1. The service manager keeps the sockets over a restart, and the next start serves them again, so
   that no client is refused, however the daemon ended. They are stored under their own names:
   ``control`` is the name of ``reconciled.socket``, which must not be stored a second time.
2. They are open before the first controller starts and until the last one has ended: during a
   start and a stop, requests get the reply that the daemon is not ready.
3. A reload opens new listeners before the swap, so that a port in use is a problem of the new
   configuration (C13.3), and closes the old ones after it.
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
from reconciled.control.connections import Connections
from reconciled.control.listening_sockets import is_served_by, open_control, open_http
from reconciled.control.server import ControlServer, Verb
from reconciled.core.errors import ListenRefused
from reconciled.observe.bound_log import BoundLog
from reconciled.service.notify import Notifier
from reconciled.service.sockets import InheritedSockets
from reconciled.threads import in_thread

ACTIVATED = "control"
# Seconds in which the manager closes a removed socket, and between attempts to open its address.
REMOVAL_TIMEOUT, RETRY_INTERVAL = 2.0, 0.02
KEPT_CONTROL, KEPT_HTTP = "kept-control", "kept-http"


@attrs.define(eq=False)
class Change:
    """The http listeners of a new configuration, open but not served yet."""

    listeners: Listeners
    config: HttpConfig | None
    opened: list[socket.socket]

    def commit(self) -> None:
        """Serve the new listeners and close the old ones; open connections continue."""
        self.listeners.take_over(self.config, self.opened)

    def discard(self) -> None:
        """Close the new ones: the old configuration stays in force."""
        for each in self.opened:
            each.close()


@attrs.define(eq=False)
class Listeners:
    """The listeners of one daemon. Made by open(), served by serve(), closed by close()."""

    path: Path
    section: HttpConfig | None
    log: BoundLog
    notifier: Notifier
    # The first is the daemon's own, unless reconciled.socket listens at its path.
    _control: list[socket.socket]
    _http: list[socket.socket]
    _own: bool
    _kept: bool = False
    _unready: Callable[[], list[str]] | None = attrs.field(default=None, init=False)
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)
    _health: Connections | None = attrs.field(default=None, init=False)
    # Encloses the acceptors of the present http listeners.
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    @classmethod
    def open(
        cls, config: Config, inherited: InheritedSockets, notifier: Notifier, log: BoundLog
    ) -> Listeners:
        """Open the listeners of *config*, reusing kept sockets that still match.

        Closes every other *inherited* socket. Raises ListenRefused.
        """
        control = inherited.take(ACTIVATED)
        kept, kept_http = inherited.take(KEPT_CONTROL), inherited.take(KEPT_HTTP)
        names = inherited.close_rest()
        if names:
            log.warning("listener.unknown", names=names)
        for name in {KEPT_CONTROL, KEPT_HTTP, *names}:
            # Sockets in use are stored again below; the others must not be kept.
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
        """Serve all listeners until cancelled."""
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
        """Open the listeners of *config* beside the open ones; None: nothing changes.

        Raises ListenRefused.
        """
        if config.http == self.section:
            return None
        try:
            # In a thread, for the lookup of a name and the import of h11. A stop does not wait for
            # it: the end of the process closes what it opens.
            opened = await in_thread(
                partial(_open, config.http, ()),
                limiter=trio.CapacityLimiter(1),
                abandon_on_cancel=True,
            )
        except ListenRefused as refused:
            now, new = self.section, config.http
            if refused.in_use and now is not None and new is not None and now.port == new.port:
                raise ListenRefused(
                    f"cannot listen on {new.listen}: {now.listen} uses the port until the reload: "
                    "choose another port, or restart the daemon"
                ) from refused
            raise
        return Change(self, config.http, opened)

    def take_over(self, config: HttpConfig | None, opened: list[socket.socket]) -> None:
        """Serve *opened* in place of the present http listeners."""
        self._scope.cancel(reason="a reload replaced the listeners")
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
        """Accept until *scope* is cancelled, then close these listeners."""
        assert self._nursery is not None
        with scope, contextlib.ExitStack() as closing:
            async with trio.open_nursery() as accepting:
                for each in sockets:
                    listener = _listener(each)
                    closing.callback(listener.socket.close)
                    accepting.start_soon(health.accept, listener, self._nursery)

    def close(self) -> None:
        """Close all before the process ends. A kept control socket keeps its file."""
        # The file may belong to another process by now, and its removal may be refused: a file
        # that no process serves does no harm.
        with contextlib.suppress(OSError):
            if self._own and not self._kept and is_served_by(self.path, self._control[0]):
                self.path.unlink()
        for each in (*self._control, *self._http):
            each.close()


def _open_at_start(config: HttpConfig | None, kept: Sequence[socket.socket]) -> list[socket.socket]:
    """As _open(), and wait for the address of a kept socket that does not match.

    The manager was requested to close it, and does so later, without a notification.
    """
    give_up = time.monotonic() + (REMOVAL_TIMEOUT if kept else 0.0)
    while True:
        try:
            return _open(config, [each for each in kept if each.fileno() >= 0])
        except ListenRefused as refused:
            if not refused.in_use or time.monotonic() >= give_up:
                raise
        time.sleep(RETRY_INTERVAL)  # before the loop: it blocks no task


def _open(config: HttpConfig | None, kept: Sequence[socket.socket]) -> list[socket.socket]:
    if config is None:
        for each in kept:
            each.close()
        return []
    opened = open_http(config.host, config.port, kept)
    # Imported here, off the loop, and only with http configured.
    import reconciled.control.health  # noqa: F401

    return opened


def _listener(opened: socket.socket) -> trio.SocketListener:
    return trio.SocketListener(trio.socket.from_stdlib_socket(opened))


def _format_address(opened: socket.socket) -> str:
    """The address in the form of the configuration."""
    name = opened.getsockname()
    if isinstance(name, tuple):
        host, port = name[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return name if isinstance(name, str) else name.decode(errors="replace")
