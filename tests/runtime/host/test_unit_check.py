"""What the daemon says of its unit: when it is ready, and when a reload changes the limits."""

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
class Log:
    """Keeps what is said: level, event, fields."""

    said: list[tuple[str, str, dict[str, Any]]] = attrs.field(factory=list)
    more: trio.Event = attrs.field(factory=trio.Event)

    def __getattr__(self, level: str) -> Callable[..., None]:
        def say(event: str, **fields: Any) -> None:
            self.said.append((level, event, fields))
            self.more.set()
            self.more = trio.Event()

        return say

    async def lines(self, count: int) -> None:
        """Until so many lines were said."""
        with trio.fail_after(5):
            while len(self.said) < count:
                await self.more.wait()

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(level, event) for level, event, _ in self.said]


@attrs.define(eq=False)
class Fitting:
    """A UnitFit whose manager answers by the limits, and counts its questions."""

    answers: dict[StopLimits, UnitComparison] = attrs.field(factory=dict)
    log: Log = attrs.field(factory=Log)
    asked: list[StopLimits] = attrs.field(factory=list)
    fit: UnitCheck = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.fit = UnitCheck(self.log, {"HOME": "/x"}, 60.0)  # type: ignore[arg-type]

    def look(self, environ: Any, watchdog: Any, limits: StopLimits) -> UnitComparison:
        assert (environ, watchdog) == ({"HOME": "/x"}, 60.0)
        self.asked.append(limits)
        return self.answers.get(limits, UnitComparison("r.service"))


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Fitting:
    made = Fitting()
    monkeypatch.setattr(unit_check, "compare_own_unit", made.look)
    return made


def test_strict_refuses_a_fault_and_nothing_else(fitting: Fitting) -> None:
    """Only a stop budget that does not fit refuses a start; advice and notes are said."""
    fitting.answers[LIMITS] = UnitComparison("r.service", findings=(UNWATCHED, MIXED))
    fitting.answers[LONGER] = UnitComparison("r.service", findings=(SHORT, UNWATCHED))
    assert fitting.fit.fits(LIMITS)
    assert not fitting.fit.fits(LONGER)
    assert fitting.log.events == [
        ("warning", "unit.advice"),
        ("info", "unit.note"),
        ("error", "unit.timeout_too_short"),
    ]
    *_, (_, _, fields) = fitting.log.said
    assert fields == {
        "directive": "TimeoutStopSec",
        "reason": "too short",
        "file": "/x.conf",
        "content": "[Service]\n",
        "command": "go",
    }


def test_strict_says_when_nothing_is_known(fitting: Fitting) -> None:
    """A unit that cannot be read refuses nothing, but does not pass for one that fits."""
    fitting.answers[LIMITS] = UnitComparison(reason="the bus: no")
    assert fitting.fit.fits(LIMITS)
    assert fitting.log.said == [("warning", "unit.unavailable", {"reason": "the bus: no"})]


async def test_it_is_asked_once_for_the_same_limits(
    fitting: Fitting, nursery: trio.Nursery
) -> None:
    """Ready, and reloads that change nothing, lead to one question; a change to another one."""
    fitting.answers[LIMITS] = UnitComparison("r.service", findings=(UNWATCHED,))
    fitting.answers[LONGER] = UnitComparison("r.service", findings=(SHORT, UNWATCHED))
    now = LIMITS
    nursery.start_soon(fitting.fit.serve, lambda: now)
    await wait_all_tasks_blocked()
    assert fitting.asked == []
    fitting.fit.request()
    await fitting.log.lines(1)
    fitting.fit.request()
    await wait_all_tasks_blocked()
    now = LONGER
    fitting.fit.request()
    await fitting.log.lines(2)
    assert fitting.asked == [LIMITS, LONGER]
    # What was said is not said again.
    assert fitting.log.events == [("warning", "unit.advice"), ("error", "unit.timeout_too_short")]


async def test_silence_without_a_manager(fitting: Fitting, nursery: trio.Nursery) -> None:
    """Where nobody tells of a unit, that is a line for who debugs, and nothing more."""
    fitting.answers[LIMITS] = UnitComparison(reason="this process is not of a service unit")
    nursery.start_soon(fitting.fit.serve, lambda: LIMITS)
    fitting.fit.request()
    await fitting.log.lines(1)
    assert fitting.log.events == [("debug", "unit.unavailable")]


async def test_a_unit_that_fits_is_said_to(fitting: Fitting, nursery: trio.Nursery) -> None:
    """That nothing was found is a line of its own, so that silence means that nobody has looked."""
    fitting.answers[LIMITS] = UnitComparison("r.service", findings=(MIXED,))
    nursery.start_soon(fitting.fit.serve, lambda: LIMITS)
    fitting.fit.request()
    await fitting.log.lines(2)
    assert fitting.log.events == [("info", "unit.ok"), ("info", "unit.note")]
