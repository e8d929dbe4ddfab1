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
from reconciled.observe.bound import BoundLog
from reconciled.runtime.commands import Commands
from reconciled.runtime.host import Host
from reconciled.runtime.listeners import Listeners
from reconciled.runtime.verbs import Verbs
from reconciled.service.notify import Notifier
from reconciled.service.sockets import Inherited


class Serve(Protocol):
    """Starts a service of the daemon, by its name."""

    def __call__(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """``function(*args)``, until it is cancelled; its crash stops the daemon in stages."""


@attrs.define(eq=False)
class Outside:
    """One daemon's ties. Made by taken()."""

    notifier: Notifier
    # Sockets that nobody has asked for yet.
    inherited: Inherited
    # None: nothing listens.
    listeners: Listeners | None = attrs.field(default=None, init=False)

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Outside:
        """Take what the manager has left for this process out of *environ*."""
        return cls(Notifier.taken(environ), Inherited.taken(environ))

    def open(self, config: Config, log: BoundLog) -> None:
        """Listen as *config* says; close() it in the end. Raises ListenRefused."""
        self.listeners = Listeners.opened(config, self.inherited, self.notifier, log)

    def close(self) -> None:
        """The process is about to end."""
        if self.listeners is not None:
            self.listeners.close()

    def begin(self, host: Host, commands: Commands, serve: Serve) -> None:
        """Start every tie; in the loop, without waiting."""
        if self.listeners is not None:
            verbs = Verbs(host, commands)
            serve("listeners", self.listeners.serve, verbs.table(), verbs.unready)

    def tell_ready(self) -> None:
        """The start is over."""
