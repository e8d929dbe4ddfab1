"""Operations as rows of the store, and the checksum that each row of the store has.

1. A row that does not match its checksum is not used: RowDamaged.
2. The row that begin() wrote for an operation is never rewritten. What changes has separate rows,
   one for each step: the cost of a step depends on its size, not on that of the operation.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from reconciled.core.resources import Key
from reconciled.journal.operation_record import (
    Ending,
    Hold,
    Note,
    OperationRecord,
    StepRecord,
    StepState,
)

# Columns of states; the others are written once, by begin().
_CHANGING = (
    "attempt",
    "epoch",
    "recoveries",
    "undone_by",
    "critical",
    "boot_id",
    "machine_id",
)
# Characters of a value that the history keeps unchanged. Nothing is recovered from the history,
# and a hundred thousand specs with the content of their files would be gigabytes.
PAST_VALUE_LIMIT = 2000
_FIXED = ("name", "pinned", "begun", "undoes")


class RowDamaged(sqlite3.DatabaseError):
    """A row of the store does not match its checksum."""

    def __init__(self, table: str, name: object) -> None:
        super().__init__(f"row {name} of table {table} does not match its checksum")


def checksum(table: str, *columns: Any) -> int:
    """The checksum of a row, its last column; *columns* as SQLite returns them."""
    text = "\0".join((table, *map(str, columns)))  # takes a third of the time of repr()
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def verify_row(table: str, row: tuple[Any, ...]) -> tuple[Any, ...]:
    """*row* without its checksum. Raises RowDamaged; the first column names the row."""
    columns = row[:-1]
    if checksum(table, *columns) != row[-1]:
        raise RowDamaged(table, row[0])
    return columns


def dump_json(value: Any) -> str:
    """*value* as JSON. Raises TypeError or ValueError for values that JSON cannot express."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def normalize_json(value: Any) -> Any:
    """*value* as the store returns it later. Raises TypeError for what it cannot store."""
    try:
        return json.loads(dump_json(value))
    except ValueError as exc:  # NaN, an infinity, or a reference cycle
        raise TypeError(str(exc)) from exc


def insert(connection: sqlite3.Connection, record: OperationRecord) -> None:
    """Insert a new open operation."""
    columns = (record.id, record.key, dump_json(_parts(record, (*_FIXED, *_CHANGING))))
    connection.execute(
        "INSERT INTO operations VALUES (?, ?, ?, ?)",
        (*columns, checksum("operations", *columns)),
    ).close()


def write_state(connection: sqlite3.Connection, record: OperationRecord) -> None:
    """Write what can change of *record*, except its steps."""
    columns = (record.id, dump_json(_state(record)))
    connection.execute(
        "INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (*columns, checksum("states", *columns))
    ).close()


def write_step(connection: sqlite3.Connection, record: OperationRecord, name: str) -> None:
    """Write the step *name* of *record*."""
    position = next(index for index, step in enumerate(record.steps) if step.name == name)
    columns = (record.id, name, dump_json([position, *_step(record.steps[position])]))
    connection.execute(
        "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", (*columns, checksum("steps", *columns))
    ).close()


def delete_steps(connection: sqlite3.Connection, operation: str) -> None:
    """Delete the steps of *operation*."""
    connection.execute("DELETE FROM steps WHERE operation = ?", (operation,)).close()


def move_to_past(connection: sqlite3.Connection, record: OperationRecord) -> None:
    """Move *record*, which has an ending, from the open operations to the history.

    Only short parts of long inputs and step data are kept.
    """
    connection.execute("DELETE FROM operations WHERE id = ?", (record.id,)).close()
    connection.execute("DELETE FROM states WHERE id = ?", (record.id,)).close()
    if record.steps:
        delete_steps(connection, record.id)
    columns = (record.id, record.key, record.ended, dump_json(_past_body(record)))
    connection.execute(
        "INSERT INTO past (id, key, ended, body, sum) VALUES (?, ?, ?, ?, ?)",
        (*columns, checksum("past", *columns)),
    ).close()


def read_open(connection: sqlite3.Connection) -> list[OperationRecord]:
    """The open operations, oldest first. Raises RowDamaged."""
    found: dict[str, OperationRecord] = {}
    for row in connection.execute("SELECT id, key, body, sum FROM operations ORDER BY id"):
        name, key, body = verify_row("operations", row)
        found[name] = OperationRecord(id=name, key=Key(key), **json.loads(body))
    for row in connection.execute("SELECT id, body, sum FROM states"):
        name, body = verify_row("states", row)
        if name not in found:
            raise RowDamaged("states", name)
        found[name] = attrs.evolve(found[name], **_state_from(json.loads(body)))
    steps: dict[str, list[tuple[int, StepRecord]]] = {}
    for row in connection.execute("SELECT operation, name, body, sum FROM steps"):
        operation, _, body = verify_row("steps", row)
        if operation not in found:
            raise RowDamaged("steps", operation)
        position, *columns = json.loads(body)
        steps.setdefault(operation, []).append((position, _step_from(columns)))
    for operation, listed in steps.items():
        ordered = tuple(step for _, step in sorted(listed, key=lambda pair: pair[0]))
        found[operation] = attrs.evolve(found[operation], steps=ordered)
    return list(found.values())


@attrs.frozen
class PastOperations:
    """Past operations, newest first; damaged: how many rows were left out."""

    records: tuple[OperationRecord, ...]
    damaged: int = 0


def read_past(connection: sqlite3.Connection, limit: int, prefix: str = "") -> PastOperations:
    """The last *limit* past operations whose id begins with *prefix*."""
    rows = connection.execute(
        "SELECT id, key, ended, body, sum FROM past WHERE id >= ? AND id < ?"
        " ORDER BY seq DESC LIMIT ?"
        if prefix
        else "SELECT id, key, ended, body, sum FROM past ORDER BY seq DESC LIMIT ?",
        (prefix, prefix + "\U0010ffff", limit) if prefix else (limit,),
    )
    found, damaged = [], 0
    for row in rows:
        try:
            found.append(_past_from(verify_row("past", row)))
        except RowDamaged:
            damaged += 1
    return PastOperations(tuple(found), damaged)


def prune(connection: sqlite3.Connection, keep: int, ended_before: float, limit: int) -> None:
    """Delete up to *limit* past operations: beyond *keep* in number, or ended before then.

    Deletes from the oldest on only: the cost does not grow with the size of the history.
    """
    (last,) = connection.execute("SELECT max(seq) FROM past").fetchone()
    if last is None:
        return
    surplus = last - keep  # the numbers have no gaps, since only the oldest are deleted
    expired = []
    for seq, ended in connection.execute(
        "SELECT seq, ended FROM past ORDER BY seq LIMIT ?", (limit,)
    ):
        if seq > surplus and ended >= ended_before:
            break
        expired.append(seq)
    if expired:
        connection.execute("DELETE FROM past WHERE seq <= ?", (expired[-1],)).close()


def _parts(record: OperationRecord, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _state(record: OperationRecord) -> dict[str, Any]:
    state = _parts(record, _CHANGING)
    state["hold"] = None if record.hold is None else attrs.asdict(record.hold)
    state["notes"] = [attrs.asdict(note) for note in record.notes]
    return state


def _state_from(state: Mapping[str, Any]) -> dict[str, Any]:
    hold = state["hold"]
    return {
        **state,
        "hold": None if hold is None else Hold(**hold),
        "notes": tuple(Note(**note) for note in state["notes"]),
    }


def _step(step: StepRecord) -> list[Any]:
    return [step.name, step.kind, step.state.value, step.data, step.attempt]


def _step_from(columns: list[Any]) -> StepRecord:
    name, kind, state, data, attempt = columns
    return StepRecord(name, kind, StepState(state), data, attempt)


def _past_body(record: OperationRecord) -> dict[str, Any]:
    assert record.ending is not None
    steps = (attrs.evolve(step, data=_truncate(step.data)) for step in record.steps)
    return {
        **_parts(record, _FIXED),
        **_state(record),
        "pinned": _truncate(record.pinned),
        "steps": [_step(step) for step in steps],
        "ending": record.ending.value,
    }


def _truncate(value: Any) -> Any:
    """What the history keeps of a value: the short parts of a long mapping, else nothing."""
    if len(dump_json(value)) <= PAST_VALUE_LIMIT:
        return value
    if not isinstance(value, dict):
        return None
    return {
        name: part for name, part in value.items() if len(dump_json(part)) <= PAST_VALUE_LIMIT // 10
    }


def _past_from(row: tuple[Any, ...]) -> OperationRecord:
    operation, key, ended, body = row
    whole = json.loads(body)
    steps = tuple(_step_from(columns) for columns in whole.pop("steps"))
    ending = Ending(whole.pop("ending"))
    return OperationRecord(
        id=operation,
        key=Key(key),
        ended=ended,
        ending=ending,
        steps=steps,
        **_state_from(whole),
    )
