"""What ties the daemon to the outside: the service manager, the host, and who asks it things.

    run        Outside.taken(): before anything is spawned, the manager's variables and sockets
    start      open(): the listeners, before the loop
    services   begin(): each tie is a service, which outlives all work
    ready      tell_ready(): every source has said something, or has had its time

Without a manager each of them is silently off. None of them is needed for the work itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Protocol

import attrs

from reconciled.config.model import Config
from reconciled.observe.bound_log import BoundLog
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.daemon.commands import Commands
from reconciled.runtime.daemon.verbs import Verbs
from reconciled.runtime.host.heartbeat import Heartbeat
from reconciled.runtime.host.listeners import Listeners
from reconciled.runtime.host.shutdown_delay import ShutdownDelay
from reconciled.runtime.host.unit_check import UnitCheck
from reconciled.service.notify import Notifier, microseconds
from reconciled.service.sockets import InheritedSockets

# To wait for the state lock, open the store and migrate it may take so many seconds of a start.
OPENING = 30.0


class Serve(Protocol):
    """Starts a service of the daemon, by its name."""

    def __call__(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """``function(*args)``, until it is cancelled; its crash stops the daemon in stages."""


@attrs.define(eq=False)
class Integrations:
    """One daemon's ties. Made by taken()."""

    notifier: Notifier
    # Sockets that nobody has asked for yet.
    inherited: InheritedSockets
    # None: nothing listens.
    listeners: Listeners | None = attrs.field(default=None, init=False)
    # Set by the start: what the stop budget is compared with.
    unit: UnitCheck | None = attrs.field(default=None, init=False)

    _heartbeat: Heartbeat | None = attrs.field(default=None, init=False)
    _shutdown_delay: ShutdownDelay | None = attrs.field(default=None, init=False)

    @property
    def has_watchdog(self) -> bool:
        """Whether the manager ends a loop that hangs now; any thread may ask."""
        return self._heartbeat is not None and self._heartbeat.has_watchdog

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> Integrations:
        """Take what the manager has left for this process out of *environ*."""
        return cls(Notifier.from_environ(environ), InheritedSockets.from_environ(environ))

    def open(self, config: Config, log: BoundLog) -> None:
        """Listen as *config* says; close() it in the end. Raises ListenRefused."""
        self.listeners = Listeners.open(config, self.inherited, self.notifier, log)

    def close(self) -> None:
        """The process is about to end."""
        if self.listeners is not None:
            self.listeners.close()

    def notify_opening(self) -> None:
        """The state directory is being opened: the loop, which tells the rest, does not run yet."""
        extension = microseconds(OPENING)
        self.notifier.notify(STATUS="starting: opening the journal", EXTEND_TIMEOUT_USEC=extension)

    def begin(self, context: RuntimeContext, commands: Commands, serve: Serve) -> None:
        """Start every tie; in the loop, without waiting."""
        if self.notifier.present:
            controllers = commands.dispatcher.controllers
            self._heartbeat = Heartbeat(context, self.notifier, controllers)
            commands.reloader.on_reload = self._heartbeat.notify_reload
            serve("heartbeat", self._heartbeat.serve)
            # Only where a manager runs it: a daemon in a terminal delays nobody's shutdown.
            self._shutdown_delay = ShutdownDelay(context, commands.dispatcher)
            serve("shutdown lock", self._shutdown_delay.serve)
        if self.unit is not None:
            serve("unit", self.unit.serve, lambda: context.stop.limits)
        if self.listeners is not None:
            verbs = Verbs(context, commands)
            serve("listeners", self.listeners.serve, verbs.table(), verbs.unready)

    def notify_ready(self) -> None:
        """The start is over."""
        if self.unit is not None:
            self.unit.ask()
        if self._heartbeat is not None:
            self._heartbeat.notify_ready()
        if self._shutdown_delay is not None:
            self._shutdown_delay.ready()

    def handle_reloaded(self) -> None:
        """A reload is in force: what a stop may take can have changed."""
        if self.unit is not None:
            self.unit.ask()
