"""The stages of a stop, the arithmetic of its limits, and what was cut off at one."""

from __future__ import annotations

import enum

import attrs

from reconciled.core.durations import format_duration

# After the hard limit and one cleanup, this long until the last resort ends the process.
LAST_RESORT = 3.0
# Seconds without a turn of the event loop from which on it counts as blocked.
BLOCKED_AFTER = 5.0


class Stage(enum.IntEnum):
    """The stage of a stop. One-way; compared with ``<``.

    RUNNING   anything can start.
    DRAINING  nothing new starts; running work continues, not cancelled.
    STOPPING  ordinary work is cancelled; open critical operations run to their deadline.
    HARD      critical operations are cut too.
    """

    RUNNING = 0
    DRAINING = 1
    STOPPING = 2
    HARD = 3


@attrs.frozen
class StopLimits:
    """The configured limits, in seconds. drain and critical count from the signal."""

    drain: float = 20.0
    critical: float = 300.0
    cleanup: float = 5.0  # what one task gets after its cancellation

    @property
    def budget(self) -> float:
        """The longest a stop can take: what a service manager has to allow."""
        return self.critical + self.cleanup + LAST_RESORT


OWN_BUDGET = "its own budget"


@attrs.frozen
class Cut:
    """A critical section, or a cleanup, that was cut off before it completed."""

    section: str
    owner: str
    after: float
    budget: float
    reason: str
    key: str = ""

    def __str__(self) -> str:
        # From 1 s on milliseconds measure the loop's latency, and nothing about the section.
        after = round(self.after, 1) if self.after >= 1 else self.after
        budget = format_duration(self.budget)
        limit = (
            f"{self.reason} of {budget}"
            if self.reason == OWN_BUDGET
            else f"{self.reason} (budget {budget})"
        )
        return f"{self.section} was cut off after {format_duration(after)} by {limit}"
