"""What ties the daemon to the outside: the service manager, the host, and who asks it things.

    run        Outside.taken(): before anything is spawned, the manager's variables and sockets
    services   begin(): each tie is a service, which outlives all work
    ready      tell_ready(): every source has said something, or has had its time

Without a manager each of them is silently off. None of them is needed for the work itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Protocol

import attrs

from reconciled.runtime.commands import Commands
from reconciled.runtime.host import Host
from reconciled.service.notify import Notifier


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

    @classmethod
    def taken(cls, environ: MutableMapping[str, str]) -> Outside:
        """Take what the manager has left for this process out of *environ*."""
        return cls(Notifier.taken(environ))

    def begin(self, host: Host, commands: Commands, serve: Serve) -> None:
        """Start every tie; in the loop, without waiting."""

    def tell_ready(self) -> None:
        """The start is over."""
