"""Adoption: a program that outlived its daemon is waited for, never raced.

It counts as critical work in a stop, with what is left of its own budget, and holds no
concurrency slot: its key is not queued before it has ended, even if it cannot be killed. An
ordinary one is ended at once, and after a reboot there is nothing to wait for.
"""

from __future__ import annotations

import trio

from reconciled.core.errors import RecordDamaged
from reconciled.core.queue.entry import Priority
from reconciled.core.resources import controller_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.programs.survivors import Survivor, find_survivor
from reconciled.runtime.controllers.controller import Controller
from reconciled.stop import Overrun, Work


def enqueue_open_operations(controller: Controller, now: float) -> None:
    """Have every open operation of *controller* recovered, before other work on its key.

    A program that is still at it is adopted first: its key waits for it.
    """
    host = controller.context
    for record in host.operations.journal.list_open():
        if controller_of(record.key) != controller.name:
            continue
        if not adopt(controller, record):
            controller.lane.add(record.key, now, "recovery", Priority.RECOVERY)


def adopt(controller: Controller, record: OperationRecord) -> bool:
    """Wait for the program of *record*, if one lives. Synchronous; True if it does."""
    host = controller.context
    if record.key in host.adoptions:
        return True
    try:
        survivor = find_survivor(host.operations.root / record.id)
    except (RecordDamaged, OSError) as error:
        # Recovery reads the same and holds the key for it.
        host.log.error("program.unreadable", key=record.key, operation=record.id, reason=str(error))
        return False
    if survivor is None:
        return False
    if not survivor.alive or controller.nursery is None:
        survivor.close()
        return False
    host.adoptions.add(record.key, record.id)
    name = f"adopted {record.key}"
    controller.nursery.start_soon(_wait, controller, record, survivor, name, name=name)
    return True


async def _wait(
    controller: Controller, record: OperationRecord, survivor: Survivor, name: str
) -> None:
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
            # Ordinary, or out of time: its key must not wait for it.
            if survivor.alive:
                async with work.cleanup("end of an adopted program"):
                    await survivor.terminate(term=controller.stop.limits.cleanup / 2)
            if survivor.alive:
                log.error("program.stuck", pid=pid, reason="it survives SIGKILL")
                await survivor.wait()
    except (RecordDamaged, OSError) as error:
        # It is over, and recovery reads the same.
        log.error("program.unreadable", reason=str(error))
    finally:
        controller.context.adoptions.remove(record.key)
        survivor.close()
        now = trio.current_time()
        controller.lane.add(record.key, now, "its program ended", Priority.RECOVERY)
