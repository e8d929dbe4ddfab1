"""Operations that a damaged store has lost while their programs still run.

The records in ``STATE/operations/ID`` do not depend on the store. After a damaged store was set
aside, each of them with a live program becomes an open operation of the new store, with the same
id, and held: its program is waited for or ended like that of any open operation, no other work on
its key begins meanwhile, and a person decides afterwards, since its spec and steps are lost.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from reconciled.core.errors import OperationAlreadyOpen, RecordDamaged
from reconciled.core.resources import Key
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Hold, OperationRecord
from reconciled.journal.sqlite.rows import read_past
from reconciled.journal.sqlite.store import Store
from reconciled.observe.bound_log import BoundLog
from reconciled.programs.survivors import Survivor, find_survivor

REASON = "the damaged store that contained it was set aside"
# The inputs that pin() records, as far as they are lost.
_LOST: dict[str, Any] = {
    "kind": "",
    "namespace": None,
    "spec": {},
    "fingerprint": "",
    "labels": {},
    "annotations": {},
    "file": "",
    "base": "",
}


def find_lost(
    store: Store, journal: OperationJournal, operations: Path, log: BoundLog
) -> list[OperationRecord]:
    """The operations in the directory *operations* with a live program that *store* has lost.

    Blocks: only for the start. A program without a readable record or key is logged.
    """
    if not (store.degraded or store.writer.meta.opened == 1) or not operations.is_dir():
        return []
    lost = []
    for directory in sorted(operations.iterdir()):
        if journal.find(directory.name) or _is_past(store, directory.name):
            continue
        try:
            survivor = find_survivor(directory)
        except (RecordDamaged, OSError) as error:
            log.error("program.unreadable", operation=directory.name, reason=str(error))
            continue
        if survivor is None:
            continue
        try:
            if survivor.alive:
                lost.append(_record(survivor, store.epoch))
        finally:
            survivor.close()
    return lost


async def restore_lost(
    lost: list[OperationRecord], journal: OperationJournal, log: BoundLog
) -> None:
    """Open the operations *lost* again, held. Raises WriteFailed, StoreClosed."""
    for record in lost:
        hold = record.hold
        assert hold is not None
        try:
            await journal.restore(record)
        except OperationAlreadyOpen as error:
            log.error("program.unreadable", key=record.key, operation=record.id, reason=str(error))
            continue
        log.error(
            "operation.held",
            key=record.key,
            operation=record.id,
            name=record.name,
            reason=hold.reason,
            evidence=hold.evidence,
            commands=[
                f"reconciled journal show {record.id}",
                f'reconciled journal resolve {record.id} --abandon --why "…"',
            ],
        )


def _is_past(store: Store, operation: str) -> bool:
    past = read_past(store.writer.connection, 1, operation)
    return bool(past.records or past.damaged)


def _record(survivor: Survivor, epoch: int) -> OperationRecord:
    assignment, operation = survivor.assignment, survivor.directory.name
    key = Key(assignment.key or f"unknown/{operation.lower()}")
    name = key.rpartition("/")[2]
    host = HostIdentity.current()
    pid = survivor.record.program.pid
    evidence = (
        f"its program {assignment.action} of attempt {assignment.attempt} (pid {pid}) was still"
        " running at the start; its spec and steps are lost"
    )
    return OperationRecord(
        operation,
        key,
        assignment.action,
        assignment.attempt,
        epoch,
        pinned={**_LOST, "name": name, "removal": assignment.action == "remove"},
        begun=(survivor.directory / "child").stat().st_mtime,
        hold=Hold(REASON, "lost", evidence, time.time()),
        critical=assignment.critical,
        boot_id=host.boot_id,
        machine_id=host.machine_id,
    )
