"""Operations as text for people and as data for programs. Pure: time is handed in.

Names and reasons come from plugins and programs: their control codes are replaced before they
reach a terminal. The pinned spec is left out, since it may contain secrets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from reconciled.core.durations import format_duration
from reconciled.core.recovery import resolve_commands
from reconciled.journal.operation_record import Note, OperationRecord, StepRecord, StepState
from reconciled.journal.resolutions import ResolutionRequest
from reconciled.runtime.operations.pinned import is_removal

_MEANS = {
    "--complete": "it is done: record that, and run nothing",
    "--forward": "continue the same operation at the step that it reached",
    "--back": "undo what it did, in a new operation",
    "--abandon": "close it, neither done nor undone; the next reconcile starts over",
}
_OPEN = "Open: the daemon recovers it, at its next start if no daemon is running."
_NO_RESULT = "started, no result recorded: it may or may not have taken effect"
_MAX_DATA = 200  # characters of a step's data


def state_of(record: OperationRecord, pending: ResolutionRequest | None = None) -> str:
    """The state of *record* for people, in a few words."""
    if record.ending is not None:
        return record.ending.value
    if pending is not None:
        return f"decided: {pending.resolution.value}"
    if record.hold is not None:
        return "held"
    return f"decided: {record.pending_resolution}" if record.pending_resolution else "open"


def as_data(
    record: OperationRecord, pending: ResolutionRequest | None = None, *, can_undo: bool = False
) -> dict[str, Any]:
    """*record* as plain data for JSON; times are ISO 8601 in UTC."""
    hold = record.hold
    held = hold is not None and record.ending is None
    return {
        "id": record.id,
        "state": "held" if held else record.ending.value if record.ending else "open",
        "key": record.key,
        "name": record.name,
        "kind": record.pinned.get("kind"),
        "file": record.pinned.get("file"),
        "removal": is_removal(record),
        "critical": record.critical,
        "begun": _iso(record.begun),
        "ended": _iso(record.ended) if record.ending else None,
        "attempt": record.attempt,
        "epoch": record.epoch,
        "recoveries": record.recoveries,
        "undoes": record.undoes or None,
        "undone_by": record.undone_by or None,
        "steps": [_step_data(step) for step in record.steps],
        "hold": None
        if hold is None
        else {
            "reason": hold.reason,
            "evidence": hold.evidence,
            "code": hold.code,
            "by_cap": hold.by_cap,
            "since": _iso(hold.since),
        },
        "decided": None
        if pending is None
        else {
            "decision": pending.resolution.value,
            "who": pending.who,
            "why": pending.why,
            "at": _iso(pending.at),
        },
        "decisions": [
            {"at": _iso(note.at), "who": note.who or None, "what": note.what, "why": note.why}
            for note in record.notes
        ],
        "commands": list(resolve_commands(record.id, can_undo=can_undo)) if held else [],
    }


def format_list(
    opened: Sequence[OperationRecord],
    past: Sequence[OperationRecord],
    pending: Mapping[str, ResolutionRequest | None],
) -> str:
    """The open operations, then the past ones."""
    lines = []
    if opened:
        rows = [_row(each, each.begun, state_of(each, pending.get(each.id))) for each in opened]
        lines += _table(("ID", "BEGUN", "STATE", "KEY", "OPERATION", "LAST STEP"), rows)
        held = sum(state_of(each, pending.get(each.id)) == "held" for each in opened)
        if held:
            lines += [
                "",
                f"{held} held: reconciled journal show ID shows why, and how to resolve it.",
            ]
    else:
        lines.append("No operation is open.")
    if past:
        rows = [_row(each, each.ended, state_of(each)) for each in past]
        lines += ["", *_table(("ID", "ENDED", "STATE", "KEY", "OPERATION", "LAST STEP"), rows)]
    return "\n".join(lines)


def _row(record: OperationRecord, at: float, state: str) -> tuple[str, ...]:
    last = clean(record.last_step) or "-"
    return record.id, format_time(at), state, clean(record.key), clean(record.name), last


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def format_operation(  # noqa: PLR0913 - one argument for each source of facts
    record: OperationRecord,
    pending: ResolutionRequest | None,
    program: Sequence[str],
    output: Sequence[str],
    *,
    now: float,
    can_undo: bool,
) -> str:
    """One operation in full: what it did, how far it came, and how to resolve it."""
    paragraphs = [_head(record, pending, now), _progress(record, program)]
    if record.ending is None and record.hold is not None:
        paragraphs.append(_hold(record))
    if pending is not None:
        decided = f"--{pending.resolution.value}, by {pending.who}, {format_time(pending.at)}"
        why = clean(pending.why)
        paragraphs.append([f"Decided, and not carried out yet: {decided}", f"  {why}"])
    elif record.ending is None and record.hold is not None:
        paragraphs.append(_resolve_commands(record, can_undo=can_undo))
    elif record.ending is None:
        paragraphs.append([_OPEN])
    if record.notes:
        paragraphs.append(["Decisions:", *(_note(note) for note in record.notes)])
    if output:
        paragraphs.append(["Output of its programs:", *(f"  {file}" for file in output)])
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _head(record: OperationRecord, pending: ResolutionRequest | None, now: float) -> list[str]:
    facts = [f"attempt {record.attempt}"]
    facts += ["removal"] if is_removal(record) else []
    facts += ["critical"] if record.critical else []
    rows = [
        ("key", clean(record.key)),
        ("operation", f"{clean(record.name)} ({', '.join(facts)})"),
        ("begun", f"{format_time(record.begun)}, {_ago(now - record.begun)}"),
    ]
    if record.ending is not None:
        rows.append(("ended", f"{format_time(record.ended)}, {_ago(now - record.ended)}"))
    if record.pinned.get("file"):
        rows.append(("manifest", f"{record.pinned['file']}, as it was then"))
    if record.undoes:
        rows.append(("undoes", record.undoes))
    if record.undone_by:
        rows.append(("undone by", record.undone_by))
    return [
        f"{record.id}: {state_of(record, pending)}",
        *(f"  {name:<10} {text}" for name, text in rows),
    ]


def _progress(record: OperationRecord, program: Sequence[str]) -> list[str]:
    lines = ["Progress:"]
    if not record.steps:
        lines.append("  no step is recorded")
    rows = [
        (clean(step.name), step.kind, "done" if step.state is StepState.DONE else _NO_RESULT)
        for step in record.steps
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for step, (name, kind, state) in zip(record.steps, rows, strict=True):
        lines.append(f"  {name:<{widths[0]}}  {kind:<{widths[1]}}  {state}")
        if step.data is not None:
            lines.append(f"    {_data(step.data)}")
    return [*lines, *(f"  {clean(line)}" for line in program)]


def _hold(record: OperationRecord) -> list[str]:
    hold = record.hold
    assert hold is not None
    lines = [f"Held since {format_time(hold.since)}:", f"  {clean(hold.reason)}"]
    if hold.evidence:
        lines += [f"  {clean(line)}" for line in hold.evidence.splitlines()]
    if hold.by_cap:
        lines.append(
            "  A changed spec, or changed options of its controller, also lifts this hold."
        )
    return lines


def _resolve_commands(record: OperationRecord, *, can_undo: bool) -> list[str]:
    lines = ["Check the actual state, then resolve the operation with one of these:"]
    for command in resolve_commands(record.id, can_undo=can_undo):
        lines.append(f"  {command}")
        lines += [f"      {text}" for flag, text in _MEANS.items() if f" {flag} " in command]
    return lines


def _note(note: Note) -> str:
    by = note.who or "the daemon"
    return f"  {format_time(note.at)}  {clean(by)}: {clean(note.what)}: {clean(note.why)}"


def _step_data(step: StepRecord) -> dict[str, Any]:
    return {
        "name": step.name,
        "kind": step.kind,
        "state": step.state.value,
        "attempt": step.attempt,
        "data": step.data,
    }


def _data(data: Any) -> str:
    text = json.dumps(data, ensure_ascii=False)
    return clean(text if len(text) <= _MAX_DATA else f"{text[:_MAX_DATA]}…")


def clean(text: str) -> str:
    """*text* on one line, without control codes."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def format_time(at: float) -> str:
    """Wall time for people: local, with its offset."""
    return datetime.fromtimestamp(at, UTC).astimezone().isoformat(" ", "seconds")


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def _ago(seconds: float) -> str:
    """How long ago, in the largest unit only: the reader needs an order of magnitude."""
    if seconds < 1:
        return "now"
    size = next(size for size in (86400, 3600, 60, 1) if seconds >= size)
    return f"{format_duration(math.floor(seconds / size) * size)} ago"
