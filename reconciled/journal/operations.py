"""Operations: what is begun, which steps it took, how it ended.

1. One open operation a key.
2. An id is unique in the world, sorts by time, and is never used again: it is the idempotency
   key that programs and remote sides see.
3. begin(), step() and end() return only when what they note is as durable as the
   implementation makes it; the caller takes effect afterwards (invariant 3).

``VolatileOperations`` keeps them in memory: they end with the process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import trio

from reconciled.core.resources import Key
from reconciled.journal.ids import OperationIds
from reconciled.journal.records import (
    Ending,
    OperationOpen,
    OperationRecord,
    OperationUnknown,
    StepRecord,
    StepState,
)

__all__ = ["Ending", "OperationLog", "OperationRecord", "StepState", "VolatileOperations"]


class OperationLog(Protocol):
    """Where operations are noted; *operation* is an id. A cancelled call may have noted or not."""

    async def begin(self, key: Key, name: str, pinned: Any) -> OperationRecord:
        """Open an operation. Raises OperationOpen."""

    async def step(
        self, operation: str, name: str, kind: str, state: StepState, data: Any = None
    ) -> Any:
        """Note a step and give *data* back as JSON keeps it.

        Raises TypeError for what JSON cannot express, OperationUnknown.
        """

    async def end(self, operation: str, ending: Ending) -> None:
        """Close an operation. Raises OperationUnknown."""

    def open(self) -> list[OperationRecord]:
        """The open operations, oldest first."""

    def find(self, operation: str) -> OperationRecord | None:
        """The open operation of that id."""


@attrs.define(eq=False)
class VolatileOperations:
    """The log in memory. ``open()`` is what a dump shows."""

    epoch: int
    _ids: OperationIds = attrs.field(factory=OperationIds)
    _now: Callable[[], float] = time.time
    _open: dict[str, OperationRecord] = attrs.field(factory=dict)
    _by_key: dict[Key, str] = attrs.field(factory=dict)

    async def begin(self, key: Key, name: str, pinned: Any) -> OperationRecord:
        """Open an operation. Raises OperationOpen; on cancellation nothing was noted."""
        await trio.lowlevel.checkpoint()
        if key in self._by_key:
            raise OperationOpen(self._open[self._by_key[key]])
        record = OperationRecord(
            self._ids.new(), key, name, 1, self.epoch, _plain(pinned), self._now()
        )
        self._open[record.id] = record
        self._by_key[key] = record.id
        return record

    async def step(
        self, operation: str, name: str, kind: str, state: StepState, data: Any = None
    ) -> Any:
        """Note a step, giving *data* back as JSON keeps it; a repeated name replaces it.

        On cancellation nothing was noted. Raises TypeError, OperationUnknown.
        """
        await trio.lowlevel.checkpoint()
        record = self._known(operation)
        step = StepRecord(name, kind, state, _plain(data))
        others = tuple(other for other in record.steps if other.name != name)
        self._open[operation] = attrs.evolve(record, steps=(*others, step))
        return step.data

    async def end(self, operation: str, ending: Ending) -> None:  # noqa: ARG002 - no history is kept
        """Close an operation; nothing of it stays. Raises OperationUnknown.

        Not cancellable: what ended has ended, whatever happens to its task.
        """
        record = self._known(operation)
        del self._open[operation]
        del self._by_key[record.key]
        await trio.lowlevel.cancel_shielded_checkpoint()

    def open(self) -> list[OperationRecord]:
        """The open operations, oldest first."""
        return sorted(self._open.values(), key=lambda record: record.id)

    def find(self, operation: str) -> OperationRecord | None:
        """The open operation of that id."""
        return self._open.get(operation)

    def _known(self, operation: str) -> OperationRecord:
        try:
            return self._open[operation]
        except KeyError:
            raise OperationUnknown(operation) from None


def _plain(value: Any) -> Any:
    """*value* as the durable log will give it back; TypeError for what it cannot keep."""
    return json.loads(json.dumps(value))
