"""Views of an interrupted operation: what observe() and recover() of its reconciler are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from reconciled.core.recovery import Interrupted, ProgramEnd, Step, StepKind
from reconciled.journal.operation_record import OperationRecord, StepState
from reconciled.programs.survivors import find_survivor
from reconciled.runtime.operations.operation import Operations, RunOperation
from reconciled.runtime.operations.pinned import is_removal
from reconciled.stop import Work


@attrs.define(eq=False)
class InterruptedOperation(RunOperation):
    """The operation as observe() gets it: programs that observe() runs may belong to it.

    ended  how its program ended after the daemon had ended; None: no record, or none outlived it
    """

    ended: ProgramEnd | None = None


def operation_for_observe(
    operations: Operations, record: OperationRecord, work: Work, ended: ProgramEnd | None
) -> InterruptedOperation:
    """*record* for observe(), in a run of *work*."""
    return InterruptedOperation(record, work, operations.journal, operations.root, ended=ended)


def operation_for_recover(
    operations: Operations, record: OperationRecord, spec: Any
) -> Interrupted:
    """*record* for recover().

    Raises RecordDamaged or OSError where the program's exit record cannot be read.
    """
    return Interrupted(
        record.id,
        record.key,
        record.name,
        spec,
        record.attempt,
        tuple(
            Step(step.name, StepKind(step.kind), step.state is StepState.DONE, step.data)
            for step in record.steps
        ),
        removal=is_removal(record),
        undoes=record.undoes,
        ended=_program_end(operations.root / record.id),
    )


def _program_end(directory: Path) -> ProgramEnd | None:
    """How the program of the operation in *directory* ended, if it outlived the daemon."""
    survivor = find_survivor(directory)
    if survivor is None:
        return None
    try:
        end = survivor.end
        if end is None:
            return None
        return ProgramEnd(end.assignment.action, end.code, end.signal)
    finally:
        survivor.close()
