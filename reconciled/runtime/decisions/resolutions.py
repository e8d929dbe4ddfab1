"""Decisions about held operations in the daemon: what ``journal resolve`` wrote is carried out.

1. The file of a decision is removed only when everything that the decision changes is durable: a
   kill in between repeats it, and never loses it.
2. It applies to a held operation, and replaces one that has to wait for its controller. A decision
   about any other operation is dropped, with a log line.
3. Operations of a controller that is not configured any more can be resolved too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.core.queue.states import Priority
from reconciled.core.resources import controller_of, directory_of
from reconciled.journal.decision_files import DecisionFiles
from reconciled.journal.operation_record import OperationRecord, Resolution
from reconciled.journal.resolutions import (
    ALL_OPERATIONS,
    ResolutionRequest,
    read_resolution,
    resolution_files,
)
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.decisions.inbox import SCAN_INTERVAL, Inbox
from reconciled.runtime.operations.pinned import is_removal
from reconciled.runtime.runs.completion import finish_removal
from reconciled.runtime.runs.unattended import UnattendedKeys

# Seconds that a start waits for the first scan: without a limit, a full disk would prevent it.
FIRST_SCAN_TIMEOUT = 5.0
CLOSING = frozenset({Resolution.COMPLETE, Resolution.ABANDON})


@attrs.define(eq=False)
class Resolutions:
    """Receives decisions about operations. controllers() gives the running controllers by name."""

    context: RuntimeContext
    controllers: Callable[[], Mapping[str, Controller]]
    unattended: UnattendedKeys
    # Repeated after a kill: the journal shows what has been done already.
    at_most_once: bool = attrs.field(default=False, init=False)
    inbox: Inbox[ResolutionRequest] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.inbox = Inbox(resolution_files(self.context.state), self)

    async def serve(self) -> None:
        """Carry decisions out as they come; for a service nursery. Runs until cancelled.

        Cancelled while it carries one out, the next start does that again.
        """
        await self.inbox.serve()

    async def wait_first_scan(self) -> None:
        """Wait until earlier decisions are carried out, at most FIRST_SCAN_TIMEOUT."""
        with trio.move_on_after(FIRST_SCAN_TIMEOUT):
            await self.inbox.scanned.wait()

    def read(self, files: DecisionFiles, file: Path) -> ResolutionRequest:
        """The decision in *file*. Raises OSError, or ValueError."""
        return read_resolution(files, file)

    async def act(self, name: str, decision: ResolutionRequest) -> None:
        """Carry out the decision about the operation *name*, or about all of them.

        Raises OSError, WriteFailed, StoreClosed.
        """
        if name == ALL_OPERATIONS:
            if decision.resolution is Resolution.ABANDON:
                await self._abandon_all(decision)
            else:
                self._drop(name, "--all goes with --abandon only", decision)
            return
        record = self.context.operations.journal.find(name)
        if record is not None and self._may_resolve(record, decision):
            await self._resolve(record, decision)
            self._enqueue(record, decision)
            self.unattended.resolved(record)
        # Otherwise a daemon was killed before it removed the file: the journal has the decision.
        elif record is None or record.pending_resolution != decision.resolution.value:
            self._drop(name, "the operation is not held any more", decision)

    def _may_resolve(self, record: OperationRecord, decision: ResolutionRequest) -> bool:
        if record.hold is not None:
            return True
        replaced = record.pending_resolution
        return (
            bool(replaced)
            and replaced != decision.resolution.value
            and self.unattended.is_unattended(record.key)
        )

    async def _abandon_all(self, request: ResolutionRequest) -> None:
        """After a damaged store: trust what is recorded now, and reconcile every key."""
        for record in self.context.operations.journal.list_open():
            if record.hold is not None:
                await self._resolve(record, request)
                self.unattended.resolved(record)
        await self.context.store.clear_degraded(request.who, request.why)
        self.context.log.info("journal.resolved", who=request.who, why=request.why)
        now = trio.current_time()
        for controller in self.controllers().values():
            for key in {*controller.manifests, *controller.removing}:
                controller.lane.add(key, now, "resolved", Priority.ASKED)

    async def _resolve(self, record: OperationRecord, request: ResolutionRequest) -> None:
        """Record the decision in the journal, after everything that follows from it."""
        if request.resolution in CLOSING:
            await self.context.operations.close_attempts(record.id)
        if request.resolution is Resolution.COMPLETE and not record.undoes:
            await self._record_done(record)
        await self.context.operations.journal.resolve(
            record.id, request.resolution, request.who, request.why
        )
        self.context.log.info(
            "operation.resolved",
            key=record.key,
            operation=record.id,
            name=record.name,
            decision=request.resolution.value,
            who=request.who,
            why=request.why,
        )

    def _enqueue(self, record: OperationRecord, request: ResolutionRequest) -> None:
        """Reconcile the key, unless the decision has completed its removal."""
        controller = self.controllers().get(controller_of(record.key))
        if controller is None:
            return
        now = trio.current_time()
        complete = request.resolution is Resolution.COMPLETE
        if complete and is_removal(record) and not record.undoes:
            finish_removal(controller, record.key, now)
        else:
            controller.lane.add(record.key, now, "resolved", Priority.ASKED)

    async def _record_done(self, record: OperationRecord) -> None:
        """Record the effect of a completed operation, as if it had succeeded."""
        store, pinned = self.context.store, record.pinned
        if not is_removal(record):
            await store.record_applied(
                record.key,
                pinned["kind"],
                pinned["spec"],
                pinned["fingerprint"],
                base=pinned["base"],
                complete=True,
            )
            return
        await store.forget(record.key)
        for name in ("output", "memory"):
            directory = self.context.state / name / directory_of(record.key)
            await self.inbox.run(partial(shutil.rmtree, directory, ignore_errors=True))

    def _drop(self, operation: str, reason: str, request: ResolutionRequest) -> None:
        self.context.log.warning(
            "resolution.rejected",
            operation=operation,
            reason=reason,
            decision=request.resolution.value,
            who=request.who,
        )

    def log_rejected(self, file: Path, reason: str) -> None:
        """Log that *file* contains no decision."""
        self.context.log.warning("resolution.rejected", operation=file.stem, reason=reason)

    def log_deferred(self, name: str, reason: str) -> None:
        """Log that the decision about the operation *name* is tried again later."""
        self.context.log.error("resolution.deferred", operation=name or None, reason=reason)

    def log_polling(self, reason: str) -> None:
        """Log that decisions are found by scans."""
        self.context.log.warning("resolution.polling", reason=reason, poll_interval_s=SCAN_INTERVAL)
