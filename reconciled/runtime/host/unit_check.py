"""Compares the daemon's own unit with its stop budget, and logs each finding.

1. The check runs in a thread once the daemon is ready, so that no start waits for it; with
   ``--strict`` it runs before anything starts, because it decides whether the daemon may start.
2. It runs again when a reload has changed the limits of a stop. A finding is logged once.
3. Without a service manager, or with one that does not reply, nothing is logged above debug level.
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
    """The check of one daemon. environ has the addresses of the buses."""

    log: BoundLog
    environ: Mapping[str, str]
    watchdog: float | None  # WATCHDOG_USEC of this process, in seconds
    _logged: set[Finding] = attrs.field(factory=set, init=False)
    _compared: StopLimits | None = attrs.field(default=None, init=False)
    _due: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Not the shared one, whose threads are for work; one thread, for one check at a time.
    _limiter: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(1), init=False
    )

    def fits(self, limits: StopLimits) -> bool:
        """Log the findings for *limits*; False if one of them is a fault.

        For ``--strict``, before the start. Blocks for 2 s at most.
        """
        compared = compare_own_unit(self.environ, self.watchdog, limits)
        if compared.reason:
            # A person requested --strict: a failed check must not look like a passed one.
            self.log.warning("unit.unavailable", reason=compared.reason)
        self._compared = limits
        self._log_findings(compared)
        return all(finding.severity is not Severity.FAULT for finding in compared.findings)

    def request(self) -> None:
        """Request a check, which is skipped if the limits are those of the last check."""
        self._due.set()

    async def serve(self, limits_now: Callable[[], StopLimits]) -> None:
        """Check at each request; until cancelled, which does not wait for the thread."""
        while True:
            await self._due.wait()
            self._due = trio.Event()
            limits = limits_now()
            if limits == self._compared:
                continue
            self._compared = limits
            check = partial(compare_own_unit, self.environ, self.watchdog, limits)
            try:
                compared = await in_thread(check, limiter=self._limiter, abandon_on_cancel=True)
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
                written = {"file": remedy.path, "content": remedy.text, "command": remedy.command}
                fields |= {name: text for name, text in written.items() if text}
            if finding.severity is Severity.FAULT:
                self.log.error("unit.timeout_too_short", **fields)
            elif finding.severity is Severity.ADVICE:
                self.log.warning("unit.advice", **fields)
            else:
                self.log.info("unit.note", **fields)


def compare_own_unit(
    environ: Mapping[str, str], watchdog: float | None, limits: StopLimits
) -> UnitComparison:
    """compare_unit(), imported late: a start must not wait for imports that only this needs."""
    from reconciled.service.unit.comparison import compare_unit

    return compare_unit(environ, limits, watchdog=watchdog)
