"""The report of a stop: what outlived the signal, for how long, and with what outcome.

1. All functions are synchronous: the thread that ends a hung process writes the report too.
2. ``last-stop.json`` has stable keys and a version; ``last-stop.txt`` fits on one screen.
3. Each file is replaced atomically: a crash during the write leaves the previous report.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from reconciled.core.exit_codes import CUT, FAILED, HUNG
from reconciled.core.stages import Stage
from reconciled.durability import replace
from reconciled.observe.line_format import escaped

VERSION = 1
JSON_NAME = "last-stop.json"
TEXT_NAME = "last-stop.txt"
_SHOWN = 8  # entries of each list in the text; the JSON has all
_FRAMES = 3  # of a task that did not end; of the others the innermost one


class StopOutcome(enum.Enum):
    """How a task or a child ended; the worst first."""

    LEFT_BEHIND = "left behind"  # did not end, although cancelled or killed
    CUT = "cut"  # a critical operation, ended at its deadline
    KILLED = "killed"  # a child, by SIGKILL
    CANCELLED = "cancelled"  # ordinary work, interrupted
    FINISHED = "finished"  # within its budget, without being cancelled
    DETACHED = "detached"  # left a program by setsid and lost its parent: left alone


_WORST_FIRST = {outcome: position for position, outcome in enumerate(StopOutcome)}


@attrs.frozen
class Straggler:
    """A task that was still running when a stage began to wait for it.

    stage      the stage in which it ended, or in which the daemon gave it up
    age_s      seconds from the signal until then
    budget_s   seconds its critical operation was allowed from its entry; None: it was in none
    where      its last known frames, innermost first
    """

    name: str
    stage: Stage
    age_s: float
    outcome: StopOutcome
    key: str = ""
    operation: str = ""
    budget_s: float | None = None
    where: tuple[str, ...] = ()


@attrs.frozen
class RunningProgram:
    """A program that was still running at the end of the stop."""

    pid: int
    argv0: str
    outcome: StopOutcome
    key: str = ""


@attrs.frozen
class UnfinishedOperation:
    """An open operation: the next start recovers it, and logs the same id."""

    id: str
    key: str
    name: str
    held: bool = False


@attrs.frozen
class StopReport:
    """One stop, from the signal to the exit. Times are in seconds from *began*."""

    reason: str
    began: str  # RFC 3339
    duration_s: float
    exit_code: int
    signal: str = ""  # SIGTERM, say; empty: not begun by a signal
    stages: tuple[tuple[Stage, float], ...] = ()
    critical_finished: int = 0
    stragglers: tuple[Straggler, ...] = ()
    interrupted: tuple[str, ...] = ()  # keys whose run was cancelled or cut
    operations: tuple[UnfinishedOperation, ...] = ()
    not_served: int = 0  # keys that waited for a run
    children: tuple[RunningProgram, ...] = ()
    stacks: tuple[str, ...] = ()  # lines of the dump of a process that hung
    log_lines_dropped: int = 0

    def as_data(self) -> dict[str, Any]:
        """The content of ``last-stop.json``. Within one version keys are added, never removed."""
        return {
            "version": VERSION,
            "reason": self.reason,
            "signal": self.signal or None,
            "began": self.began,
            "duration_s": round(self.duration_s, 3),
            "exit_code": self.exit_code,
            "stages": [{"stage": s.name.lower(), "at_s": round(at, 3)} for s, at in self.stages],
            "critical_finished": self.critical_finished,
            "stragglers": [_straggler_data(straggler) for straggler in self.stragglers],
            "interrupted": list(self.interrupted),
            "operations": [
                {"id": each.id, "key": each.key, "name": each.name, "held": each.held}
                for each in self.operations
            ],
            "not_served": self.not_served,
            "children": [
                {"pid": c.pid, "argv0": c.argv0, "key": c.key or None, "fate": c.outcome.value}
                for c in self.children
            ],
            "stacks": list(self.stacks),
            "log_lines_dropped": self.log_lines_dropped,
        }

    def as_json(self) -> str:
        """as_data() as text."""
        return json.dumps(self.as_data(), indent=2) + "\n"

    def as_text(self) -> str:
        """The report for a person, one screen long."""
        parts = [
            _headline(self),
            _stragglers_text(self.stragglers),
            _children_text(self.children),
            _keys_text(self),
            _advice(self),
        ]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def write(report: StopReport, state: Path, redact: Callable[[str], str] = str) -> str:
    """Replace both files in *state*; returns the errors as text, or an empty string.

    Never raises. *redact* hides secrets: the message of a crash may contain one. Blocks for two
    syncs of the file system. Any thread may call it.
    """
    problems = []
    for name, render in ((JSON_NAME, report.as_json), (TEXT_NAME, report.as_text)):
        try:
            replace(state / name, redact(render()).encode("utf-8", "backslashreplace"))
        except Exception as exc:  # noqa: BLE001 - no failed report prevents the exit
            problems.append(f"cannot write {state / name}: {exc}")
    return "; ".join(problems)


def _straggler_data(straggler: Straggler) -> dict[str, Any]:
    budget = straggler.budget_s
    return {
        "name": straggler.name,
        "key": straggler.key or None,
        "operation": straggler.operation or None,
        "stage": straggler.stage.name.lower(),
        "age_s": round(straggler.age_s, 3),
        "budget_s": None if budget is None else round(budget, 3),
        "fate": straggler.outcome.value,
        "where": list(straggler.where),
    }


def describe_exit_code(exit_code: int) -> str:
    """The meaning of the exit code of a stop; empty for 0."""
    return {
        0: "",
        FAILED: "a fault of the daemon itself",
        CUT: "something was cut, not recorded, or left behind",
        HUNG: "the event loop was blocked, and the last resort ended the process",
    }.get(exit_code, "unknown exit code")


def _headline(report: StopReport) -> list[str]:
    fault = describe_exit_code(report.exit_code)
    verdict = f"NOT CLEAN: {fault}" if fault else "clean"
    # The reason of a stop by a signal contains it; that of a crash or a hang does not.
    by = report.reason
    if report.signal and report.signal not in report.reason:
        by = f"{report.signal}, {report.reason}"
    stages = ", ".join(f"{stage.name} at {at:.1f} s" for stage, at in report.stages)
    return [
        f"Stop took {report.duration_s:.1f} s, exit code {report.exit_code}: {verdict}",
        f"began   {report.began}, reason: {escaped(by)}",
        f"stages  {stages or 'none was reached'}",
    ]


def _stragglers_text(stragglers: tuple[Straggler, ...]) -> list[str]:
    if not stragglers:
        return []
    ordered = sorted(stragglers, key=lambda s: (_WORST_FIRST[s.outcome], -s.age_s, s.name))
    text = [f"Outlived the signal ({len(ordered)}, the worst first):"]
    for straggler in ordered[:_SHOWN]:
        text.extend(_straggler_text(straggler))
    return text + _more(len(ordered))


def _straggler_text(straggler: Straggler) -> Iterable[str]:
    name = escaped(straggler.key or straggler.name)
    what = f", operation {escaped(straggler.operation)}" if straggler.operation else ""
    budget = "" if straggler.budget_s is None else f", budget {straggler.budget_s:.1f} s"
    ended = f"{straggler.age_s:.1f} s after the signal, in {straggler.stage.name}"
    yield f"  {straggler.outcome.value.upper():<11} {name}{what}: {ended}{budget}"
    frames = _FRAMES if straggler.outcome is StopOutcome.LEFT_BEHIND else 1
    for frame in straggler.where[:frames]:
        yield f"              at {escaped(frame)}"


def _children_text(children: tuple[RunningProgram, ...]) -> list[str]:
    if not children:
        return []
    ordered = sorted(children, key=lambda child: (_WORST_FIRST[child.outcome], child.pid))
    text = [f"Programs that were still running ({len(ordered)}):"]
    for child in ordered[:_SHOWN]:
        of = f" of {escaped(child.key)}" if child.key else ""
        text.append(
            f"  {child.outcome.value.upper():<11} pid {child.pid} {escaped(child.argv0)}{of}"
        )
    return text + _more(len(ordered))


def _keys_text(report: StopReport) -> list[str]:
    text = [f"Critical operations that finished within their budget: {report.critical_finished}"]
    if report.interrupted:
        shown = " ".join(escaped(key) for key in report.interrupted[:_SHOWN])
        text.append(f"Interrupted ({len(report.interrupted)}), the next start continues: {shown}")
        text += _more(len(report.interrupted))
    if report.operations:
        text.append(f"Open operations ({len(report.operations)}), the next start recovers them:")
        text += [
            f"  {each.id}  {escaped(each.key)} {escaped(each.name)}{' (held)' if each.held else ''}"
            for each in report.operations[:_SHOWN]
        ]
        text += _more(len(report.operations))
    if report.not_served:
        text.append(f"Keys that waited and got no run, the next start runs: {report.not_served}")
    if report.log_lines_dropped:
        text.append(f"Log lines dropped because the reader stalled: {report.log_lines_dropped}")
    return text


def _advice(report: StopReport) -> list[str]:
    text = []
    outcomes = {straggler.outcome for straggler in report.stragglers}
    if StopOutcome.CUT in outcomes:
        text.append(
            "  reconciled journal list   what was cut, and what the next start does with it"
        )
        text.append("  reconciled budget         whether the budgets fit what operations take")
    if StopOutcome.LEFT_BEHIND in outcomes:
        text.append("  the frames above          a thread, or code that swallows cancellation")
    if any(child.outcome is StopOutcome.LEFT_BEHIND for child in report.children):
        text.append("  reconciled reap           ends the programs that were left behind")
    if report.stacks:
        text.append(f'  {JSON_NAME}            stacks of all threads, under "stacks"')
    return ["Run next:", *text] if text else []


def _more(count: int) -> list[str]:
    return [f"  … and {count - _SHOWN} more, see {JSON_NAME}"] if count > _SHOWN else []
