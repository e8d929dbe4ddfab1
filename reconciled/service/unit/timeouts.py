"""Checks the timeouts of a unit and of logind against the daemon's stop and its reaper.

1. TimeoutStopSec= covers the stop budget and ten percent. That the daemon also requests more time
   while it stops does not count: a daemon-reload makes the manager forget it.
2. TimeoutStopSec= applies to the reaper separately: the reaper's longest wait has to fit too.
"""

from __future__ import annotations

import math
import shlex

from reconciled.core.durations import format_duration, parse_duration
from reconciled.core.stages import StopLimits
from reconciled.service.unit.facts import Command, UnitFacts
from reconciled.service.unit.findings import Finding, Remedy, Severity, drop_in, format_timespan

MARGIN_FACTOR = 1.1
# systemd forces a power-off after this time, whatever still runs.
POWER_OFF = 1800.0
# The daemon releases its delay lock this long before logind would stop waiting.
LOCK_MARGIN = 1.0
# The reaper's time besides waiting.
REAPER_MARGIN = 10.0
# The defaults of ``reconciled reap``.
REAP_WAIT, REAP_TERM = 600.0, 30.0
_ABORT = 30.0  # enough for TimeoutAbortSec=, in which a core dump is written
_LOGIND_FILE = "/etc/systemd/logind.conf.d/60-reconciled.conf"


def recommended_timeout_stop(facts: UnitFacts, limits: StopLimits) -> float:
    """The least TimeoutStopSec= that covers the stop and the reaper, rounded up."""
    needed = limits.budget * MARGIN_FACTOR
    if facts.kill_mode != "mixed":
        # Where there is no reaper, another finding recommends one.
        wait, term = reaper_times(facts.reaper) if facts.reaper else (limits.critical, REAP_TERM)
        needed = max(needed, max(wait, limits.critical) + term + REAPER_MARGIN)
    step = 5.0 if needed <= 120.0 else 60.0  # noqa: PLR2004 - 15s, 6min
    return math.ceil(needed / step) * step


def timeout_stop(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Whether TimeoutStopSec= covers the stop budget."""
    have = facts.timeout_stop
    if have is None or have >= limits.budget * MARGIN_FACTOR:
        return None
    want = format_timespan(recommended_timeout_stop(facts, limits))
    room = "" if have < limits.budget else " and ten percent"
    return Finding(
        Severity.FAULT,
        "TimeoutStopSec",
        f"TimeoutStopSec={format_timespan(have)} is below the stop budget of"
        f" {format_duration(limits.budget)}{room}: a stop can end in SIGKILL during a critical"
        f" operation; set {want}, or lower stop.critical",
        drop_in(facts, "stop-budget", f"TimeoutStopSec={want}"),
    )


def power_off_limit(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Whether the limits of daemon, abort and reaper together end before a forced power-off."""
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
        f"TimeoutStopSec={format_timespan(stop)} lets a stop, with abort and reaper, take"
        f" {format_timespan(stop * ends + abort)}, and a power-off is forced after"
        f" {format_timespan(POWER_OFF)};"
        f" {'set ' + format_timespan(want) if fits else 'lower stop.critical'}",
        drop_in(facts, "stop-budget", *lines) if fits else None,
    )


def inhibit_delay(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Whether a shutdown of the machine can be delayed for the whole drain."""
    have, need = facts.inhibit_delay, limits.drain + LOCK_MARGIN
    if have is None or have >= need:
        return None
    want, before = format_timespan(math.ceil(need)), format_duration(max(0.0, have - LOCK_MARGIN))
    return Finding(
        Severity.NOTE,
        "InhibitDelayMaxSec",
        f"InhibitDelayMaxSec={format_timespan(have)} of logind is below stop.drain"
        f" ({format_duration(limits.drain)}) plus one second: before a shutdown of the machine the"
        f" drain lasts at most {before} and continues in the stop that follows; set {want} for all"
        " of it",
        Remedy(
            _LOGIND_FILE,
            f"[Login]\nInhibitDelayMaxSec={want}\n",
            "systemctl restart systemd-logind",
        ),
    )


def reap_wait(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Whether the reaper waits as long as a critical operation may take, and within its limit."""
    if facts.reaper is None or facts.timeout_stop is None or facts.kill_mode == "mixed":
        return None
    wait, term = reaper_times(facts.reaper)
    limit = format_timespan(recommended_timeout_stop(facts, limits))
    if wait < limits.critical:
        want = format_duration(limits.critical)
        lines = ["ExecStopPost=", f"ExecStopPost={reap_line(facts, limits)}"]
        if facts.timeout_stop < limits.critical + REAP_TERM:
            lines.append(f"TimeoutStopSec={limit}")
        # The empty line resets all commands: only where there is no other.
        remedy = drop_in(facts, "reaper", *lines) if len(facts.exec_stop_post or ()) == 1 else None
        what = (
            f"reap --wait={format_duration(wait)} is below stop.critical ({want}): after a crash"
            f" critical programs are ended before their deadline; set --wait={want}"
        )
    elif limits.budget * MARGIN_FACTOR <= facts.timeout_stop < wait + term:
        # Below the budget timeout_stop() reports it, and its value covers the reaper.
        what = (
            f"reap --wait={format_duration(wait)} --term={format_duration(term)} may take longer"
            f" than TimeoutStopSec={format_timespan(facts.timeout_stop)}, which applies to it too:"
            f" it can be killed before it has ended the programs; set {limit}, or a shorter --wait"
        )
        remedy = drop_in(facts, "stop-budget", f"TimeoutStopSec={limit}")
    else:
        return None
    return Finding(Severity.ADVICE, "ExecStopPost", what, remedy)


def reap_line(facts: UnitFacts, limits: StopLimits) -> str:
    """The reaper's command in the syntax of a unit file."""
    wait = format_duration(limits.critical)
    words = (facts.program, "reap", f"--wait={wait}", f"--term={format_duration(REAP_TERM)}")
    # The manager would expand these two characters.
    return shlex.join(words).replace("%", "%%").replace("$", "$$")


def reaper_times(command: Command) -> tuple[float, float]:
    """How long ``reap`` waits for a critical program, and from SIGTERM to SIGKILL, in seconds."""
    return _option(command, "--wait", REAP_WAIT), _option(command, "--term", REAP_TERM)


def _option(command: Command, name: str, default: float) -> float:
    """The duration of an option, written ``--name=…`` or ``--name …``."""
    for word, following in zip(command, (*command[1:], ""), strict=True):
        written = following if word == name else word.removeprefix(f"{name}=")
        if written != word:
            try:
                return parse_duration(written)
            except ValueError:
                return default
    return default
