"""What a watcher reports. "Could not read" is never "nothing is desired" (invariant 11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs

from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest


@attrs.frozen
class Snapshot:
    """Everything a source declares now, of any kind.

    complete is False while a part of the source could not be read or parsed: what is there
    is applied (the last good documents of a bad file included), and nothing is removed.
    """

    manifests: tuple[Manifest, ...]
    complete: bool
    problems: tuple[Problem, ...] = ()
    # What tells this place from another one mounted or created over it ("dev:inode"); the
    # host remembers the last one across starts and hands it back to the watcher.
    identity: str = ""


@attrs.frozen
class Unavailable:
    """The source could not be read at all: the last good state stays."""

    reason: str


@attrs.frozen
class Tick:
    """Every key of the controller is due, for *cause* (as in ``every 10m``)."""

    cause: str


Report = Snapshot | Unavailable | Tick


class Watcher(Protocol):
    """A source of desired state or of wake-ups; watch() is its one task."""

    @property
    def name(self) -> str:
        """Stable across reloads: ``directory /etc/x``, ``every 10m``, ``cron 0 4 * * *``."""

    @property
    def declares(self) -> bool:
        """Whether it reports Snapshots; a timer does not."""

    async def watch(self, report: Callable[[Report], None]) -> None:
        """Report until cancelled. *report* is synchronous and must be called in the loop."""
