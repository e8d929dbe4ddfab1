"""Applied specs: one row for each key, with a checksum."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from reconciled.core.resources import Fingerprint, Key, controller_of
from reconciled.journal.sqlite.rows import checksum, verify_row

_ROWS = "SELECT key, kind, fingerprint, base, at, complete, spec, sum FROM applied"


@attrs.frozen
class Applied:
    """The last applied spec of one key.

    fingerprint  of the spec
    complete     False from before the first effect of the spec until it is done: it may be
                 applied in part
    base         the directory of the manifest
    at           wall time of the last change of this row, in seconds, for people
    """

    key: Key
    kind: str
    fingerprint: Fingerprint
    base: str
    at: float
    complete: bool
    _spec: str

    @property
    def spec(self) -> dict[str, Any]:
        """The spec as plain data. Parsed at each call: most are never used."""
        spec: dict[str, Any] = json.loads(self._spec)
        return spec


def write_applied(connection: sqlite3.Connection, applied: Applied) -> None:
    """Insert or replace the row of its key."""
    columns = (
        applied.key,
        applied.kind,
        applied.fingerprint,
        applied.base,
        float(applied.at),
        int(applied.complete),
        applied._spec,  # noqa: SLF001 - the JSON text of the row
    )
    connection.execute(
        "INSERT OR REPLACE INTO applied (key, kind, fingerprint, base, at, complete, spec, sum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (*columns, checksum("applied", *columns)),
    ).close()


def read_applied_key(connection: sqlite3.Connection, key: Key) -> Applied | None:
    """The row of *key*; None: none. Raises rows.RowDamaged."""
    row = connection.execute(f"{_ROWS} WHERE key = ?", (key,)).fetchone()
    return None if row is None else _applied_from(row)


def read_all_applied(connection: sqlite3.Connection) -> dict[str, dict[Key, Applied]]:
    """Every row, by controller and key. Raises rows.RowDamaged."""
    found: dict[str, dict[Key, Applied]] = {}
    for row in connection.execute(f"{_ROWS} ORDER BY key"):
        found.setdefault(controller_of(row[0]), {})[row[0]] = _applied_from(row)
    return found


def read_fingerprints(connection: sqlite3.Connection) -> Iterator[tuple[Key, Fingerprint, bool]]:
    """Key, fingerprint and completeness of each row."""
    for key, fingerprint, complete in connection.execute(
        "SELECT key, fingerprint, complete FROM applied"
    ):
        yield key, fingerprint, bool(complete)


def verify_applied(connection: sqlite3.Connection) -> None:
    """Verify every row of applied and of sources. Raises rows.RowDamaged."""
    for row in connection.execute(_ROWS):
        verify_row("applied", row)
    for row in connection.execute("SELECT controller, source, identity, sum FROM sources"):
        verify_row("sources", row)


def _applied_from(row: Sequence[Any]) -> Applied:
    key, kind, fingerprint, base, at, complete, spec = verify_row("applied", tuple(row))
    return Applied(key, kind, fingerprint, base, at, bool(complete), spec)
