"""``reconciled journal list | show | resolve``: operations, open, held and past.

List and show read a copy of the store: they take no lock, write nothing, and work with the daemon
up or down. Exit codes: 0 · 4 there is no such operation · 70 the store cannot be read · 78 the
configuration is invalid, and no ``--state`` was given.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import attrs

from reconciled.cli.journal.text import as_data, format_list, format_operation
from reconciled.cli.journal.undo_check import UndoCheck
from reconciled.cli.terminal import (
    act_as_owner,
    print_error,
    print_json,
    print_line,
    report_invalid,
)
from reconciled.config.load import find_config, load
from reconciled.core.errors import (
    Invalid,
    RecordDamaged,
    StateLocked,
    StepsDamaged,
    StoreTooNew,
    StoreUnusable,
)
from reconciled.core.exit_codes import INTERNAL, NOT_FOUND
from reconciled.core.resources import controller_of
from reconciled.journal import resolutions
from reconciled.journal.operation_record import OperationRecord
from reconciled.journal.sqlite.rows import read_open, read_past
from reconciled.journal.sqlite.schema import read_meta
from reconciled.journal.sqlite.snapshot import open_snapshot
from reconciled.journal.state_lock import probe
from reconciled.programs.steps import read_steps
from reconciled.programs.survivors import find_survivor

PREFIX_LIMIT = (
    100  # so many operations are compared with a prefix; whoever gives a shorter one is told
)


@attrs.frozen
class JournalTarget:
    """What the verbs work on: the state directory, and what can undo an operation of it."""

    state: Path
    undo_check: UndoCheck


@attrs.frozen
class JournalSnapshot:
    """What a copy of the store says.

    open      oldest first
    past      newest first
    unread    past ones that are damaged, and were left out
    degraded  why it does not know all that was done; empty: it does
    """

    open: tuple[OperationRecord, ...] = ()
    past: tuple[OperationRecord, ...] = ()
    damaged: int = 0
    degraded: str = ""

    def find(self, prefix: str) -> list[OperationRecord]:
        """Those whose id begins with *prefix*."""
        return [each for each in (*self.open, *self.past) if each.id.startswith(prefix)]


def execute(arguments: argparse.Namespace) -> int:
    """Do what ``journal`` was asked for."""
    try:
        place = _target(arguments)
    except Invalid as invalid:
        print_error("with --state DIRECTORY the journal can be read without a configuration")
        return report_invalid(invalid)
    try:
        act_as_owner(place.state)
        if arguments.action == "resolve":
            from reconciled.cli.journal import resolve

            return resolve.execute(arguments, place)
        code = _list(arguments, place) if arguments.action == "list" else _show(arguments, place)
    except (StoreTooNew, StoreUnusable) as error:
        print_error(f"reconciled journal: {error}")
        return INTERNAL
    try:
        probe(place.state)
    except StateLocked as held:
        holder = "another process" if held.pid is None else f"process {held.pid}"
        print_error(f"{place.state} is held by {holder}: this is what it had written just now")
    return code


def _target(arguments: argparse.Namespace) -> JournalTarget:
    """Raises Invalid where only the configuration could say where the state is."""
    try:
        config = load(find_config(arguments.config, os.environ), os.environ).config
    except Invalid as invalid:
        if not arguments.state:
            raise
        return JournalTarget(
            Path(arguments.state).absolute(), UndoCheck(None, str(invalid.problems[0]))
        )
    state = Path(arguments.state).absolute() if arguments.state else config.state
    return JournalTarget(state, UndoCheck(config))


def read_journal(state: Path, limit: int, prefix: str = "") -> JournalSnapshot:
    """What the store below *state* has, at most *limit* past operations of it.

    Raises StoreTooNew, StoreUnusable.
    """
    with open_snapshot(state) as connection:
        if connection is None:
            return JournalSnapshot()
        past = read_past(connection, limit, prefix)
        degraded = read_meta(connection).degraded
        return JournalSnapshot(tuple(read_open(connection)), past.records, past.damaged, degraded)


def find_operation(book: JournalSnapshot, prefix: str) -> OperationRecord | None:
    """The operation whose id begins with *prefix*; None, and a line, where it is not just one."""
    found = book.find(prefix)
    if len(found) == 1:
        return found[0]
    if not found:
        print_error(f"there is no operation {prefix}: reconciled journal list names them")
        return None
    print_error(f"{prefix} is not enough, {len(found)} operations begin so:")
    for record in found[:20]:
        print_error(f"  {record.id}  {record.key}  {record.name}")
    return None


def _list(arguments: argparse.Namespace, place: JournalTarget) -> int:
    book = read_journal(place.state, arguments.limit)
    pending = {each.id: _pending(place.state, each.id) for each in book.open}
    if arguments.json:
        everything = (*book.open, *book.past)
        print_json([as_data(each, pending.get(each.id)) for each in everything])
    else:
        print_line(format_list(book.open, book.past, pending))
    if book.degraded:
        print_error(
            f"The store was damaged: {book.degraded}. Keys that are not as desired are held until"
            ' reconciled journal resolve --all --abandon --why "…"'
        )
    if book.damaged:
        print_error(f"{book.damaged} past operations are damaged and were left out")
    return 0


def _show(arguments: argparse.Namespace, place: JournalTarget) -> int:
    prefix = arguments.id.upper()
    record = find_operation(read_journal(place.state, PREFIX_LIMIT, prefix), prefix)
    if record is None:
        return NOT_FOUND
    pending = _pending(place.state, record.id) if record.ending is None else None
    # Loads a plugin: not for what is over.
    undo = record.hold is not None and not place.undo_check.refusal_reason(record)
    directory = place.state / "operations" / record.id
    files = sorted(str(file) for file in directory.glob("*.log")) if directory.is_dir() else []
    noted = _program_lines(directory)
    if arguments.json:
        data = as_data(record, pending, can_undo=undo)
        data |= {"directory": str(directory) if directory.is_dir() else None, "output": files}
        print_json(data | {"program": noted})
    else:
        print_line(format_operation(record, pending, noted, files, now=time.time(), can_undo=undo))
        left = place.undo_check.config
        if record.ending is None and left and controller_of(record.key) not in left.controllers:
            print_error(f"{controller_of(record.key)} is not configured: nothing goes on with it")
    return 0


def _pending(state: Path, operation: str) -> resolutions.ResolutionRequest | None:
    """The decision that waits for the daemon, if it can be read."""
    try:
        return resolutions.read_pending(state, operation)
    except (OSError, ValueError) as error:
        print_error(f"a decision about {operation} cannot be read: {error}")
        return None


def _program_lines(directory: Path) -> list[str]:
    """What is known of its program, a line each."""
    lines = []
    try:
        steps = read_steps(directory)
        if steps:
            listed = ", ".join(f"{step.name} (attempt {step.attempt})" for step in steps)
            lines.append(f"steps that its program noted: {listed}")
        survivor = find_survivor(directory)
    except (StepsDamaged, RecordDamaged, OSError) as error:
        return [*lines, f"what its program left cannot be read: {error}"]
    if survivor is None:
        return lines
    try:
        what, pid = survivor.assignment, survivor.record.program.pid
        if survivor.alive:
            state = f"is still at work (process {pid})"
        elif (end := survivor.end) is None:
            state = "is gone, and nobody saw how it ended"
        elif end.code is None:
            state = f"was ended by signal {end.signal}"
        else:
            state = f"ended with code {end.code}"
        return [*lines, f"its program {what.action} of attempt {what.attempt} {state}"]
    except (RecordDamaged, OSError) as error:
        return [*lines, f"how its program ended cannot be read: {error}"]
    finally:
        survivor.close()


def login_name() -> str:
    """The person at the terminal, for the record: the name and number of a login."""
    import pwd

    uid = os.getuid()
    # What sudo says counts only where it was sudo that made us root.
    behind = os.environ.get("SUDO_UID", "") if uid == 0 else ""
    if behind.isdecimal():
        uid = int(behind)
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "somebody"
    if behind and os.environ.get("SUDO_USER"):
        name = os.environ["SUDO_USER"]
    return f"{name} (uid {uid}{', sudo' if behind else ''})"
