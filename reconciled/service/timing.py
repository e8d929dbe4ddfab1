"""Whether the time that a unit and its host allow covers the daemon's stop, and its reaper's.

1. The limit's rule: TimeoutStopSec= covers the stop budget and ten percent. That the daemon also
   asks for more time while it stops does not count: a daemon-reload makes the manager forget it.
2. The reaper has a limit of its own, the same one: what it may wait has to fit too.
"""

from __future__ import annotations

import math
import shlex

from reconciled.core.durations import format_duration, parse_duration
from reconciled.core.stages import StopLimits
from reconciled.service.findings import Finding, Remedy, Severity, drop_in, format_timespan
from reconciled.service.unit_facts import Command, UnitFacts

MARGIN_FACTOR = 1.1
# A machine that is told to power off does so after this, whatever still runs.
POWER_OFF = 1800.0
# logind gets its lock back so much before it would stop waiting.
LOCK_MARGIN = 1.0
# What the reaper needs besides waiting.
REAPER_MARGIN = 10.0
# What ``reconciled reap`` waits where its words do not say it.
REAP_WAIT, REAP_TERM = 600.0, 30.0
_ABORT = 30.0  # what TimeoutAbortSec= needs at most, to write a dump
_LOGIND_FILE = "/etc/systemd/logind.conf.d/60-reconciled.conf"


def recommended_timeout_stop(facts: UnitFacts, limits: StopLimits) -> float:
    """The least TimeoutStopSec= that covers the stop and the reaper, as people round it."""
    needed = limits.budget * MARGIN_FACTOR
    if facts.kill_mode != "mixed":
        # Where there is no reaper, another finding asks for one.
        wait, term = reaper_times(facts.reaper) if facts.reaper else (limits.critical, REAP_TERM)
        needed = max(needed, max(wait, limits.critical) + term + REAPER_MARGIN)
    step = 5.0 if needed <= 120.0 else 60.0  # noqa: PLR2004 - 15s, 6min
    return math.ceil(needed / step) * step


def timeout_stop(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """The stop budget and the limit that the manager sets it."""
    have = facts.timeout_stop
    if have is None or have >= limits.budget * MARGIN_FACTOR:
        return None
    want = format_timespan(recommended_timeout_stop(facts, limits))
    room = "" if have < limits.budget else " and ten percent"
    return Finding(
        Severity.FAULT,
        "TimeoutStopSec",
        f"TimeoutStopSec={format_timespan(have)} is below the stop budget of"
        f" {format_duration(limits.budget)}{room}: a stop can end in SIGKILL, in the middle of"
        f" what is critical; set {want}, or lower stop.critical",
        drop_in(facts, "stop-budget", f"TimeoutStopSec={want}"),
    )


def power_off_limit(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """All limits of a stop and a power-off: the daemon's, an abort's, the reaper's."""
    stop, abort = facts.timeout_stop, facts.timeout_abort
    if stop is None or facts.exec_stop_post is None:
        return None
    ends = 2 if facts.exec_stop_post else 1
    abort = abort if facts.stop_failure_mode == "abort" and abort is not None else 0.0
    if stop * ends + abort < POWER_OFF:
        return None
    want, short = recommended_timeout_stop(facts, limits), min(abort, _ABORT)
    lines = [f"TimeoutStopSec={format_timespan(want)}"]
    lines += [f"TimeoutAbortSec={format_timespan(short)}"] if abort else []
    fits = want * ends + short < POWER_OFF
    return Finding(
        Severity.ADVICE,
        "TimeoutStopSec",
        f"TimeoutStopSec={format_timespan(stop)} lets a stop take"
        f" {format_timespan(stop * ends + abort)} with all that belongs"
        f" to it, and a power-off is forced after {format_timespan(POWER_OFF)};"
        f" {'set ' + format_timespan(want) if fits else 'lower stop.critical'}",
        drop_in(facts, "stop-budget", *lines) if fits else None,
    )


def inhibit_delay(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """The drain, and how long a shutdown of the machine lets itself be delayed for it."""
    have, need = facts.inhibit_delay, limits.drain + LOCK_MARGIN
    if have is None or have >= need:
        return None
    want, before = format_timespan(math.ceil(need)), format_duration(max(0.0, have - LOCK_MARGIN))
    return Finding(
        Severity.NOTE,
        "InhibitDelayMaxSec",
        f"InhibitDelayMaxSec={format_timespan(have)} of logind is below stop.drain"
        f" ({format_duration(limits.drain)}) and a second: before a shutdown of the machine at most"
        f" {before} are drained, and the rest in the stop that follows; set {want} for all of it",
        Remedy(
            _LOGIND_FILE,
            f"[Login]\nInhibitDelayMaxSec={want}\n",
            "systemctl restart systemd-logind",
        ),
    )


def reap_wait(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """What the reaper may wait, what it has to, and the limit that it is under itself."""
    if facts.reaper is None or facts.timeout_stop is None or facts.kill_mode == "mixed":
        return None
    wait, term = reaper_times(facts.reaper)
    limit = format_timespan(recommended_timeout_stop(facts, limits))
    if wait < limits.critical:
        want = format_duration(limits.critical)
        lines = ["ExecStopPost=", f"ExecStopPost={reap_line(facts, limits)}"]
        if facts.timeout_stop < limits.critical + REAP_TERM:
            lines.append(f"TimeoutStopSec={limit}")
        # The empty line takes all commands along: only where there is no other.
        remedy = drop_in(facts, "reaper", *lines) if len(facts.exec_stop_post or ()) == 1 else None
        what = (
            f"reap --wait={format_duration(wait)} is below stop.critical ({want}): after a crash a"
            f" critical program is ended before its time; set --wait={want}"
        )
    elif limits.budget * MARGIN_FACTOR <= facts.timeout_stop < wait + term:
        # Below the budget that is said already, and what to set covers the reaper.
        what = (
            f"reap --wait={format_duration(wait)} --term={format_duration(term)} may take longer"
            f" than TimeoutStopSec={format_timespan(facts.timeout_stop)}, which holds for it too:"
            f" it can be killed before it has ended what a crash left; set {limit},"
            " or a shorter --wait"
        )
        remedy = drop_in(facts, "stop-budget", f"TimeoutStopSec={limit}")
    else:
        return None
    return Finding(Severity.ADVICE, "ExecStopPost", what, remedy)


def reap_line(facts: UnitFacts, limits: StopLimits) -> str:
    """The reaper's command, as a unit file has it."""
    wait = format_duration(limits.critical)
    words = (facts.program, "reap", f"--wait={wait}", f"--term={format_duration(REAP_TERM)}")
    # What the manager would expand is meant as it stands.
    return shlex.join(words).replace("%", "%%").replace("$", "$$")


def reaper_times(command: Command) -> tuple[float, float]:
    """What ``reap`` waits for a critical program, and from SIGTERM to SIGKILL, in seconds."""
    return _option(command, "--wait", REAP_WAIT), _option(command, "--term", REAP_TERM)


def _option(command: Command, name: str, default: float) -> float:
    """The duration that *command* gives as ``--name=…`` or ``--name …``."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        written = following if word == name else word.removeprefix(f"{name}=")
        if written != word:
            try:
                return parse_duration(written)
            except ValueError:
                return default
    return default
