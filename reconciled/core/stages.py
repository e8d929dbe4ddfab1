"""The stages of a stop, and the arithmetic of its limits."""

from __future__ import annotations

import enum

import attrs

# After the hard limit and one cleanup, this long until the last resort ends the process.
LAST_RESORT = 3.0
# A loop that has not turned for so long counts as blocked.
BLOCKED_AFTER = 5.0


class Stage(enum.IntEnum):
    """Where a stop stands. One-way; compared with ``<``.

    RUNNING   everything may begin.
    DRAINING  nothing new starts; what runs goes on with a live scope.
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
