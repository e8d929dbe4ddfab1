"""The Request of a run: what a reconciler sees of it, backed by the daemon's services."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from reconciled.core.queue.lane import Job
from reconciled.core.resources import Fingerprint, Key, Manifest, directory_of
from reconciled.journal.operation_record import AppliedSpec, OperationRecord
from reconciled.plugins.manifest_request import ManifestRequest
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.operations.interrupted import InterruptedOperation
from reconciled.runtime.operations.operation import RunOperation
from reconciled.runtime.operations.pinned import pin
from reconciled.stop import Work
from reconciled.threads import in_thread


class RunRequest(ManifestRequest):
    """A Request. Not an attrs class: 25 thousand of these are made a second.

    acted        an operation was opened: a run without one had nothing to do
    removal      the run removes what was applied for the key
    undoable     its steps can be undone: each is recorded before it takes effect
    interrupted  the operation that a recovery's observe() is called for; None in any other call
    """

    __slots__ = (
        "_context",
        "_resumed",
        "_undoing",
        "acted",
        "interrupted",
        "job",
        "key",
        "manifest",
        "number",
        "removal",
        "spec",
        "undoable",
        "work",
    )

    def __init__(  # noqa: PLR0913, PLR0917 - one argument a field
        self,
        context: RuntimeContext,
        job: Job,
        manifest: Manifest,
        spec: Any,
        number: int,
        work: Work,
    ) -> None:
        self._context = context
        self.job = job
        self.key: Key = job.key
        self.manifest = manifest
        self.spec = spec
        self.number = number
        self.work = work
        self.acted = False
        self.removal = False
        self.undoable = False
        self.interrupted: InterruptedOperation | None = None
        self._resumed: OperationRecord | None = None
        self._undoing: RunOperation | None = None

    def __repr__(self) -> str:
        return f"<Run {self.number} of {self.key}>"

    @property
    def applied(self) -> Fingerprint | None:
        """Fingerprint of the spec that was last applied completely."""
        return self._context.store.fingerprint(self.key)

    @property
    def output(self) -> Path:
        """``STATE/output/…``."""
        return self._context.state / "output" / directory_of(self.key)

    @property
    def memory(self) -> Path:
        """``STATE/memory/…``."""
        return self._context.state / "memory" / directory_of(self.key)

    @property
    def causes(self) -> tuple[str, ...]:
        """Why the key was queued."""
        return self.job.causes

    @property
    def failures(self) -> int:
        """Failed runs in a row before this one."""
        return self.job.failures

    @property
    def stopping(self) -> bool:
        """True from the instant a stop begins: of the daemon, the controller or this run."""
        return self._context.stopping or self.work.stop.began.is_set()

    @property
    def critical_limit(self) -> float:
        """``stop.critical``, in seconds."""
        return self.work.stop.limits.critical

    @property
    def log(self) -> Any:
        """A logger with key and run."""
        return self._context.log.bind(key=self.key, run=self.number)

    def operation(self, name: str) -> AbstractAsyncContextManager[RunOperation]:
        """Open the operation *name*; its record makes the key known, so that it can be removed.

        Raises RuntimeError where an interrupted operation of another name has to be recovered
        first; for the rest, see Operations.open_operation().
        """
        return self._operation(name)

    @asynccontextmanager
    async def _operation(self, name: str) -> AsyncIterator[RunOperation]:
        self.acted = True
        operations = self._context.operations
        if self._undoing is not None:
            # All steps that undo() takes back belong to the one undoing operation.
            yield self._undoing
            return
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed.name != name:
            raise RuntimeError(
                f"the interrupted operation {resumed.name!r} has to be finished before {name!r}"
                " begins: open it again by its name, or have recover() complete or abandon it"
            )
        pinned = pin(self.manifest, removal=self.removal)
        opened = operations.open_operation(
            self.work,
            name,
            pinned,
            self._owned(),
            self.log,
            resumed,
            undoable=self.undoable,
        )
        async with opened as operation:
            yield operation

    def resume(self, record: OperationRecord) -> None:
        """Make operation() continue *record*, an interrupted operation, instead of opening one."""
        self._resumed = record

    @asynccontextmanager
    async def undoing(self) -> AsyncIterator[RunOperation]:
        """Enter the resumed operation, which undoes another: operation() returns it each time."""
        self.acted = True
        record, self._resumed = self._resumed, None
        if record is None:
            raise RuntimeError("nothing was resumed")
        opened = self._context.operations.open_operation(
            self.work, record.name, record.pinned, None, self.log, record
        )
        async with opened as operation:
            self._undoing = operation
            try:
                yield operation
            finally:
                self._undoing = None

    def _owned(self) -> AppliedSpec | None:
        """The spec to record as owned before the first effect; None: it is recorded already.

        Without it a kill after the first effect would leave what the key owns without an owner.
        From the first effect of a removal on, its spec does not count as applied any more.
        """
        store = self._context.store
        applied = None if self.removal else store.fingerprint(self.key)
        if self.fingerprint in (applied, store.incomplete_fingerprint(self.key)):
            return None
        manifest = self.manifest
        return AppliedSpec(manifest.kind, dict(manifest.spec), manifest.fingerprint, str(self.base))

    @property
    def is_applied(self) -> bool:
        """Whether the store has this spec as completely applied already."""
        return self._context.store.fingerprint(self.key) == self.manifest.fingerprint

    async def record_applied(self) -> None:
        """Record the spec as applied, shielded: losing the record would repeat the work."""
        async with self.work.cleanup("record of what was applied"):
            manifest = self.manifest
            await self._context.store.record_applied(
                self.key,
                manifest.kind,
                manifest.spec,
                manifest.fingerprint,
                base=str(self.base),
                complete=True,
            )

    async def erase(self) -> None:
        """Delete the key's own files with the key (invariant 14)."""
        for directory in (self.output, self.memory):
            await in_thread(partial(shutil.rmtree, directory, ignore_errors=True))

    @asynccontextmanager
    async def cleanup(self) -> AsyncIterator[None]:
        """A shielded part of at most ``stop.cleanup`` seconds, for ``finally`` blocks."""
        async with self.work.cleanup("by the reconciler"):
            yield
