"""The reports of watchers. "Could not read" never means "nothing is declared" (invariant 11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest


@attrs.frozen
class Snapshot:
    """Everything that a source declares now, of any kind.

    complete is False while a part of the source cannot be read or parsed: the manifests in it
    are applied (the last good documents of an invalid file included), and nothing is removed.
    """

    manifests: tuple[Manifest, ...]
    complete: bool
    problems: tuple[Problem, ...] = ()
    # Distinguishes the source from another one mounted or created at its path ("dev:inode"). The
    # daemon stores the last one, and passes it to the watcher at the next start.
    identity: str = ""


@attrs.frozen
class Unavailable:
    """The source cannot be read at all: its last good state is kept."""

    reason: str


@attrs.frozen
class Tick:
    """Every key of the controller is due, for *cause* (as in ``every 10m``)."""

    cause: str


Report = Snapshot | Unavailable | Tick


class Watcher(Protocol):
    """A source of desired state or of wake-ups; watch() is its only task."""

    @property
    def name(self) -> str:
        """Stable across reloads: ``directory /etc/x``, ``every 10m``, ``cron 0 4 * * *``."""

    @property
    def declares(self) -> bool:
        """Whether it reports Snapshots. A timer does not."""

    async def watch(self, report: Callable[[Report], None]) -> None:
        """Report until cancelled. *report* must be called in the event loop; it does not wait."""
