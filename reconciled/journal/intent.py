"""The intent of an operation on its way to the disk, with what goes there in the same commit."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import attrs

from reconciled.journal import rows
from reconciled.journal.mirror import Live, Mirror
from reconciled.journal.records import Ending, OperationRecord
from reconciled.journal.writer import Entry, Write, nothing


@attrs.define(eq=False)
class Intent:
    """One operation that is being opened.

    undone      the one that it takes back, which the same commit closes
    closed      that one as it is closed
    own         what else the commit writes: what the key owns from now on
    remembered  what that means in memory
    """

    record: OperationRecord
    undone: Live | None
    _mirror: Mirror
    _move: Callable[[sqlite3.Connection, OperationRecord], None]
    _close: Callable[[str, Ending], Any]
    closed: OperationRecord | None = None
    own: Write = nothing
    remembered: Callable[[], None] = nothing
    _left: bool = False

    def entry(self) -> Entry:
        """Its write. From here on the undone one is closing."""
        if self.undone is not None:
            self.undone.ending = Ending.ROLLED_BACK
        return Entry(self._write, self._committed, self._refused)

    def leave(self) -> None:
        """Nobody waits for it any more: it is closed as soon as it is open."""
        self._left = True
        if self._mirror.find(self.record.id) is not None:
            self._close(self.record.id, Ending.ABANDONED)

    def _write(self, connection: sqlite3.Connection) -> None:
        if self.closed is not None:
            self._move(connection, self.closed)
        rows.insert(connection, self.record)
        self.own(connection)

    def _committed(self) -> None:
        self.remembered()
        self._mirror.add(self.record)
        if self.closed is not None:
            self._mirror.drop(self.closed.id)
        if self._left:
            self._close(self.record.id, Ending.ABANDONED)

    def _refused(self) -> None:
        self._mirror.disclaim(self.record, self.undone)
        if self.undone is not None:
            self.undone.ending = None
