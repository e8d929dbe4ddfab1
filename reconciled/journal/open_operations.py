"""The open operations in memory: what is on the disk, and what is being written.

The memory is at or ahead of the disk, never behind: a change is visible here when it is requested,
and the caller continues only when it is durable.
"""

from __future__ import annotations

import attrs

from reconciled.core.errors import OperationAlreadyOpen, OperationUnknown
from reconciled.core.resources import Key
from reconciled.journal.operation_record import Ending, OperationRecord


@attrs.define(eq=False)
class OpenEntry:
    """One open operation, and what of it is not on the disk yet.

    unwritten_steps  names of steps to be written
    changed          whether anything but a step has to be written
    ending           how it is being closed; None: it is not
    """

    record: OperationRecord
    unwritten_steps: set[str] = attrs.field(factory=set)
    changed: bool = False
    ending: Ending | None = None


@attrs.define(eq=False)
class OpenOperations:
    """Open operations by id, and by key from the reservation of the key on."""

    _open: dict[str, OpenEntry] = attrs.field(factory=dict)
    _by_key: dict[Key, OperationRecord] = attrs.field(factory=dict)

    def reserve_key(self, record: OperationRecord) -> None:
        """Reserve the key of *record*: no other operation of it can begin.

        An open operation that *record* undoes does not count. Raises OperationAlreadyOpen.
        """
        before = self._by_key.get(record.key)
        if before is not None and before.id != record.undoes:
            raise OperationAlreadyOpen(before.key, before.name, before.id)
        self._by_key[record.key] = record

    def release_key(self, record: OperationRecord, undone: OpenEntry | None) -> None:
        """Revert reserve_key(): the intent will not become durable."""
        del self._by_key[record.key]
        if undone is not None:
            self._by_key[record.key] = undone.record

    def add(self, record: OperationRecord) -> None:
        """Add an operation whose intent is durable."""
        self._open[record.id] = OpenEntry(record)
        self._by_key[record.key] = record

    def remove(self, operation: str) -> None:
        """Remove an operation whose outcome is durable; its key may have one that undoes it."""
        record = self._open.pop(operation).record
        if self._by_key[record.key].id == operation:
            del self._by_key[record.key]

    def get(self, operation: str) -> OpenEntry:
        """The operation of that id. Raises OperationUnknown, also while it is being closed."""
        entry = self._open.get(operation)
        if entry is None or entry.ending is not None:
            raise OperationUnknown(operation)
        return entry

    def list_open(self) -> list[OperationRecord]:
        """All open operations, oldest first."""
        return [self._open[operation].record for operation in sorted(self._open)]

    def pending(self) -> tuple[OperationRecord, ...]:
        """Operations that have ended while their outcome is not durable."""
        return tuple(entry.record for entry in self._open.values() if entry.ending is not None)

    def find(self, operation: str) -> OperationRecord | None:
        """The operation of that id; None: it is not open."""
        entry = self._open.get(operation)
        return None if entry is None else entry.record

    def find_by_key(self, key: Key) -> OperationRecord | None:
        """The operation of *key*, also one whose intent is being written; None: none."""
        found = self._by_key.get(key)
        return None if found is None else self.find(found.id) or found
