"""The daemon's own unit, compared with its stop budget: told in the log, one line a finding.

1. Asked for in a thread once the daemon is ready, so that no start waits for it; with ``--strict``
   before anything begins, for then the answer decides whether it may.
2. Asked again when a reload has changed what a stop may take. What was told is not told again.
3. Without a manager, or with one that does not answer, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import attrs
import trio

from reconciled.core.errors import NoThread
from reconciled.core.stages import StopLimits
from reconciled.observe.bound_log import BoundLog
from reconciled.service.unit.findings import Finding, Severity, UnitComparison
from reconciled.threads import in_thread


@attrs.define(eq=False)
class UnitCheck:
    """What the daemon says of its unit. environ tells where the buses are."""

    log: BoundLog
    environ: Mapping[str, str]
    watchdog: float | None  # as the manager has told it to this process, in seconds
    _logged: set[Finding] = attrs.field(factory=set, init=False)
    _compared: StopLimits | None = attrs.field(default=None, init=False)
    _due: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Its own, since the others' threads are for work; one, for one question at a time.
    _limiter: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(1), init=False
    )

    def fits(self, limits: StopLimits) -> bool:
        """Whether *limits* fit the unit, where that is known; says what does not.

        Blocks for 2 s at most: for a start that is to be refused.
        """
        compared = compare_own_unit(self.environ, self.watchdog, limits)
        if compared.reason:
            # Somebody asked for it: that nothing is refused must not pass for "it fits".
            self.log.warning("unit.unavailable", reason=compared.reason)
        self._compared = limits
        self._log_findings(compared)
        return all(finding.severity is not Severity.FAULT for finding in compared.findings)

    def request(self) -> None:
        """Have the limits of a stop compared soon, if they are others than last time."""
        self._due.set()

    async def serve(self, limits_now: Callable[[], StopLimits]) -> None:
        """Compare whenever it is asked for; until cancelled, which waits for no answer."""
        while True:
            await self._due.wait()
            self._due = trio.Event()
            limits = limits_now()
            if limits == self._compared:
                continue
            self._compared = limits
            looks = partial(compare_own_unit, self.environ, self.watchdog, limits)
            try:
                compared = await in_thread(looks, limiter=self._limiter, abandon_on_cancel=True)
            except NoThread as error:
                compared = UnitComparison(reason=str(error))
            if compared.reason:
                self.log.debug("unit.unavailable", reason=compared.reason)
            self._log_findings(compared)

    def _log_findings(self, compared: UnitComparison) -> None:
        if not compared.reason and all(
            each.severity is Severity.NOTE for each in compared.findings
        ):
            self.log.info("unit.ok", unit=compared.name)
        for finding in compared.findings:
            if finding in self._logged:
                continue
            self._logged.add(finding)
            fields = {"directive": finding.directive, "reason": finding.message}
            if remedy := finding.remedy:
                told = {"file": remedy.path, "content": remedy.text, "command": remedy.command}
                fields |= {name: text for name, text in told.items() if text}
            if finding.severity is Severity.FAULT:
                self.log.error("unit.timeout_too_short", **fields)
            elif finding.severity is Severity.ADVICE:
                self.log.warning("unit.advice", **fields)
            else:
                self.log.info("unit.note", **fields)


def compare_own_unit(
    environ: Mapping[str, str], watchdog: float | None, limits: StopLimits
) -> UnitComparison:
    """compare_unit(), imported late: a start must not wait for what only this needs."""
    from reconciled.service.unit.comparison import compare_unit

    return compare_unit(environ, limits, watchdog=watchdog)
