"""Critical sections and cleanups, one rule at a time."""

# ruff: noqa: ARG001, PT012 - the clock works by being an argument; a section's body is its block
# flake8: noqa: ASYNC102 - cleanup() is the shield with a deadline that these tests are about
from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.lowlevel
import trio.testing
from trio.testing import MockClock

from reconciled.core.stages import Cut, Stage, StopLimits
from reconciled.stop import (
    CriticalRefused,
    Overrun,
    Section,
    Stop,
    Work,
    cleanup_scope,
    covering_section,
)
from reconciled.stop.work import DEFAULT_CLEANUP

LIMITS = StopLimits(drain=10, critical=60, cleanup=5)


@asynccontextmanager
async def running(stop: Stop) -> AsyncIterator[None]:
    """The stages of *stop*, and its scope around the block."""
    stop.install()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop.run_stages, lambda left: pytest.fail(f"left: {left}"))
        with stop.scope:
            yield
        nursery.cancel_scope.cancel(reason="the test is over")


def fresh() -> Stop:
    return Stop("daemon", LIMITS)


async def test_a_section_outlives_its_cancellation(autojump_clock: MockClock) -> None:
    """A stop that cancels its surroundings does not reach the body, nor a return right after it."""
    stop, reached = fresh(), []

    async def run() -> str:
        with Work("w", stop) as work:
            async with work.critical("write", budget=40):
                await trio.sleep(30)
                reached.append("end of the body")
            reached.append("after it")
            return "done"
        return "cancelled"

    async with running(stop):
        stop.begin("SIGTERM")
        assert await run() == "done"
    assert reached == ["end of the body", "after it"]


async def test_the_cancellation_is_delivered_at_the_next_checkpoint(
    autojump_clock: MockClock,
) -> None:
    """A cancellation that arrived during the section is delivered after it, not lost."""
    stop, reached = fresh(), []
    async with running(stop):
        stop.begin("SIGTERM")
        with Work("w", stop) as work:
            async with work.critical("write", budget=40):
                await trio.sleep(30)
            reached.append("after it")
            await trio.lowlevel.checkpoint()
            reached.append("after a checkpoint")
    assert reached == ["after it"]


async def test_the_budget_counts_from_entry(autojump_clock: MockClock) -> None:
    """Whatever happens around it, a section has its budget from its entry, and is then cut."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work:
            began = trio.current_time()
            with pytest.raises(Overrun) as overrun:
                async with work.critical("write", budget=20) as section:
                    assert section.remaining == 20
                    await trio.sleep(8)
                    stop.begin("SIGTERM")
                    await trio.sleep_forever()
            assert trio.current_time() == began + 20
    assert str(overrun.value) == "write was cut off after 20s by its own budget of 20s"


async def test_an_overrun_names_its_reason(autojump_clock: MockClock) -> None:
    """A section that the enclosing one cut names that as the reason."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work:
            async with work.critical("outer", budget=3):
                with pytest.raises(Overrun, match=r"inner was .* by the enclosing section"):
                    async with work.critical("inner", budget=9):
                        await trio.sleep_forever()
    assert stop.registry.cut_count == 0


async def test_inner_sections_end_with_the_outer_one(autojump_clock: MockClock) -> None:
    """A section's deadline is never later than that of the enclosing section."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work:
            async with work.critical("outer", budget=10) as outer:
                async with work.critical("inner", budget=30) as inner:
                    assert inner.deadline == outer.deadline
                async with work.critical("inner", budget=4) as inner:
                    assert inner.remaining == 4
                    assert inner.parent is outer
                assert outer.remaining == 10


async def test_a_late_section_ends_at_the_hard_limit(autojump_clock: MockClock) -> None:
    """One that starts during the drain is clamped to the hard limit of the stop, and cut there."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work:
            stop.begin("SIGTERM")
            began = trio.current_time()
            await trio.sleep(9)
            with pytest.raises(Overrun, match="the hard limit of the stop"):
                async with work.critical("write", budget=60) as section:
                    assert section.deadline == began + 60
                    await trio.sleep_forever()
            assert trio.current_time() == began + 60
    assert stop.registry.cut_count == 1
    assert stop.registry.cuts[0].section == "write"


async def test_a_lower_limit_reaches_open_sections(autojump_clock: MockClock) -> None:
    """A stop with shorter limits than the budget lowers open deadlines; none is raised."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work, pytest.raises(Overrun, match="the hard limit"):
            async with work.critical("write", budget=50) as section:
                stop.limits = StopLimits(drain=1, critical=7, cleanup=1)
                stop.begin("SIGTERM")
                assert section.remaining == 7
                section.clamp(trio.current_time() + 100)
                assert section.remaining == 7
                await trio.sleep_forever()


async def test_no_section_starts_after_the_drain(autojump_clock: MockClock) -> None:
    """From STOPPING on a section is refused by a cancellation, which no retry loop catches."""
    stop, reached = fresh(), []

    async def run() -> None:
        with Work("w", stop) as work:
            async with work.critical("write", budget=1):
                reached.append("it started")

    async with running(stop):
        stop.crash("test")
        with trio.CancelScope(shield=True):
            # The work starts outside the cancelled scope, so nothing else cancels it.
            await trio.lowlevel.checkpoint()
        with pytest.raises(trio.Cancelled):
            await run()
    assert reached == []


async def test_inside_another_shield_the_refusal_is_an_error(autojump_clock: MockClock) -> None:
    """Where no cancellation can be delivered, a late section raises CriticalRefused."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work:
            stop.crash("test")
            with (
                trio.CancelScope(shield=True),
                pytest.raises(CriticalRefused, match=r"w: 'late' cannot start: stop in progress"),
            ):
                async with work.critical("late", budget=1):
                    raise AssertionError("it started")


async def test_an_open_section_can_open_another_during_a_stop(autojump_clock: MockClock) -> None:
    """A section that is open during STOPPING can open sections inside it."""
    stop, reached = fresh(), []
    async with running(stop):
        with Work("w", stop) as work:
            async with work.critical("outer", budget=30):
                stop.crash("test")
                assert stop.stage is Stage.STOPPING
                async with work.critical("inner", budget=30):
                    await trio.sleep(1)
                    reached.append("inner")
    assert reached == ["inner"]


@pytest.mark.parametrize("budget", [0, -1, math.inf, math.nan])
async def test_a_budget_is_positive_and_finite(autojump_clock: MockClock, budget: float) -> None:
    """No shield without a deadline (invariant 6)."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work:
            with pytest.raises(ValueError, match="a budget must be positive and finite"):
                async with work.critical("write", budget=budget):
                    raise AssertionError("it started")
            assert not work.sections


async def test_a_timeout_is_suspended_during_a_section(autojump_clock: MockClock) -> None:
    """Time inside a section does not count against the timeout, which continues afterwards."""
    stop = fresh()
    async with running(stop):
        began = trio.current_time()
        with Work("w", stop, timeout=10) as work:
            await trio.sleep(6)
            async with work.critical("write", budget=30):
                assert work.scope.deadline == math.inf
                await trio.sleep(25)
            assert work.scope.deadline == began + 35
            await trio.sleep_forever()
        assert work.scope.cancelled_caught
        assert trio.current_time() == began + 35


async def test_escalation_cuts_a_section_at_the_last_stage(autojump_clock: MockClock) -> None:
    """Escalation goes stage by stage; only the last one cuts, and its reason is kept."""
    stop = fresh()
    async with running(stop):
        with Work("w", stop) as work, pytest.raises(Overrun, match="by SIGINT again"):
            async with work.critical("write", budget=50):
                for expected in (Stage.DRAINING, Stage.STOPPING, Stage.HARD):
                    stop.escalate("SIGINT again")
                    assert stop.stage is expected
                await trio.sleep_forever()


async def test_a_scope_before_the_deadline(autojump_clock: MockClock) -> None:
    """scope_before_deadline() ends its lead before the deadline, also when that is lowered."""
    stop = fresh()
    ended: list[float] = []
    async with running(stop):
        with Work("w", stop) as work, pytest.raises(Overrun):
            began = trio.current_time()
            async with work.critical("write", budget=50) as section:
                with section.scope_before_deadline(5) as scope:
                    section.clamp(began + 20)
                    await trio.sleep_forever()
                ended.append(trio.current_time() - began)
                await trio.sleep_forever()
    assert scope.cancelled_caught
    assert ended == [15]


async def test_a_child_started_into_an_outer_nursery_is_not_covered(
    autojump_clock: MockClock,
) -> None:
    """Only tasks inside the section's shield are covered by it, not those started elsewhere."""
    stop = fresh()
    covered: dict[str, Section | None] = {}

    async def child(name: str) -> None:
        covered[name] = covering_section()

    async with running(stop):
        with Work("w", stop) as work:
            async with trio.open_nursery() as outside, work.critical("write", budget=5) as section:
                outside.start_soon(child, "outside")
                async with trio.open_nursery() as inside:
                    inside.start_soon(child, "inside")
                    inside.start_soon(child, "second inside")
                await trio.testing.wait_all_tasks_blocked()
                await child("own task")
            await child("after it")
    within = dict.fromkeys(("inside", "second inside", "own task"), section)
    assert covered == {"outside": None, "after it": None, **within}


# -- cleanups ---------------------------------------------------------------------------


async def test_a_cleanup_has_its_allowance(autojump_clock: MockClock) -> None:
    """After a cancellation a cleanup can await for its allowance; an overrun raises nothing."""
    stop, reached = fresh(), []
    cuts: list[Cut] = []
    stop.registry.on_cleanup_cut = cuts.append
    async with running(stop):
        with Work("w", stop) as work:
            stop.crash("test")
            began = trio.current_time()
            try:
                await trio.sleep_forever()
            finally:
                async with work.cleanup("unlock"):
                    await trio.sleep(4)
                    reached.append("cleaned up")
                async with work.cleanup("remainder"):
                    await trio.sleep_forever()
                reached.append(f"cut after {trio.current_time() - began:g} s")
    # Both share one allowance: it counts from the cancellation.
    assert reached == ["cleaned up", "cut after 5 s"]
    assert [cut.section for cut in cuts] == ["cleanup remainder"]


async def test_a_cleanup_outlives_the_hard_limit(autojump_clock: MockClock) -> None:
    """Cut at the hard limit, a section's cleanup still has its allowance from there."""
    stop, reached = fresh(), []
    async with running(stop):
        began = trio.current_time()
        with Work("w", stop) as work, pytest.raises(Overrun):
            async with work.critical("write", budget=60):
                stop.begin("SIGTERM")
                try:
                    await trio.sleep_forever()
                finally:
                    async with work.cleanup("unlock"):
                        await trio.sleep(4)
                        reached.append(trio.current_time() - began)
                    async with work.cleanup("remainder"):
                        await trio.sleep_forever()
                    reached.append(trio.current_time() - began)
    assert reached == [64, 65]


async def test_without_a_stop_a_cleanup_counts_from_its_start(
    autojump_clock: MockClock,
) -> None:
    """In normal running a cleanup has its allowance from its start."""
    stop = fresh()
    cuts: list[Cut] = []
    stop.registry.on_cleanup_cut = cuts.append
    async with running(stop):
        with Work("w", stop) as work:
            await trio.sleep(100)
            began = trio.current_time()
            async with work.cleanup("slow"):
                await trio.sleep_forever()
            assert trio.current_time() == began + 5
    assert [cut.section for cut in cuts] == ["cleanup slow"]


async def test_a_cleanup_without_a_work_has_a_default(autojump_clock: MockClock) -> None:
    """Outside a run, as in a plugin's own tests, a cleanup has a default allowance."""
    began = trio.current_time()
    with cleanup_scope():
        await trio.sleep_forever()
    assert trio.current_time() == began + DEFAULT_CLEANUP
    assert covering_section() is None


# -- crashes and sizes -----------------------------------------------------------------------


async def test_a_crash_begins_the_stop_before_siblings_end(autojump_clock: MockClock) -> None:
    """guard() turns a crash, and no cancellation, into a stop at STOPPING with a reason."""
    stop, seen = fresh(), []

    async def sibling() -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append((stop.stage, stop.reason))

    async def fails() -> None:
        await trio.sleep(1)
        raise ExceptionGroup("several", [ValueError("x is 3")])

    with pytest.RaisesGroup(pytest.RaisesGroup(ValueError)):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sibling)
            nursery.start_soon(stop.guard, fails)
    assert seen == [(Stage.STOPPING, "crash: ValueError('x is 3')")]

    calm = fresh()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(calm.guard, trio.sleep_forever)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel(reason="enough")
    assert calm.stage is Stage.RUNNING


async def test_stops_nest(autojump_clock: MockClock) -> None:
    """A controller's stop does not affect others; the daemon's reaches all; the furthest counts."""
    daemon = fresh()
    one, other = (Stop(name, LIMITS, parent=daemon) for name in ("one", "other"))
    one.crash("reload")
    assert (one.stage, other.stage, daemon.stage) == (
        Stage.STOPPING,
        Stage.RUNNING,
        Stage.RUNNING,
    )
    assert not other.began.is_set()
    daemon.begin("SIGTERM")
    assert [stop.stage for stop in (one, other)] == [Stage.STOPPING, Stage.DRAINING]
    assert other.began.is_set()
    assert other.hard_at == daemon.hard_at
    late = Stop("late", LIMITS, parent=daemon)
    assert late.began.is_set()
    assert late.registry is daemon.registry
    one.detach()
    assert daemon.children == {other, late}


def stage_of(stop: Stop) -> Stage:
    return stop.stage


async def test_stages_only_go_forward(autojump_clock: MockClock) -> None:
    """Whatever is requested in whatever order, no stage is reached twice or left backwards."""
    stop = fresh()
    stop.cut("too early")
    stop.end_drain("too early")
    assert stage_of(stop) is Stage.RUNNING
    stop.begin("first")
    stop.begin("second")
    assert (stop.reason, stop.stage) == ("first", Stage.DRAINING)
    stop.cut("not yet")
    assert stage_of(stop) is Stage.DRAINING
    for _ in range(3):
        stop.end_drain("over")
        stop.crash("late")
    assert stage_of(stop) is Stage.STOPPING
    stop.cut("now")
    stop.end_drain("back?")
    assert [stage for stage, _ in stop.history] == [Stage.DRAINING, Stage.STOPPING, Stage.HARD]


async def test_the_instant_can_be_in_the_past(autojump_clock: MockClock) -> None:
    """Limits count from when the stop was requested, although the loop was busy since."""
    stop = fresh()
    async with running(stop):
        await trio.sleep(100)
        requested = trio.current_time() - 8
        stop.begin("SIGTERM", at=requested)
        await trio.sleep(1.9)
        assert stage_of(stop) is Stage.DRAINING
        await trio.sleep_forever()
    assert stop.stopping_at == requested + 10
    assert stop.hard_at == requested + 60


@pytest.mark.parametrize("stage", [Stage.STOPPING, Stage.HARD])
async def test_tasks_that_end_after_a_late_wake_up_are_not_left_behind(
    stage: Stage, autojump_clock: MockClock
) -> None:
    """After a halt beyond every deadline the tasks may still unwind before they count as left."""
    stop, reached = fresh(), []

    async def run() -> None:
        with Work("w", stop) as work:
            try:
                await trio.sleep_forever()
            finally:
                async with work.cleanup("unlock"):
                    await trio.sleep_forever()
                with trio.CancelScope(deadline=trio.current_time() + 1, shield=True):
                    await trio.sleep(0.4)
                    reached.append("unwound")

    async with running(stop):
        stop.begin("SIGTERM")
        async with trio.open_nursery() as works:
            works.start_soon(run)
            await trio.testing.wait_all_tasks_blocked()
            with trio.CancelScope(shield=True):
                stop.end_drain("SIGTERM again")
                if stage is Stage.HARD:
                    stop.cut("SIGINT")
                await trio.testing.wait_all_tasks_blocked()
                assert stop.stage is stage
                assert reached == []
                autojump_clock.jump(1000)
                await trio.sleep(1)
    assert reached == ["unwound"]
