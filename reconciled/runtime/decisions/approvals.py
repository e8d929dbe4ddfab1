"""Held removals in the daemon: reported to people in NAME.held, approved by them in NAME.allow.

Removals are held in memory, by the guard of their controller: a report that is not written yet
delays a person's decision, and never lets a removal pass. The guard of a controller that starts
holds again what was reported last, by this daemon or an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.core.removal_guard import HeldRemovals
from reconciled.core.resources import Key
from reconciled.journal import removal_approvals
from reconciled.journal.decision_files import DecisionFiles
from reconciled.journal.removal_approvals import PendingApproval
from reconciled.observe.bound_log import BoundLog
from reconciled.runtime.decisions.inbox import SCAN_INTERVAL, Inbox

SHOWN = 20  # keys in a log line
FLUSH_TIMEOUT = 1.0  # seconds of a stop for reports that are not written yet


@attrs.define(eq=False)
class RemovalApprovals:
    """Reports held removals, and receives their approvals.

    on_approved(controller, keys) is called in the event loop for each approval.
    """

    state: Path
    log: BoundLog
    on_approved: Callable[[str, frozenset[Key]], None]
    # A kill between the removal of its file and its effect: a person is asked again.
    at_most_once: bool = attrs.field(default=True, init=False)
    inbox: Inbox[frozenset[Key]] = attrs.field(init=False)
    _reported: dict[str, HeldRemovals | None] = attrs.field(factory=dict, init=False)
    # The last report of each controller that has one to be written, the oldest first.
    _unwritten: dict[str, HeldRemovals | None] = attrs.field(factory=dict, init=False)
    # Reports that could not be written, for the next try.
    _failed: dict[str, HeldRemovals | None] = attrs.field(factory=dict, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)
    _writing: trio.Lock = attrs.field(factory=trio.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        self.inbox = Inbox(removal_approvals.approval_files(self.state), self)

    # -- reports -----------------------------------------------------------------------------

    def report_held(self, controller: str, held: HeldRemovals | None) -> None:
        """Report that removals are held, or none any more; once for each change. Never blocks.

        None also removes the report of an earlier daemon: only for what is known not to be held.
        """
        if controller in self._reported and _keys(self._reported[controller]) == _keys(held):
            return
        self._reported[controller] = held
        self._unwritten.pop(controller, None)
        self._failed.pop(controller, None)
        self._unwritten[controller] = held
        self._changed.set()

    async def last_held(self, controller: str) -> HeldRemovals | None:
        """What was held by the last report, which may be that of an earlier daemon."""
        if controller in self._reported:
            return self._reported[controller]
        try:
            read = partial(removal_approvals.read_pending, self.state, controller)
            report = await self.inbox.run(read)
        except (OSError, ValueError) as error:
            self.log.error("removals.unreadable", controller=controller, reason=str(error))
            return None
        if report is None:
            return None
        return HeldRemovals(tuple(sorted(report.keys)), report.owned, trio.current_time())

    async def serve_reports(self) -> None:
        """Write reports as they come; for a service nursery. Runs until cancelled.

        One that cannot be written is tried again, since ``allow`` approves only what is written.
        """
        while True:
            with trio.move_on_after(SCAN_INTERVAL if self._failed else math.inf):
                await self._changed.wait()
            self._changed = trio.Event()
            await self._write_reports()

    async def flush(self) -> None:
        """Wait until every report is written, at most FLUSH_TIMEOUT."""
        with trio.move_on_after(FLUSH_TIMEOUT):
            await self._write_reports()

    async def _write_reports(self) -> None:
        async with self._writing:
            failed, self._failed = self._failed, {}
            for controller, held in failed.items():
                await self._write(controller, held)
            while self._unwritten:
                controller = next(iter(self._unwritten))
                held = self._unwritten.pop(controller)
                existed = await self._write(controller, held)
                # Afterwards: the command in the line reads the file.
                if held is not None:
                    self._log_held(controller, held)
                elif existed:
                    self.log.info("removals.released", controller=controller)

    async def _write(self, controller: str, held: HeldRemovals | None) -> bool:
        """Write NAME.held, or remove it; False: there was none."""
        try:
            if held is None:
                remove = partial(removal_approvals.remove_held, self.state, controller)
                return await self.inbox.run(remove)
            report = PendingApproval(controller, held.keys, held.owned)
            await self.inbox.run(partial(removal_approvals.write_held, self.state, report))
        except OSError as error:
            self.log.error("removals.unwritable", controller=controller, reason=str(error))
            if controller not in self._unwritten:
                self._failed[controller] = held
        return True

    def _log_held(self, controller: str, held: HeldRemovals) -> None:
        self.log.warning(
            "removals.held",
            controller=controller,
            count=len(held.keys),
            owned=held.owned,
            keys=list(held.keys[:SHOWN]),
            reason=str(held),
            commands=[f"reconciled allow {controller}"],
        )

    # -- approvals ---------------------------------------------------------------------------

    async def serve(self) -> None:
        """Act on approvals as they come; for a service nursery. Runs until cancelled."""
        await self.inbox.serve()

    def read(self, files: DecisionFiles, file: Path) -> frozenset[Key]:
        """The keys that *file* approves. Raises OSError, or ValueError."""
        return removal_approvals.read_approval(files, file)

    async def act(self, name: str, decision: frozenset[Key]) -> None:
        """Approve the removal of these keys of the controller *name*."""
        self.log.info("removals.approved", controller=name, count=len(decision))
        self.on_approved(name, decision)
        await trio.lowlevel.checkpoint()

    def log_rejected(self, file: Path, reason: str) -> None:
        """Log that *file* approves nothing."""
        self.log.error("removals.bad_approval", file=str(file), reason=reason)

    def log_deferred(self, name: str, reason: str) -> None:
        """Log that the approval *name* is tried again later."""
        self.log.error("removals.deferred", controller=name or None, reason=reason)

    def log_polling(self, reason: str) -> None:
        """Log that approvals are found by scans."""
        self.log.warning("removals.polling", reason=reason, poll_interval_s=SCAN_INTERVAL)


def _keys(held: HeldRemovals | None) -> tuple[Key, ...]:
    return () if held is None else held.keys
