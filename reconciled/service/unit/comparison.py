"""Compares a unit with the daemon's stop budget: the one entry for verbs and for the daemon.

1. Each finding states in one sentence what is wrong and what to set, and carries the file to
   write. With that file in place the finding disappears.
2. What could not be read (None) is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from reconciled.core.stages import StopLimits
from reconciled.service.unit import directives, timeouts
from reconciled.service.unit.facts import UnitFacts, UnitUnavailable
from reconciled.service.unit.findings import Finding, UnitComparison
from reconciled.service.unit.query import read_unit

_CHECKS: tuple[Callable[[UnitFacts, StopLimits], Finding | None], ...] = (
    timeouts.timeout_stop,
    timeouts.power_off_limit,
    directives.kill_mode,
    directives.no_reaper,
    timeouts.reap_wait,
    directives.restart,
    directives.start_limit,
    directives.watchdog,
    directives.notify_access,
    directives.oom_policy,
    directives.send_sigkill,
    timeouts.inhibit_delay,
    directives.socket_path,
    directives.socket_user,
    directives.unread_files,
)


def compare_unit(
    environ: Mapping[str, str],
    limits: StopLimits,
    name: str | None = None,
    watchdog: float | None = None,
) -> UnitComparison:
    """Compare *limits* with the unit *name*; None: with the one whose main process this is.

    Blocks for 2 s at most; never raises. *environ* and *watchdog*: see read_unit().
    """
    facts = read_unit(environ, name, watchdog)
    if isinstance(facts, UnitUnavailable):
        return UnitComparison(name or "", reason=facts.reason)
    reason = "" if facts.timeout_stop is not None else f"{facts.name}: cannot read TimeoutStopSec="
    return UnitComparison(facts.name, facts, find_mismatches(facts, limits), reason)


def find_mismatches(facts: UnitFacts, limits: StopLimits) -> tuple[Finding, ...]:
    """All findings of a unit, the worst first."""
    found = [finding for check in _CHECKS if (finding := check(facts, limits)) is not None]
    return tuple(sorted(found, key=lambda each: each.severity))
