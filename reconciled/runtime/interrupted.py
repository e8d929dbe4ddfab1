"""What recover() is shown of an interrupted operation, and what a person has decided about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reconciled.core import recovery as core
from reconciled.core.recovery import Decision, Interrupted
from reconciled.journal.records import OperationRecord, StepState
from reconciled.programs import survivors
from reconciled.runtime.pinned import is_removal

if TYPE_CHECKING:
    from reconciled.runtime.host import Host


def interrupted_of(host: Host, record: OperationRecord, spec: Any) -> Interrupted:
    """*record* as recover() sees it. Raises Damaged or OSError for a program's unreadable end."""
    return Interrupted(
        record.id,
        record.key,
        record.name,
        spec,
        record.attempt,
        tuple(
            core.Step(step.name, core.StepKind(step.kind), step.state is StepState.DONE, step.data)
            for step in record.steps
        ),
        removal=is_removal(record),
        undoes=record.undoes,
        ended=_end_of_program(host, record),
    )


def _end_of_program(host: Host, record: OperationRecord) -> core.ProgramEnd | None:
    """What a program that outlived its daemon has left."""
    survivor = survivors.find(host.operations.root / record.id)
    if survivor is None:
        return None
    try:
        end = survivor.end
        if end is None:
            return None
        return core.ProgramEnd(end.assignment.action, end.code, end.signal)
    finally:
        survivor.close()


def word_of_person(word: str) -> Decision:
    """The decision that ``journal resolve`` noted."""
    decisions: dict[str, Decision] = {
        "forward": core.RollForward("a person decided so"),
        "back": core.RollBack("a person decided so"),
        "complete": core.Complete("a person decided so"),
        "abandon": core.Abandon("a person decided so"),
    }
    return decisions[word]
