"""A unit compared with the daemon's stop: everything that does not fit, without effects.

1. Each finding says in a sentence what is wrong and what to set, and carries the file to write.
   With that file in place it is gone.
2. What could not be read (None) is passed over.
"""

from __future__ import annotations

from collections.abc import Callable

from reconciled.core.stages import StopLimits
from reconciled.service import directives, timing
from reconciled.service.findings import Finding
from reconciled.service.unit_facts import UnitFacts

_CHECKS: tuple[Callable[[UnitFacts, StopLimits], Finding | None], ...] = (
    timing.timeout_stop,
    timing.power_off_limit,
    directives.kill_mode,
    directives.no_reaper,
    timing.reap_wait,
    directives.restart,
    directives.start_limit,
    directives.watchdog,
    directives.notify,
    directives.oom_policy,
    directives.sigkill,
    timing.inhibit_delay,
    directives.sockets,
    directives.socket_user,
    directives.stale,
)


def compare(facts: UnitFacts, limits: StopLimits) -> tuple[Finding, ...]:
    """All findings of a unit, the worst first."""
    found = [finding for look in _CHECKS if (finding := look(facts, limits)) is not None]
    return tuple(sorted(found, key=lambda each: each.severity))
