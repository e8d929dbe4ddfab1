"""Adoption: the daemon waits for a program that outlived an earlier daemon.

1. An adopted program counts as critical work in a stop, with what is left of its own budget.
2. It holds no concurrency slot: its key is queued only once it has ended, even if it cannot be
   killed.
3. A program of an operation without a critical part is ended at once.
4. After a reboot no program is left to adopt.
"""

from __future__ import annotations

import trio

from reconciled.core.errors import RecordDamaged
from reconciled.core.queue.states import Priority
from reconciled.core.resources import controller_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.programs.survivors import Survivor, find_survivor
from reconciled.runtime.controllers.controller import Controller
from reconciled.stop import Overrun, Work


def enqueue_open_operations(controller: Controller, now: float) -> None:
    """Queue every key of *controller* with an open operation for recovery.

    Where a program of the operation still runs, it is adopted, and its key waits for it.
    """
    for record in controller.context.operations.journal.list_open():
        if controller_of(record.key) != controller.name:
            continue
        if not adopt(controller, record):
            controller.lane.add(record.key, now, "recovery", Priority.RECOVERY)


def adopt(controller: Controller, record: OperationRecord) -> bool:
    """Start waiting for the program of *record*; False if none is alive. Synchronous."""
    context = controller.context
    if record.key in context.adopting:
        return True
    try:
        survivor = find_survivor(context.operations.root / record.id)
    except (RecordDamaged, OSError) as error:
        # Recovery reads the same record and holds the key for it.
        context.log.error(
            "program.unreadable", key=record.key, operation=record.id, reason=str(error)
        )
        return False
    if survivor is None:
        return False
    if not survivor.alive or controller.nursery is None:
        survivor.close()
        return False
    context.adopting.add(record.key)
    name = f"adopted {record.key}"
    controller.nursery.start_soon(_wait, controller, record, survivor, name, name=name)
    return True


async def _wait(
    controller: Controller, record: OperationRecord, survivor: Survivor, name: str
) -> None:
    """Wait for *survivor* within its budget, then end it; queue its key in every case."""
    log = controller.context.log.bind(key=record.key, operation=record.id)
    left = survivor.remaining()
    action, pid = survivor.assignment.action, survivor.record.program.pid
    log.info("program.adopted", action=action, pid=pid, budget_s=round(left, 1))
    try:
        with Work(name, controller.stop, record.key) as work:
            if left > 0:
                try:
                    async with work.critical(record.name, budget=left):
                        await survivor.wait()
                except Overrun as overrun:
                    log.error("program.overran", reason=str(overrun))
            # Not critical, or out of budget: end it, since its key waits for it.
            if survivor.alive:
                async with work.cleanup("end of an adopted program"):
                    await survivor.terminate(term=controller.stop.limits.cleanup / 2)
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
        controller.context.adopting.remove(record.key)
        survivor.close()
        now = trio.current_time()
        controller.lane.add(record.key, now, "its program ended", Priority.RECOVERY)
