"""The daemon's side of ``journal resolve``: decisions of people are taken up and carried out.

1. A decision is taken before it is acted on, and its file goes only when what it says is durable:
   a kill in between repeats it, and never loses it.
2. It is for an operation that is held. One that is not held any more is left alone, with a line.
3. Whatever a controller is or is not configured as, its operations can be settled.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import asyncinotify
import attrs
import trio

from reconciled.core.queue.states import Priority
from reconciled.core.resources import controller_of, directory_of
from reconciled.journal import resolutions
from reconciled.journal.operation_record import OperationRecord, Resolution
from reconciled.journal.resolutions import ResolutionRequest
from reconciled.journal.sqlite.store import StoreClosed, WriteFailed
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.operations.pinned import is_removal
from reconciled.runtime.runs.completion import finish_removal
from reconciled.threads import in_thread

# Seconds between two looks where the kernel gives no notice, or something has to be tried again.
SCAN_INTERVAL = 5.0
# A start waits so long for the first look: longer, and a full disk would keep it from starting.
FIRST_SCAN_TIMEOUT = 5.0
CLOSING = frozenset({Resolution.COMPLETE, Resolution.ABANDON})


@attrs.define(eq=False)
class Resolutions:
    """Carries decisions out. controllers() gives those that run, by name."""

    context: RuntimeContext
    controllers: Callable[[], Mapping[str, Controller]]
    scanned: trio.Event = attrs.field(factory=trio.Event, init=False)

    def prepare(self) -> None:
        """Make the directory; decisions of an earlier life are in it. Raises OSError."""
        resolutions.make_directory(self.context.state)

    async def wait_first_scan(self) -> None:
        """Wait until what was decided while the daemon was down is settled, at most FIRST_LOOK."""
        with trio.move_on_after(FIRST_SCAN_TIMEOUT):
            await self.scanned.wait()

    async def serve(self) -> None:
        """Take decisions as they come; for a service nursery. Runs until cancelled.

        Cancelled while it acts on one, that is acted on again by the next start.
        """
        with contextlib.ExitStack() as stack:
            inotify = None
            try:
                inotify = stack.enter_context(asyncinotify.Inotify(sync_timeout=0))
                directory = self.context.state / resolutions.DIRECTORY
                inotify.add_watch(directory, asyncinotify.Mask.MOVED_TO)
            except OSError as error:
                # Other programs have used up the kernel's limit: slower, and nothing is lost.
                inotify = None
                reason = f"the kernel gives no notice of it: {error}"
                self.context.log.warning(
                    "resolution.polling", reason=reason, look_every_s=SCAN_INTERVAL
                )
            while True:
                again = await self.scan()
                self.scanned.set()
                if inotify is None:
                    await trio.sleep(SCAN_INTERVAL)
                    continue
                with trio.move_on_after(SCAN_INTERVAL if again else math.inf):
                    await trio.lowlevel.wait_readable(inotify.fd)
                while inotify.sync_get() is not None:
                    pass

    async def scan(self) -> bool:
        """Act on every decision that is there; whether one of them has to be tried again."""
        again = False
        try:
            files = resolutions.take_all(self.context.state)
        except OSError as error:
            self.context.log.error("resolution.deferred", reason=str(error))
            return True
        for file in files:
            try:
                await self._act(file)
                resolutions.remove_finished(file)
            except (OSError, WriteFailed, StoreClosed) as error:
                self.context.log.error(
                    "resolution.deferred", operation=file.stem, reason=str(error)
                )
                again = True
        return again

    async def _act(self, file: Path) -> None:
        try:
            decided = resolutions.read(file)
        except ValueError as error:
            self._drop(file.stem, str(error))
            return
        if decided.operation == resolutions.ALL_OPERATIONS:
            if decided.resolution is Resolution.ABANDON:
                await self._everything(decided)
            else:
                self._drop(decided.operation, "everything can only be abandoned", decided)
            return
        record = self.context.operations.journal.find(decided.operation)
        if record is not None and record.hold is not None:
            await self._record_resolution(record, decided)
            self._queue(record, decided)
        # Else a daemon was cut off before the file went: recovery goes by what it has noted.
        elif record is None or record.pending_resolution != decided.resolution.value:
            self._drop(decided.operation, "it is not held any more", decided)

    async def _everything(self, decided: ResolutionRequest) -> None:
        """After a damaged store: trust what is there now, and let every key have its turn."""
        for record in self.context.operations.journal.list_open():
            if record.hold is not None:
                await self._record_resolution(record, decided)
        await self.context.store.clear_degraded(decided.who, decided.why)
        self.context.log.info("journal.resolved", who=decided.who, why=decided.why)
        now = trio.current_time()
        for controller in self.controllers().values():
            for key in {*controller.manifests, *controller.removing}:
                controller.lane.add(key, now, "resolved", Priority.ASKED)

    async def _record_resolution(self, record: OperationRecord, decided: ResolutionRequest) -> None:
        """Have the journal say it; what follows from it is written before."""
        if decided.resolution in CLOSING:
            await self.context.operations.close_attempts(record.id)
        if decided.resolution is Resolution.COMPLETE and not record.undoes:
            await self._record_done(record)
        await self.context.operations.journal.resolve(
            record.id, decided.resolution, decided.who, decided.why
        )
        self.context.log.info(
            "operation.resolved",
            key=record.key,
            operation=record.id,
            name=record.name,
            decision=decided.resolution.value,
            who=decided.who,
            why=decided.why,
        )

    def _queue(self, record: OperationRecord, decided: ResolutionRequest) -> None:
        """What is declared has its turn, unless a removal is over by this."""
        controller = self.controllers().get(controller_of(record.key))
        if controller is None:
            return
        now = trio.current_time()
        complete = decided.resolution is Resolution.COMPLETE
        if complete and is_removal(record) and not record.undoes:
            finish_removal(controller, record.key, now)
        else:
            controller.lane.add(record.key, now, "resolved", Priority.ASKED)

    async def _record_done(self, record: OperationRecord) -> None:
        """What it was to do is there, a person says: as if it had ended well."""
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
        for place in ("output", "memory"):
            directory = self.context.state / place / directory_of(record.key)
            await in_thread(partial(shutil.rmtree, directory, ignore_errors=True))

    def _drop(self, operation: str, reason: str, decided: ResolutionRequest | None = None) -> None:
        told = {} if decided is None else {"decision": decided.resolution.value, "who": decided.who}
        self.context.log.warning("resolution.rejected", operation=operation, reason=reason, **told)
