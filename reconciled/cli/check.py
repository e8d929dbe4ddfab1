"""``reconciled check``: grades the configuration and everything that it names.

The grades are syntax, schema, plugins, references, manifests, stop budget and unit; each is
checked for whatever passed the one before. All problems are printed at once, each with file, line
and column. What does not fit in the unit is a warning, printed with the commands that fix it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio

from reconciled.cli.budget import declared_budgets
from reconciled.cli.terminal import (
    INVALID,
    StoreTooNew,
    StoreUnusable,
    print_error,
    print_json,
    print_line,
    read_applied,
)
from reconciled.cli.unit_report import (
    check_unit,
    remedy_shell,
    shell_commands,
    unit_data,
    unwritable_paths,
)
from reconciled.config.load import find_config, load, not_built_lines
from reconciled.config.model import Config
from reconciled.config.yaml.documents import read_documents
from reconciled.core.durations import format_duration
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem
from reconciled.core.resources import Key, Origin
from reconciled.journal.sqlite.store import Applied
from reconciled.offline.scan import ControllerScan, scan_sources
from reconciled.offline.secrets import check_secrets, credentials_visible
from reconciled.runtime.controllers.loading import PreparedConfig, prepare
from reconciled.runtime.controllers.secrets import stall_without_secrets
from reconciled.service.unit.findings import UnitComparison


@attrs.define
class CheckReport:
    """The result: a verdict for each grade, problems, warnings and notes."""

    grades: dict[str, str] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)
    warnings: list[str] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    unit: UnitComparison | None = None

    def add_grade(self, grade: str, problems: list[Problem], passed: str = "ok") -> None:
        """Add *grade* with its problems; *passed* is the verdict without any."""
        count = len(problems)
        self.grades[grade] = passed if not count else _count(count, "problem")
        self.problems += problems


def execute(arguments: argparse.Namespace) -> int:
    """Check, and print the report; returns the exit code."""
    path = find_config(arguments.config, os.environ)
    found = CheckReport()
    config = _configuration(path, found)
    if config is not None:
        prepared = (
            stall_without_secrets(prepare(config)) if credentials_visible() else prepare(config)
        )
        _plugins(prepared, found)
        scans = _contents(prepared, found)
        _unit(arguments.unit, config, scans, found)
    bad = bool(found.problems) or (arguments.strict and bool(found.warnings))
    if arguments.json:
        _print_json(found, bad=bad)
    else:
        _print(path, found, bad=bad)
    return INVALID if bad else 0


def _configuration(path: Path, found: CheckReport) -> Config | None:
    try:
        loaded = load(path, os.environ)
    except Invalid as invalid:
        syntax = [problem for problem in invalid.problems if _is_syntax(problem)]
        found.add_grade("syntax", syntax)
        schema = [each for each in invalid.problems if each not in syntax]
        found.add_grade("schema", schema, "ok" if not syntax else "not checked")
        return None
    found.add_grade("syntax", [])
    found.add_grade("schema", [])
    found.warnings += [str(warning) for warning in loaded.warnings]
    found.warnings += not_built_lines(loaded.config)
    return loaded.config


def _is_syntax(problem: Problem) -> bool:
    """Whether *problem* is one of reading its file as YAML."""
    try:
        data = Path(problem.origin.file).read_bytes()
    except OSError:
        return True
    return problem in read_documents(data, problem.origin.file)[1]


def _plugins(prepared: PreparedConfig, found: CheckReport) -> None:
    broken = [
        Problem(stalled.config.origin, f"controller {stalled.config.name} stalls: {stalled.reason}")
        for stalled in prepared.stalled
    ]
    found.add_grade("plugins", broken)
    found.add_grade("references", list(prepared.problems))
    for ready in prepared.ready:
        found.warnings += [f"{ready.plugin.origin}: {text}" for text in ready.plugin.warnings]


def _contents(prepared: PreparedConfig, found: CheckReport) -> list[ControllerScan]:
    config = prepared.config
    try:
        applied = read_applied(config.state)
    except (StoreTooNew, StoreUnusable, OSError) as error:
        found.warnings.append(
            f"the store cannot be read, so that removals are not checked: {error}"
        )
        applied = {}
    scans = trio.run(scan_sources, prepared, applied)
    count = sum(len(each.desired.manifests) for each in scans)
    problems = {problem for each in scans for problem in each.problems}
    problems |= set(_kinds_without_controller(prepared, scans))
    for each in scans:
        for source, reason in each.unavailable.items():
            origin = each.ready.config.origin
            problems.add(Problem(origin, f"{source} cannot be read: {reason}"))
        found.warnings += _cannot_roll_back(each)
    found.add_grade("manifests", sorted(problems), f"ok, {_count(count, 'resource')}")
    found.warnings += check_secrets(scans)
    found.warnings += unconfigured_controllers(config, applied)
    found.warnings += [_held(each) for each in scans if each.held]
    limits = config.stop
    declared = declared_budgets(scans)
    longest = f", longest declared {format_duration(declared[0].seconds)}" if declared else ""
    found.grades["stop budget"] = f"{format_duration(limits.budget)}{longest}"
    return scans


def _unit(
    name: str | None, config: Config, scans: list[ControllerScan], found: CheckReport
) -> None:
    """Check the unit *name*, which must be loaded; None: the configuration's own, if it is."""
    unit = check_unit(name, config)
    found.unit = unit
    if unit.facts is None:
        if name is None:
            found.grades["unit"] = f"not checked: {unit.reason}"
        else:
            origin = Origin(str(config.files[0]))
            found.add_grade("unit", [Problem(origin, f"--unit {name}: {unit.reason}")])
        return
    warnings = [*unit.warnings, *unwritable_paths(unit, config, scans)]
    found.warnings += warnings
    found.notes += unit.notes
    count = len(warnings)
    verdict = _count(count, "warning") if count else "ok"
    found.grades["unit"] = f"{verdict}, {unit.name}"


def _kinds_without_controller(
    prepared: PreparedConfig, scans: list[ControllerScan]
) -> list[Problem]:
    """Manifests in watched directories whose kind no controller takes."""
    if prepared.stalled:
        return []  # a stalled controller may take them: fix that problem first
    kinds = {ready.plugin.kind for ready in prepared.ready}
    return [
        Problem(
            manifest.origin,
            f"no controller takes kind {manifest.kind}: write one of {', '.join(sorted(kinds))}",
        )
        for each in scans
        for manifest in each.manifests
        if manifest.kind not in kinds
    ]


def _cannot_roll_back(each: ControllerScan) -> list[str]:
    """Manifests under ``interrupted: roll-back`` that nothing can undo: they would be held."""
    ready = each.ready
    if ready.config.interrupted != "roll-back":
        return []
    return [
        f"{manifest.origin}: nothing can undo this {manifest.kind}, and its controller has"
        " interrupted: roll-back: an interrupted operation would be held; add a rollback, or choose"
        " another policy"
        for manifest in each.desired.manifests.values()
        if not ready.reconciler.can_undo(ready.plugin.spec_of(manifest))
    ]


def _held(each: ControllerScan) -> str:
    name = each.ready.config.name
    count, owned = len(each.held), len(each.desired.owned)
    return (
        f"{each.ready.config.origin}: controller {name}: the removal of {count} of {owned} keys"
        f" would be held until `reconciled allow {name}`"
    )


def unconfigured_controllers(
    config: Config, applied: Mapping[str, Mapping[Key, Applied]]
) -> list[str]:
    """A warning for each controller that left the configuration and has applied keys."""
    return [
        f"{Origin(str(config.files[0]) if config.files else 'configuration')}: controller {name}"
        f" is not configured any more; what it applied is left as is ({_count(len(keys), 'key')})"
        for name, keys in applied.items()
        if keys and name not in config.controllers
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _print(path: Path, found: CheckReport, *, bad: bool) -> None:
    for problem in found.problems:
        print_error(str(problem))
    for warning in found.warnings:
        print_error(f"{warning} (warning)")
    for note in found.notes:
        print_error(f"{note} (note)")
    for grade, verdict in found.grades.items():
        print_line(f"{grade:<12} {verdict}")
    if found.unit is not None and (remedies := found.unit.remedies):
        print_line()
        purpose = "fix the unit" if found.unit.warnings else "follow the notes"
        print_line(f"# Commands that {purpose}, for {remedy_shell(found.unit)}:")
        for line in shell_commands(remedies):
            print_line(line)
        print_line()
    print_line(f"{path} is {'not valid' if bad else 'valid'}.")


def _print_json(found: CheckReport, *, bad: bool) -> None:
    print_json(
        {
            "valid": not bad,
            "grades": found.grades,
            "problems": [
                {
                    "file": problem.origin.file,
                    "line": problem.origin.line,
                    "column": problem.origin.column,
                    "message": problem.message,
                }
                for problem in found.problems
            ],
            "warnings": found.warnings,
            "notes": found.notes,
            "unit": unit_data(found.unit) if found.unit else None,
        }
    )
