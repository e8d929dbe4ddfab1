"""The open operations in memory: what the disk has, and what is on its way there.

At or ahead of the disk, never behind: a change shows here when it is asked for, and whoever
asked goes on only when it is durable.
"""

from __future__ import annotations

import attrs

from reconciled.core.errors import OperationAlreadyOpen, OperationUnknown
from reconciled.core.resources import Key
from reconciled.journal.operation_record import Ending, OperationRecord


@attrs.define(eq=False)
class OpenEntry:
    """One open operation; beside its record, what the disk does not have yet.

    unwritten  names of its steps
    changed    something of it that is no step
    ending     how it is being closed; None: it is not
    """

    record: OperationRecord
    unwritten_steps: set[str] = attrs.field(factory=set)
    changed: bool = False
    ending: Ending | None = None


@attrs.define(eq=False)
class OpenOperations:
    """Operations by id, and the one of each key, from before its intent is durable."""

    _open: dict[str, OpenEntry] = attrs.field(factory=dict)
    _by_key: dict[Key, OperationRecord] = attrs.field(factory=dict)

    def reserve_key(self, record: OperationRecord) -> None:
        """Let no other operation of its key begin, one that *record* undoes apart.

        Raises OperationOpen.
        """
        before = self._by_key.get(record.key)
        if before is not None and before.id != record.undoes:
            raise OperationAlreadyOpen(before.key, before.name, before.id)
        self._by_key[record.key] = record

    def release_key(self, record: OperationRecord, undone: OpenEntry | None) -> None:
        """Take claim() back: its intent will not be durable."""
        del self._by_key[record.key]
        if undone is not None:
            self._by_key[record.key] = undone.record

    def add(self, record: OperationRecord) -> None:
        """Its intent is durable."""
        self._open[record.id] = OpenEntry(record)
        self._by_key[record.key] = record

    def remove(self, operation: str) -> None:
        """Its outcome is durable. Its key may have one that undoes it."""
        record = self._open.pop(operation).record
        if self._by_key[record.key].id == operation:
            del self._by_key[record.key]

    def get(self, operation: str) -> OpenEntry:
        """The operation of that id. Raises OperationUnknown, for one that is over too."""
        live = self._open.get(operation)
        if live is None or live.ending is not None:
            raise OperationUnknown(operation)
        return live

    def list_open(self) -> list[OperationRecord]:
        """All of them, oldest first."""
        return [self._open[operation].record for operation in sorted(self._open)]

    def pending(self) -> tuple[OperationRecord, ...]:
        """Those that are over while their outcome is not durable."""
        return tuple(live.record for live in self._open.values() if live.ending is not None)

    def find(self, operation: str) -> OperationRecord | None:
        """The one of that id."""
        live = self._open.get(operation)
        return None if live is None else live.record

    def find_by_key(self, key: Key) -> OperationRecord | None:
        """The one of *key*, or the one whose intent is on its way."""
        found = self._by_key.get(key)
        return None if found is None else self.find(found.id) or found
