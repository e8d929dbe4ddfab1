"""Adoption: the daemon waits for a program that outlived an earlier daemon.

1. Adoption belongs to the key and the daemon: the wait is a task beside the controllers, under
   the daemon's own stop. A reload changes nothing about it, not even one that removes the
   controller; at its end the key is queued with the controller that has the key then.
2. Programs are adopted once, at the start, before a controller runs. A program that is found later
   belongs to a run of this daemon, which waits for it: a reload adopts none.
3. An adopted program counts as critical work in a stop, with what is left of its own budget.
4. It holds no concurrency slot: its key is queued only once it has ended, even if it cannot be
   killed.
5. A program of an operation without a critical part is ended at once.
6. After a reboot no program is left to adopt.
"""

from __future__ import annotations

import attrs
import trio

from reconciled.core.errors import RecordDamaged
from reconciled.core.queue.states import Priority
from reconciled.core.resources import controller_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.programs.survivors import Survivor, find_survivor
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.runs.unattended import UnattendedKeys
from reconciled.stop import Overrun, Work


def enqueue_open_operations(controller: Controller, now: float) -> None:
    """Queue every key of *controller* with an open operation for recovery.

    A key whose program was adopted is queued when the program has ended; a key that a run of the
    controller's predecessor works on, after that run.
    """
    context = controller.context
    for record in context.operations.journal.list_open():
        if controller_of(record.key) == controller.name and record.key not in context.adopting:
            controller.lane.add(record.key, now, "recovery", Priority.RECOVERY)


@attrs.define(eq=False)
class ProgramAdoption:
    """The adopted programs of one daemon. Its task is supervise()."""

    context: RuntimeContext
    unattended: UnattendedKeys
    _nursery: trio.Nursery | None = attrs.field(default=None, init=False)

    async def supervise(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Hold the nursery of the waits until a stop has begun and the last of them has ended."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await self.context.stop.began.wait()

    def adopt_survivors(self) -> None:
        """Start waiting for each program of an open operation that is alive. Synchronous."""
        for record in self.context.operations.journal.list_open():
            if record.key not in self.context.adopting:
                self._adopt(record)

    def _adopt(self, record: OperationRecord) -> None:
        context = self.context
        try:
            survivor = find_survivor(context.operations.root / record.id)
        except (RecordDamaged, OSError) as error:
            # Recovery reads the same record and holds the key for it.
            context.log.error(
                "program.unreadable", key=record.key, operation=record.id, reason=str(error)
            )
            return
        if survivor is None:
            return
        if not survivor.alive or self._nursery is None:
            survivor.close()
            return
        context.adopting.add(record.key)
        name = f"adopted {record.key}"
        self._nursery.start_soon(self._wait, record, survivor, name, name=name)

    async def _wait(self, record: OperationRecord, survivor: Survivor, name: str) -> None:
        """Wait for *survivor* within its budget, then end it; attend to its key in every case."""
        context = self.context
        log = context.log.bind(key=record.key, operation=record.id)
        left = survivor.remaining()
        action, pid = survivor.assignment.action, survivor.record.program.pid
        log.info("program.adopted", action=action, pid=pid, budget_s=round(left, 1))
        try:
            with Work(name, context.stop, record.key) as work:
                if left > 0:
                    try:
                        async with work.critical(record.name, budget=left):
                            end = await survivor.wait()
                        if end is not None and end.code is not None:
                            # No signal of ours ended it.
                            context.adopted.add(record.id)
                    except Overrun as overrun:
                        log.error("program.overran", reason=str(overrun))
                # Not critical, or out of budget: end it, since its key waits for it.
                if survivor.alive:
                    async with work.cleanup("end of an adopted program"):
                        await survivor.terminate(term=context.stop.limits.cleanup / 2)
                if survivor.alive:
                    reason = "the process survives SIGKILL"
                    if not survivor.owned:
                        reason = "the state directory is on another device than at its start"
                    log.error("program.stuck", pid=pid, reason=reason)
                    await survivor.wait()
        except (RecordDamaged, OSError) as error:
            # The wait is over; recovery reads the same record and holds the key for it.
            log.error("program.unreadable", reason=str(error))
        finally:
            context.adopting.remove(record.key)
            survivor.close()
            self.unattended.attend(record.key, "its program ended")
