"""One scan of all sources, for verbs that need no daemon: nothing is watched or changed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from reconciled.core.desired_state import Changes, DesiredState
from reconciled.core.problems import Problem
from reconciled.core.removal_guard import HeldRemovals, RemovalGuard
from reconciled.core.resources import Fingerprint, Key, Manifest
from reconciled.core.sources import Report, Snapshot, Tick, Unavailable, Watcher
from reconciled.journal.removal_approvals import read_pending
from reconciled.journal.sqlite.store import Applied
from reconciled.runtime.controllers.factory import build_watchers
from reconciled.runtime.controllers.loading import LoadedController, PreparedConfig

SCAN_TIMEOUT = 15.0  # seconds for one source


@attrs.frozen(eq=False)
class ControllerScan:
    """What one controller's sources declare now, compared with what was applied."""

    ready: LoadedController
    desired: DesiredState
    applied: Mapping[Key, Applied]
    removed: tuple[Key, ...]
    unavailable: Mapping[str, str]  # reasons, by source
    problems: tuple[Problem, ...]
    manifests: tuple[Manifest, ...]  # of every kind, those that no controller takes as well

    def fingerprint(self, key: Key) -> Fingerprint | None:
        """Fingerprint of the spec of *key* that was last applied completely."""
        applied = self.applied.get(key)
        return applied.fingerprint if applied is not None and applied.complete else None

    @property
    def held(self) -> tuple[Key, ...]:
        """Keys whose removal would be held."""
        held = self.desired.guard.held
        return held.keys if held else ()


async def scan_sources(
    prepared: PreparedConfig,
    applied: Mapping[str, Mapping[Key, Applied]],
    *,
    critical: float | None = None,
) -> list[ControllerScan]:
    """Read every declaring source of every controller once.

    applied   what was applied, by controller
    critical  manifests with a longer budget are problems; in seconds, by default stop.critical

    Takes at most SCAN_TIMEOUT seconds a source; one that takes longer is unavailable.
    """
    limit = prepared.config.stop.critical if critical is None else critical
    return [
        await _scan_controller(
            ready, applied.get(ready.config.name, {}), limit, prepared.config.state
        )
        for ready in prepared.ready
    ]


async def _scan_controller(
    ready: LoadedController, applied: Mapping[Key, Applied], critical: float, state: Path
) -> ControllerScan:
    watchers = [each for each in build_watchers(ready, lambda: critical) if each.declares]
    removals = ready.config.removals
    desired = DesiredState(
        ready.config.name,
        ready.plugin.kind,
        [watcher.name for watcher in watchers],
        RemovalGuard(removals.share, removals.above),
        set(applied),
    )
    with contextlib.suppress(OSError, ValueError):  # a daemon that starts logs it
        if pending := read_pending(state, ready.config.name):
            held = HeldRemovals(pending.keys, pending.owned, trio.current_time())
            desired.guard.restore(held)
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
    """The first report of *watcher*; Unavailable after SCAN_TIMEOUT seconds without one."""
    reports: list[Snapshot | Unavailable] = []
    with trio.move_on_after(SCAN_TIMEOUT) as scope:

        def on_report(report: Report) -> None:
            if not isinstance(report, Tick):
                reports.append(report)
                scope.cancel(reason="the source has been read")

        await watcher.watch(on_report)
    return reports[0] if reports else Unavailable(f"gave no report within {SCAN_TIMEOUT:g}s")
