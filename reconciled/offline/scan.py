"""One look at all sources, for verbs that run beside a daemon: nothing is watched or changed."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import trio

from reconciled.core.desired_state import Changes, DesiredState
from reconciled.core.problems import Problem
from reconciled.core.removals import RemovalGuard
from reconciled.core.resources import Fingerprint, Key, Manifest
from reconciled.core.sources import Report, Snapshot, Tick, Unavailable, Watcher
from reconciled.journal.sqlite.store import Applied
from reconciled.runtime.controllers.factory import watchers_of
from reconciled.runtime.controllers.loading import LoadedController, PreparedConfig

PATIENCE = 15.0  # seconds for one source


@attrs.frozen(eq=False)
class ControllerScan:
    """What one controller's sources declare now, compared with what was applied."""

    ready: LoadedController
    desired: DesiredState
    applied: Mapping[Key, Applied]
    removed: tuple[Key, ...]
    unavailable: Mapping[str, str]  # source and reason
    problems: tuple[Problem, ...]
    manifests: tuple[Manifest, ...]  # of every kind, for what nobody takes

    def fingerprint(self, key: Key) -> Fingerprint | None:
        """Of the spec of *key* that was last done."""
        applied = self.applied.get(key)
        return applied.fingerprint if applied is not None and applied.complete else None

    @property
    def held(self) -> tuple[Key, ...]:
        """Removals that would be held."""
        held = self.desired.guard.held
        return held.keys if held else ()


async def scan_sources(
    prepared: PreparedConfig,
    applied: Mapping[str, Mapping[Key, Applied]],
    *,
    critical: float | None = None,
) -> list[ControllerScan]:
    """Read every declaring source of every controller once. *applied* by controller.

    Manifests that ask for more than *critical* seconds are problems; by default the configured.
    """
    limit = prepared.config.stop.critical if critical is None else critical
    return [
        await _one(ready, applied.get(ready.config.name, {}), limit) for ready in prepared.ready
    ]


async def _one(
    ready: LoadedController, applied: Mapping[Key, Applied], critical: float
) -> ControllerScan:
    watchers = [each for each in watchers_of(ready, lambda: critical) if each.declares]
    removals = ready.config.removals
    desired = DesiredState(
        ready.config.name,
        ready.plugin.kind,
        [watcher.name for watcher in watchers],
        RemovalGuard(removals.share, removals.above),
        set(applied),
    )
    changes = Changes()
    unavailable: dict[str, str] = {}
    problems: set[Problem] = set()
    manifests: list[Manifest] = []
    removed: set[Key] = set()
    for watcher in watchers:
        report = await _first_report(watcher)
        changes = desired.apply(watcher.name, report, trio.current_time())
        removed |= set(changes.removed)
        problems |= set(changes.problems)
        if isinstance(report, Unavailable):
            unavailable[watcher.name] = report.reason
        else:
            problems |= set(report.problems)
            manifests += report.manifests
    return ControllerScan(
        ready,
        desired,
        applied,
        tuple(sorted(removed)),
        unavailable,
        tuple(sorted(problems)),
        tuple(manifests),
    )


async def _first_report(watcher: Watcher) -> Snapshot | Unavailable:
    """What *watcher* says first."""
    said: list[Snapshot | Unavailable] = []
    with trio.move_on_after(PATIENCE) as scope:

        def take(report: Report) -> None:
            if not isinstance(report, Tick):
                said.append(report)
                scope.cancel(reason="it has been read")

        await watcher.watch(take)
    return said[0] if said else Unavailable(f"has not answered for {PATIENCE:g}s")
