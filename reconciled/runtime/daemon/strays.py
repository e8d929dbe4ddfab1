"""What an earlier life of the service has left in its control group, ended before a run begins.

``reap`` has seen to it after nearly every end. It may have been killed itself, and a unit may do
without it: then the manager says "Found left-over process" and starts us beside it.

1. A critical program of an open operation is left to its adoption, which waits for it.
2. Everybody else is ended: what an ordinary program goes on doing would race its own recovery.
3. Only for the unit's main process, before it is ready: until then nobody else belongs there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reconciled.journal.operation_record import OperationRecord
from reconciled.observe.bound_log import BoundLog
from reconciled.programs.cgroup import hidden_in, members_of
from reconciled.programs.reaper import Reaper
from reconciled.programs.survivors import TERM_GRACE


def end_leftovers(
    group: Path, operations: Path, found: Iterable[OperationRecord], log: BoundLog
) -> None:
    """End who is in *group* besides this process, but for critical programs of *found*.

    operations  the directory of operations
    found       those that are open

    Blocks while somebody is being ended, 10 s at most. Each measure is a line of the log.
    """
    # Our programs are in our group: where nobody is, no record has to be read.
    if not any(process.alive for process in members_of(group)) and not hidden_in(group):
        return

    def tell(text: str) -> None:
        log.warning("program.left_over", reason=text)

    adopted = frozenset(record.id for record in found)
    Reaper(0.0, TERM_GRACE, tell, group, adopted=adopted).reap(operations)
