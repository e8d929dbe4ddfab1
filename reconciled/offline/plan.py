"""Plans: what each key's reconciler would do, by its plan(), without effects or a daemon."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NoReturn

import attrs
import trio

from reconciled.api import Change, Operation, has_method
from reconciled.core.resources import Fingerprint, Key, Manifest, directory_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.journal.sqlite.store import Applied
from reconciled.observe.bound_log import BoundLog
from reconciled.offline.scan import ControllerScan
from reconciled.plugins.manifest_request import ManifestRequest
from reconciled.runtime.plugin_errors import failure_of

TIMEOUT = 60.0  # seconds for one key
CONCURRENCY = 8


@attrs.frozen(eq=False)
class PlanRequest(ManifestRequest):
    """The Request of a plan: it refuses operations and cleanup."""

    key: Key
    manifest: Manifest
    spec: Any
    applied: Fingerprint | None
    output: Path
    memory: Path
    log: BoundLog
    critical_limit: float
    causes: tuple[str, ...] = ("plan",)
    failures: int = 0
    stopping: bool = False
    interrupted: None = None

    def operation(self, name: str) -> AbstractAsyncContextManager[Operation]:
        """Refused: a plan has no effects."""
        self._refuse(f"operation({name!r})")

    def cleanup(self) -> AbstractAsyncContextManager[None]:
        """Refused: a plan has nothing to clean up."""
        self._refuse("cleanup()")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(f"plan() of {self.key} called {what}: a plan has no effects")


@attrs.frozen
class KeyPlan:
    """What would happen to one key.

    error      why it cannot be planned; empty: it can
    unknown    its reconciler has no plan()
    held       its removal is held
    operation  its open operation, which comes before any other work on the key
    """

    key: Key
    changes: tuple[Change, ...] = ()
    error: str = ""
    unknown: bool = False
    held: bool = False
    operation: OperationRecord | None = None


async def plan(  # noqa: PLR0913, PLR0917 - one argument a fact
    scans: list[ControllerScan],
    wanted: Iterable[Key],
    operations: Mapping[Key, OperationRecord],
    log: BoundLog,
    critical: float,
    state: Path,
) -> list[KeyPlan]:
    """The plans of the *wanted* keys, or of all, sorted by key.

    operations  the open ones, by key
    critical    ``stop.critical`` in seconds

    Each plan() has TIMEOUT seconds; what it raises is the error of its own key.
    """
    only = set(wanted)
    planned: list[KeyPlan] = []
    limiter = trio.CapacityLimiter(CONCURRENCY)
    # Output of programs that plan() runs goes here, not among the output of the daemon's.
    with tempfile.TemporaryDirectory(prefix="reconciled-") as scratch:

        async def plan_one(each: ControllerScan, key: Key, manifest: Manifest) -> None:
            async with limiter:
                request = PlanRequest(
                    key,
                    manifest,
                    each.ready.plugin.spec_of(manifest),
                    each.fingerprint(key),
                    Path(scratch),
                    state / "memory" / directory_of(key),
                    log.bind(key=key),
                    critical,
                )
                planned.append(await _plan_key(each, request))

        async with trio.open_nursery() as nursery:
            for each in scans:
                for key, manifest in each.desired.manifests.items():
                    if not only or key in only:
                        nursery.start_soon(plan_one, each, key, manifest, name=f"plan {key}")
    for each in scans:
        planned += _removals(each, only)
    planned = [attrs.evolve(one, operation=operations.get(one.key)) for one in planned]
    return sorted(planned, key=lambda one: one.key)


def _checked(changes: object) -> tuple[Change, ...]:
    """The changes that plan() returned. Raises TypeError if it returned anything else."""
    if isinstance(changes, list | tuple) and all(isinstance(each, Change) for each in changes):
        return tuple(changes)
    raise TypeError(f"plan() returned {changes!r:.80}: return a list of Change(action, what)")


def _removals(each: ControllerScan, only: set[Key]) -> Iterable[KeyPlan]:
    action = "remove" if has_method(each.ready.reconciler, "remove") else "forget"
    for key in (*each.removed, *each.held):
        if not only or key in only:
            change = Change(action, _kind(each.applied.get(key)), "")
            yield KeyPlan(key, (change,), held=key in each.held)


def _kind(applied: Applied | None) -> str:
    return applied.kind if applied else "resource"


async def _plan_key(each: ControllerScan, request: PlanRequest) -> KeyPlan:
    key, manifest = request.key, request.manifest
    if not has_method(each.ready.reconciler, "plan"):
        change = Change("reconcile", manifest.kind, "declared, not applied yet")
        same = request.applied == manifest.fingerprint
        return KeyPlan(key, () if same else (change,), unknown=True)
    try:
        with trio.fail_after(TIMEOUT):
            return KeyPlan(key, _checked(await each.ready.reconciler.plan(request)))
    except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for one
        failure = failure_of(error)
        if failure is None:
            raise
        return KeyPlan(key, error=failure.result.reason)  # noqa: ASYNC104 - it was none
