"""The daemon's connections to the outside: the service manager, logind and its listeners.

    start of the process   from_environ(): takes the manager's variables and sockets, before
                           anything is spawned
    before the loop        open(): opens the listeners
    services               begin(): starts a service for each connection; they outlive all work
    ready                  notify_ready(): every source has reported, or its time is over

Without a service manager each of them is off. The work itself needs none of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Protocol

import attrs

from reconciled.config.model import Config
from reconciled.observe.bound_log import BoundLog
from reconciled.runtime.daemon.assembly import Assembly
from reconciled.runtime.daemon.commands import Commands
from reconciled.runtime.daemon.control_verbs import ControlVerbs
from reconciled.runtime.host.heartbeat import Heartbeat
from reconciled.runtime.host.listeners import Listeners
from reconciled.runtime.host.shutdown_delay import ShutdownDelay
from reconciled.runtime.host.unit_check import UnitCheck
from reconciled.service.notify import Notifier, microseconds
from reconciled.service.sockets import InheritedSockets

# Seconds of a start that the state lock, the opening of the store and its migration may take.
OPENING = 30.0


class StartService(Protocol):
    """Starts a service of the daemon, by its name."""

    def __call__(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """``function(*args)``, until it is cancelled; its crash stops the daemon in stages."""


@attrs.define(eq=False)
class ManagerIntegration:
    """The connections of one daemon. Made by from_environ()."""

    notifier: Notifier
    # Sockets passed by the manager that no listener has taken yet.
    inherited: InheritedSockets
    # None: the daemon does not listen.
    listeners: Listeners | None = attrs.field(default=None, init=False)
    # Set by the start: compares the limits of a stop with the unit.
    unit: UnitCheck | None = attrs.field(default=None, init=False)

    _heartbeat: Heartbeat | None = attrs.field(default=None, init=False)
    _shutdown_delay: ShutdownDelay | None = attrs.field(default=None, init=False)

    @property
    def has_watchdog(self) -> bool:
        """Whether the manager would end a hung loop now; safe in any thread."""
        return self._heartbeat is not None and self._heartbeat.has_watchdog

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> ManagerIntegration:
        """Take what the manager has passed to this process out of *environ*."""
        return cls(Notifier.from_environ(environ), InheritedSockets.from_environ(environ))

    def open(self, config: Config, log: BoundLog) -> None:
        """Listen as *config* says; close() it in the end. Raises ListenRefused."""
        self.listeners = Listeners.open(config, self.inherited, self.notifier, log)

    def close(self) -> None:
        """Close the listeners; the process is about to end."""
        if self.listeners is not None:
            self.listeners.close()

    def notify_opening(self) -> None:
        """Report that the journal is being opened: the heartbeat does not run yet."""
        extension = microseconds(OPENING)
        self.notifier.notify(STATUS="starting: opening the journal", EXTEND_TIMEOUT_USEC=extension)

    def begin(self, assembly: Assembly, commands: Commands, start_service: StartService) -> None:
        """Start the service of each connection; in the loop, without waiting."""
        context = assembly.context
        if self.notifier.present:
            self._heartbeat = Heartbeat(context, self.notifier, assembly.controllers)
            commands.reloader.on_reload = self._heartbeat.notify_reload
            start_service("heartbeat", self._heartbeat.serve)
            # Only under a manager: a daemon in a terminal must not delay a shutdown of the machine.
            self._shutdown_delay = ShutdownDelay(context, assembly.dispatcher)
            start_service("shutdown lock", self._shutdown_delay.serve)
        if self.unit is not None:
            start_service("unit check", self.unit.serve, lambda: context.stop.limits)
        if self.listeners is not None:
            verbs = ControlVerbs(context, commands)
            start_service("listeners", self.listeners.serve, verbs.table(), verbs.not_ready_reasons)

    def notify_ready(self) -> None:
        """The start is over."""
        if self.unit is not None:
            self.unit.request()
        if self._heartbeat is not None:
            self._heartbeat.notify_ready()
        if self._shutdown_delay is not None:
            self._shutdown_delay.ready()

    def handle_reloaded(self) -> None:
        """A reload is in force: the limits of a stop may have changed."""
        if self.unit is not None:
            self.unit.request()
