"""``reconciled journal show ID``: everything that the state directory has about one operation."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from reconciled.cli.journal.listing import pending_resolution
from reconciled.cli.journal.operation_format import as_data, format_operation
from reconciled.cli.journal.target import (
    PREFIX_LIMIT,
    JournalTarget,
    find_operation,
    read_journal,
)
from reconciled.cli.terminal import print_error, print_json, print_line
from reconciled.core.errors import RecordDamaged, StepsDamaged
from reconciled.core.exit_codes import NOT_FOUND
from reconciled.core.resources import controller_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.programs.steps import read_steps
from reconciled.programs.survivors import Survivor, find_survivor


def execute(arguments: argparse.Namespace, target: JournalTarget) -> int:
    """Print the operation; its exit code. Raises StoreTooNew, StoreUnusable."""
    prefix = arguments.id.upper()
    record = find_operation(read_journal(target.state, PREFIX_LIMIT, prefix), prefix)
    if record is None:
        return NOT_FOUND
    pending = pending_resolution(target.state, record.id) if record.ending is None else None
    # Loads a plugin: only for what can be undone.
    can_undo = record.hold is not None and not target.undo_check.refusal_reason(record)
    directory = target.state / "operations" / record.id
    files = sorted(str(file) for file in directory.glob("*.log")) if directory.is_dir() else []
    program = _program_lines(directory)
    if arguments.json:
        data = as_data(record, pending, can_undo=can_undo)
        data |= {"directory": str(directory) if directory.is_dir() else None, "output": files}
        print_json(data | {"program": program})
    else:
        print_line(
            format_operation(record, pending, program, files, now=time.time(), can_undo=can_undo)
        )
        _warn_unconfigured(record, target)
    return 0


def _warn_unconfigured(record: OperationRecord, target: JournalTarget) -> None:
    config, controller = target.undo_check.config, controller_of(record.key)
    if record.ending is None and config is not None and controller not in config.controllers:
        print_error(
            f"controller {controller} is not configured: the operation stays open until it is,"
            " or until it is resolved with --complete or --abandon"
        )


def _program_lines(directory: Path) -> list[str]:
    """What is recorded about its programs, one line each."""
    lines = []
    try:
        steps = read_steps(directory)
        if steps:
            listed = ", ".join(f"{step.name} (attempt {step.attempt})" for step in steps)
            lines.append(f"steps recorded by its program: {listed}")
        survivor = find_survivor(directory)
    except (StepsDamaged, RecordDamaged, OSError) as error:
        return [*lines, f"cannot read the records of its program: {error}"]
    if survivor is None:
        return lines
    try:
        return [*lines, _program_line(survivor)]
    except (RecordDamaged, OSError) as error:
        return [*lines, f"cannot read the program's exit record: {error}"]
    finally:
        survivor.close()


def _program_line(survivor: Survivor) -> str:
    """Raises RecordDamaged, OSError."""
    if survivor.alive:
        state = f"is still running (pid {survivor.record.program.pid})"
    elif (end := survivor.end) is None:
        state = "has ended; its exit was not recorded"
    elif end.code is None:
        state = f"was ended by signal {end.signal}"
    else:
        state = f"ended with exit code {end.code}"
    assignment = survivor.assignment
    return f"its program {assignment.action} of attempt {assignment.attempt} {state}"
