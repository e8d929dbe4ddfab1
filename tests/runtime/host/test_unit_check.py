"""The check of the daemon's unit: when it is ready, and after a reload changed the limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from reconciled.core.stages import StopLimits
from reconciled.runtime.host import unit_check
from reconciled.runtime.host.unit_check import UnitCheck
from reconciled.service.unit.findings import Finding, Remedy, Severity, UnitComparison

SHORT = Finding(
    Severity.FAULT, "TimeoutStopSec", "too short", Remedy("/x.conf", "[Service]\n", "go")
)
UNWATCHED = Finding(Severity.ADVICE, "WatchdogSec", "off")
MIXED = Finding(Severity.NOTE, "KillMode", "mixed")
LIMITS, LONGER = StopLimits(), StopLimits(critical=600.0)


@attrs.define(eq=False)
class RecordingLog:
    """Keeps the lines: level, event, fields."""

    entries: list[tuple[str, str, dict[str, Any]]] = attrs.field(factory=list)
    more: trio.Event = attrs.field(factory=trio.Event)

    def __getattr__(self, level: str) -> Callable[..., None]:
        def log(event: str, **fields: Any) -> None:
            self.entries.append((level, event, fields))
            self.more.set()
            self.more = trio.Event()

        return log

    async def wait_for(self, count: int) -> None:
        """Wait until *count* lines were logged."""
        with trio.fail_after(5):
            while len(self.entries) < count:
                await self.more.wait()

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(level, event) for level, event, _ in self.entries]


@attrs.define(eq=False)
class CheckWithScriptedManager:
    """A UnitCheck with a scripted result for each StopLimits; compared has the calls, in order."""

    answers: dict[StopLimits, UnitComparison] = attrs.field(factory=dict)
    log: RecordingLog = attrs.field(factory=RecordingLog)
    compared: list[StopLimits] = attrs.field(factory=list)
    check: UnitCheck = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.check = UnitCheck(self.log, {"HOME": "/x"}, 60.0)  # type: ignore[arg-type]

    def compare(self, environ: Any, watchdog: Any, limits: StopLimits) -> UnitComparison:
        assert (environ, watchdog) == ({"HOME": "/x"}, 60.0)
        self.compared.append(limits)
        return self.answers.get(limits, UnitComparison("r.service"))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> CheckWithScriptedManager:
    scripted = CheckWithScriptedManager()
    monkeypatch.setattr(unit_check, "compare_own_unit", scripted.compare)
    return scripted


def test_strict_refuses_a_fault_and_nothing_else(scripted: CheckWithScriptedManager) -> None:
    """Only a stop budget that does not fit refuses a start; advice and notes are logged."""
    scripted.answers[LIMITS] = UnitComparison("r.service", findings=(UNWATCHED, MIXED))
    scripted.answers[LONGER] = UnitComparison("r.service", findings=(SHORT, UNWATCHED))
    assert scripted.check.fits(LIMITS)
    assert not scripted.check.fits(LONGER)
    assert scripted.log.events == [
        ("warning", "unit.advice"),
        ("info", "unit.note"),
        ("error", "unit.timeout_too_short"),
    ]
    *_, (_, _, fields) = scripted.log.entries
    assert fields == {
        "directive": "TimeoutStopSec",
        "reason": "too short",
        "file": "/x.conf",
        "content": "[Service]\n",
        "command": "go",
    }


def test_strict_logs_that_the_unit_is_unknown(scripted: CheckWithScriptedManager) -> None:
    """A unit that cannot be read refuses nothing, but is logged as unavailable."""
    scripted.answers[LIMITS] = UnitComparison(reason="the bus: no")
    assert scripted.check.fits(LIMITS)
    assert scripted.log.entries == [("warning", "unit.unavailable", {"reason": "the bus: no"})]


async def test_the_same_limits_are_checked_once(
    scripted: CheckWithScriptedManager, nursery: trio.Nursery
) -> None:
    """Ready and reloads without a change lead to one check, changed limits to another."""
    scripted.answers[LIMITS] = UnitComparison("r.service", findings=(UNWATCHED,))
    scripted.answers[LONGER] = UnitComparison("r.service", findings=(SHORT, UNWATCHED))
    now = LIMITS
    nursery.start_soon(scripted.check.serve, lambda: now)
    await wait_all_tasks_blocked()
    assert scripted.compared == []
    scripted.check.request()
    await scripted.log.wait_for(1)
    scripted.check.request()
    await wait_all_tasks_blocked()
    now = LONGER
    scripted.check.request()
    await scripted.log.wait_for(2)
    assert scripted.compared == [LIMITS, LONGER]
    # A finding is not logged again.
    assert scripted.log.events == [("warning", "unit.advice"), ("error", "unit.timeout_too_short")]


async def test_without_a_manager_nothing_is_logged(
    scripted: CheckWithScriptedManager, nursery: trio.Nursery
) -> None:
    """Without a unit there is one line at level debug, and no other."""
    scripted.answers[LIMITS] = UnitComparison(reason="this process is not of a service unit")
    nursery.start_soon(scripted.check.serve, lambda: LIMITS)
    scripted.check.request()
    await scripted.log.wait_for(1)
    assert scripted.log.events == [("debug", "unit.unavailable")]


async def test_a_unit_that_fits_is_logged(
    scripted: CheckWithScriptedManager, nursery: trio.Nursery
) -> None:
    """A check without findings is logged, so that silence means that there was no check."""
    scripted.answers[LIMITS] = UnitComparison("r.service", findings=(MIXED,))
    nursery.start_soon(scripted.check.serve, lambda: LIMITS)
    scripted.check.request()
    await scripted.log.wait_for(2)
    assert scripted.log.events == [("info", "unit.ok"), ("info", "unit.note")]
