"""What the store knows of itself: one row, so that it is whole or not there."""

from __future__ import annotations

import json
import sqlite3

import attrs

from reconciled.journal.rows import checksum, dumped, verified


@attrs.frozen
class Meta:
    """The store's own numbers.

    epoch     how often a daemon has opened it
    opened    how often it was opened, copies after a failed sync included
    closed    the last opening that was closed, or could not lose anything any more
    degraded  why it does not know all that was done; empty: it does
    settled   who ended that, and why
    """

    epoch: int = 0
    opened: int = 0
    closed: int = 0
    degraded: str = ""
    settled: str = ""


def read_meta(connection: sqlite3.Connection) -> Meta:
    """The row, or zeros in a store that was made this instant. Raises rows.RowDamaged."""
    row = connection.execute("SELECT name, value, sum FROM meta WHERE name = 'store'").fetchone()
    return Meta() if row is None else Meta(**json.loads(verified("meta", row)[1]))


def write_meta(connection: sqlite3.Connection, meta: Meta) -> None:
    """Write the row, as a part of the transaction that is open."""
    columns = ("store", dumped(attrs.asdict(meta)))
    connection.execute(
        "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (*columns, checksum("meta", *columns))
    ).close()
