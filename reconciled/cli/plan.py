"""``reconciled plan [KEY…]``: what the daemon would do, without effects; takes no lock.

One line a change, and one for each key that is blocked or cannot be planned:

    ~  would be changed
    !  has an open operation, which is recovered first, or held
    ?  unknown, or cannot be planned

Exit codes: 0 no changes · 1 changes · 70 a source, a key or the store cannot be read or planned ·
78 the configuration is invalid.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import trio

from reconciled.cli.check import unconfigured_controllers
from reconciled.cli.terminal import (
    StoreTooNew,
    StoreUnusable,
    print_error,
    print_json,
    print_line,
    report_invalid,
    report_problems,
)
from reconciled.config.load import find_config, load
from reconciled.core.errors import Invalid
from reconciled.core.exit_codes import CHANGES, DONE, INTERNAL
from reconciled.core.resources import Key, controller_of
from reconciled.journal.operation_record import OperationRecord
from reconciled.journal.sqlite.rows import read_open
from reconciled.journal.sqlite.snapshot import open_snapshot
from reconciled.journal.sqlite.store import Applied, read_all_applied
from reconciled.observe.logs import configure
from reconciled.offline.plan import KeyPlan, plan
from reconciled.offline.scan import ControllerScan, scan_sources
from reconciled.programs.children import current_children
from reconciled.runtime.controllers.loading import prepare_valid
from reconciled.runtime.controllers.secrets import redact_credentials


def execute(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    try:
        path = find_config(arguments.config, os.environ)
        prepared = prepare_valid(load(path, os.environ).config)
    except Invalid as invalid:
        return report_invalid(invalid)
    config = prepared.config
    try:
        applied, operations = _read_store(config.state)
    except (StoreTooNew, StoreUnusable) as error:
        print_error(f"reconciled plan: {error}")
        return INTERNAL
    for line in unconfigured_controllers(config, applied):
        print_error(f"{line} (warning)")
    logs = configure(config.log.format, "error", environment=os.environ)
    redact_credentials(logs.redactor)

    async def scan_and_plan() -> tuple[list[ControllerScan], list[KeyPlan]]:
        current_children().redact = logs.redactor.redact
        scans = await scan_sources(prepared, applied)
        wanted = [Key(key) for key in arguments.keys]
        return scans, await plan(
            scans, wanted, operations, logs.log, config.stop.critical, config.state
        )

    scans, planned = trio.run(scan_and_plan)
    logs.close()
    unread = report_problems(prepared, scans)
    missing = sorted(set(arguments.keys) - {each.key for each in planned})
    for key in missing:
        print_error(f"{key}: unknown key, neither declared nor applied: write CONTROLLER/NAME")
    if arguments.json:
        print_json([_as_data(each) for each in planned])
    else:
        _print(planned)
    if unread or missing or any(each.error for each in planned):
        return INTERNAL
    return CHANGES if any(each.changes for each in planned) else DONE


def _read_store(
    state: Path,
) -> tuple[dict[str, dict[Key, Applied]], dict[Key, OperationRecord]]:
    """What was applied, by controller, and the open operations; empty where there is no store."""
    with open_snapshot(state) as connection:
        if connection is None:
            return {}, {}
        return (
            read_all_applied(connection),
            {record.key: record for record in read_open(connection)},
        )


def _print(planned: list[KeyPlan]) -> None:
    for each in planned:
        for line in _lines(each):
            print_line(line)
    print_line(_summary(planned))


def _lines(each: KeyPlan) -> Iterator[str]:
    if each.operation is not None:
        yield f"! {each.key}: {_operation_text(each.operation)}"
    if each.error:
        yield f"? {each.key}: cannot be planned: {each.error}"
    elif each.unknown:
        yield f"? {each.key}: unknown: its reconciler has no plan()"
    for change in each.changes:
        held = f" (held until `reconciled allow {controller_of(each.key)}`)" if each.held else ""
        yield f"~ {each.key}: {change.action} {change.what}{held}"
        for line in change.detail.splitlines():
            yield f"    {line}"


def _operation_text(record: OperationRecord) -> str:
    if record.hold is None:
        return f"operation {record.name} ({record.id}) is open: it is recovered first"
    return (
        f"operation {record.name} ({record.id}) is held: {record.hold.reason};"
        f" see `reconciled journal show {record.id}`"
    )


def _summary(planned: list[KeyPlan]) -> str:
    """Each key once; kinds that may be absent are named only where there is one."""
    failed = sum(bool(each.error) for each in planned)
    changing = sum(bool(each.changes) for each in planned)
    unknown = sum(each.unknown and not each.changes for each in planned)
    counts = [
        f"{changing} to change",
        f"{len(planned) - failed - changing - unknown} as desired",
        *([f"{unknown} unknown"] if unknown else []),
        *([f"{failed} cannot be planned"] if failed else []),
    ]
    return f"{len(planned)} key{'s' * (len(planned) != 1)}: {', '.join(counts)}."


def _as_data(each: KeyPlan) -> dict[str, object]:
    record = each.operation
    return {
        "key": each.key,
        "changes": [
            {"action": change.action, "what": change.what, "detail": change.detail}
            for change in each.changes
        ],
        "unknown": each.unknown,
        "held": each.held,
        "error": each.error or None,
        "operation": None
        if record is None
        else {
            "id": record.id,
            "name": record.name,
            "hold": None if record.hold is None else record.hold.reason,
        },
    }
