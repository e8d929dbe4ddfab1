"""What the journal verbs work on: the state directory, and what a copy of its store contains."""

from __future__ import annotations

from pathlib import Path

import attrs

from reconciled.cli.journal.undo_check import UndoCheck
from reconciled.cli.terminal import print_error
from reconciled.journal.operation_record import OperationRecord
from reconciled.journal.sqlite.rows import read_open, read_past
from reconciled.journal.sqlite.schema import read_meta
from reconciled.journal.sqlite.snapshot import open_snapshot

PREFIX_LIMIT = 100  # past operations that are compared with a prefix
_SHOWN = 20  # of those that an ambiguous prefix matches


@attrs.frozen
class JournalTarget:
    """The state directory, and what can undo an operation of it."""

    state: Path
    undo_check: UndoCheck


@attrs.frozen
class JournalSnapshot:
    """The contents of a copy of the store.

    open      oldest first
    past      newest first
    damaged   past operations that are left out, since their rows are damaged
    degraded  why the store does not know everything that was done; empty: it does
    """

    open: tuple[OperationRecord, ...] = ()
    past: tuple[OperationRecord, ...] = ()
    damaged: int = 0
    degraded: str = ""

    def find(self, prefix: str) -> list[OperationRecord]:
        """The operations whose id begins with *prefix*."""
        return [each for each in (*self.open, *self.past) if each.id.startswith(prefix)]


def read_journal(state: Path, limit: int, prefix: str = "") -> JournalSnapshot:
    """What the store below *state* contains, with at most *limit* past operations.

    Raises StoreTooNew, StoreUnusable.
    """
    with open_snapshot(state) as connection:
        if connection is None:
            return JournalSnapshot()
        past = read_past(connection, limit, prefix)
        degraded = read_meta(connection).degraded
        return JournalSnapshot(tuple(read_open(connection)), past.records, past.damaged, degraded)


def find_operation(snapshot: JournalSnapshot, prefix: str) -> OperationRecord | None:
    """The one operation whose id begins with *prefix*; None, and an error printed, otherwise."""
    found = snapshot.find(prefix)
    if len(found) == 1:
        return found[0]
    if not found:
        print_error(f"there is no operation {prefix}: reconciled journal list shows the ids")
        return None
    print_error(f"{prefix} is ambiguous: matches {len(found)} operations; write more of the id:")
    for record in found[:_SHOWN]:
        print_error(f"  {record.id}  {record.key}  {record.name}")
    return None
