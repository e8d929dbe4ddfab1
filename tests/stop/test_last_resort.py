"""When a hanging process is ended, and what is reported about it."""

from __future__ import annotations

import faulthandler
import math
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import pytest
import trio

from reconciled.core.stages import StopLimits
from reconciled.stop import Stop, Work, last_resort
from reconciled.stop.last_resort import (
    Blocked,
    LastResort,
    ObservedTime,
    exit_deadline,
    hang_deadline,
)

LIMITS = StopLimits(drain=20, critical=300, cleanup=5)
IDLE = math.inf
EXITS = {
    "the loop turns": (IDLE, [], 408),
    "blocked when the signal arrived": (50.0, [], 105),
    "blocked after the signal": (150.0, [], 155),
    "blocked just before the end": (406.0, [], 408),
    "a critical operation is open": (IDLE, [160.0], 168),
    "several are open: the longest counts": (IDLE, [160.0, 260.0, 110.0], 268),
    "no deadline beyond the hard limit": (IDLE, [999.0], 408),
    "blocked with one open: its deadline counts": (50.0, [160.0], 168),
    "its deadline has passed, and the loop is blocked": (50.0, [90.0], 98),
}


@pytest.mark.parametrize("case", EXITS)
def test_the_exit_deadline(case: str) -> None:
    """When the process must have exited, after a stop at 100 with 300 + 5 + 3 s."""
    busy_since, deadlines, expected = EXITS[case]
    assert exit_deadline(100.0, busy_since, deadlines, LIMITS) == expected


def test_the_exit_deadline_is_within_the_budget() -> None:
    """Whatever is open and however long the loop is blocked, the budget holds (invariant 7)."""
    for busy_since in (0.0, 100.0, 399.0, 1e9, IDLE):
        for deadlines in ([], [0.0], [399.0], [1e9]):
            assert exit_deadline(100.0, busy_since, deadlines, LIMITS) <= 100 + LIMITS.budget


HANGS = {
    "the loop waits": (IDLE, [], IDLE),
    "the loop waits, and a critical operation is open": (IDLE, [130.0], IDLE),
    "nothing is open": (100.0, [], 160.0),
    "a critical operation is within its deadline": (100.0, [180.0, 250.0], 258.0),
    "its deadline is near": (100.0, [101.0], 160.0),
}


@pytest.mark.parametrize("case", HANGS)
def test_the_hang_deadline(case: str) -> None:
    """Outside a stop: after a minute, and not before the deadlines of critical operations."""
    busy_since, deadlines, expected = HANGS[case]
    assert hang_deadline(busy_since, deadlines, LIMITS) == expected


CHECKS = {
    # the turn began at 100; (checks, how much of it was missed by the last check)
    "each second": ([100.5, 101.5, 102.5], 0.0),
    "a little late": ([100.5, 102.4, 104.3], 0.0),
    "halted for an hour": ([100.5, 3700.5], 3599.0),
    "halted twice": ([100.5, 110.5, 111.5, 121.5], 18.0),
    "halted before the first check": ([3700.0], 3599.0),
    "starved: a check every five seconds": ([105.0, 110.0, 115.0], 12.0),
}


@pytest.mark.parametrize("case", CHECKS)
def test_unobserved_time_does_not_count_as_a_hang(case: str) -> None:
    """Only time that the thread observed counts: not a halt, nor a starved machine."""
    checks, missed = CHECKS[case]
    seen = ObservedTime(99.9)
    for now in checks:
        seen.record_check(now)
    assert seen.adjust(100.0) == pytest.approx(100.0 + missed)


def test_missed_time_belongs_to_one_turn() -> None:
    """Time missed in one turn of the loop is not credited to the next."""
    seen = ObservedTime(99.0)
    seen.record_check(100.5)
    seen.record_check(200.0)
    seen.record_check(201.0)
    assert seen.adjust(100.0) == 198.5
    assert seen.adjust(200.5) == 200.5
    assert seen.adjust(200.7) == 200.7  # one that began since the last check
    assert seen.adjust(math.inf) == math.inf


def test_missed_time_is_kept_for_what_began_before_it() -> None:
    """What is forgotten is only what no later time needs."""
    seen = ObservedTime(100.0)
    for now in (110.0, 111.0, 121.0):
        seen.record_check(now)
    seen.forget_before(105.0)
    assert seen.missed_since(105.0) == 4.0 + 9.0
    seen.forget_before(112.0)
    assert seen.missed_since(105.0) == 9.0


def test_a_late_check_is_excused_for_one_interval() -> None:
    """After a halt the loop gets one more interval; later halts too, with time between them."""
    seen = ObservedTime(100.0)
    for late in (130.0, 160.0, 190.0, 220.0, 250.0):
        seen.record_check(late)
        assert seen.excused_until == late + last_resort.CHECK_INTERVAL
        seen.record_check(late + 0.001)  # woken by a signal
        assert seen.excused_until == late + last_resort.CHECK_INTERVAL
        seen.record_check(late + 1.0)
        assert seen.excused_until <= late + 1.0


def test_checks_that_are_always_late_are_not_excused_for_ever() -> None:
    """Code that holds the lock for seconds at a time is ended, though each check is late."""
    seen = ObservedTime(100.0)
    excused = []
    for now in (103.0, 106.0, 109.0, 112.0, 115.0):
        seen.record_check(now)
        excused.append(now < seen.excused_until)
    assert excused == [True, True, True, False, False]


@attrs.define(eq=False)
class Recorder:
    """What a last resort reported; its exit ends the thread instead of the process."""

    stop: Stop
    stop_requested_at: float | None = None
    has_watchdog: bool = True
    blocked: list[Blocked] = attrs.field(factory=list)
    exits: list[Blocked] = attrs.field(factory=list)
    exited: threading.Event = attrs.field(factory=threading.Event)

    def resort(self) -> LastResort:
        def exit_process(blocked: Blocked) -> None:
            self.exits.append(blocked)
            made._ended = True
            self.exited.set()

        made = LastResort(
            self.stop,
            lambda: self.stop_requested_at,
            lambda: self.has_watchdog,
            self.blocked.append,
            exit_process,
            2,
        )
        return made


@pytest.fixture(autouse=True)
def no_timer() -> Iterator[None]:
    """Cancel the timer, which would end this process."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace seconds by tenths."""
    monkeypatch.setattr(last_resort, "BLOCKED_AFTER", 0.3)
    monkeypatch.setattr(last_resort, "CHECK_INTERVAL", 0.02)
    monkeypatch.setattr(last_resort, "HUNG_AFTER", 0.6)


async def test_without_a_stop_there_is_no_deadline() -> None:
    """In normal running there is no exit deadline, whatever is open."""
    stop = Stop("daemon", LIMITS)
    resort = Recorder(stop).resort()
    assert resort.due() == math.inf
    with Work("w", stop) as work:
        async with work.critical("write", budget=10):
            assert resort.due() == math.inf


@pytest.mark.parametrize("by_signal", [True, False], ids=["signal", "crash"])
async def test_the_deadline_follows_open_sections(*, by_signal: bool) -> None:
    """From the instant on: the whole budget, or less while a critical section ends earlier."""
    stop = Stop("daemon", LIMITS)
    recorder = Recorder(stop)
    resort = recorder.resort()
    now = time.monotonic()
    if by_signal:
        recorder.stop_requested_at = now
    else:
        stop.begin("crash: ValueError()")
    assert resort.due() == pytest.approx(now + LIMITS.budget, abs=1)
    with Work("w", stop) as work:
        async with work.critical("write", budget=10):
            assert resort.due() == pytest.approx(now + 10 + 5 + 3, abs=1)
    assert resort.due() == pytest.approx(now + LIMITS.budget, abs=1)


def block(seconds: float) -> None:
    """The fault itself: code that blocks the loop."""
    time.sleep(seconds)


def wait_for(seen: Callable[[], object]) -> None:
    """Block the loop until the thread has noticed, ten seconds at most."""
    give_up = time.monotonic() + 10
    while not seen() and time.monotonic() < give_up:
        block(0.01)


@pytest.mark.usefixtures("short_times")
async def test_c06_a_blocked_loop_is_reported_once() -> None:
    """A blocked loop is reported with its task and stack, once each time (C06)."""
    recorder = Recorder(Stop("daemon", LIMITS))
    resort = recorder.resort()
    resort.begin()

    async def spin() -> None:
        for turn in (1, 2):
            wait_for(lambda turn=turn: len(recorder.blocked) == turn)  # type: ignore[misc]
            block(0.4)  # still blocked, and already reported
            await trio.lowlevel.checkpoint()
            # A turn of the loop without anything to do.
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spin, name="reconcile c/spins")
        nursery.start_soon(trio.lowlevel.checkpoint)
    resort.end()
    assert len(recorder.blocked) == 2
    assert recorder.blocked[0].task == "reconcile c/spins"
    assert any("in block" in line for line in recorder.blocked[0].where)
    assert recorder.blocked[0].seconds >= 0.3
    assert recorder.exits == []


@pytest.mark.usefixtures("short_times")
async def test_c06_a_loop_that_is_blocked_at_the_signal_is_ended() -> None:
    """With nothing critical open, a process whose loop hangs exits shortly after the instant."""
    recorder = Recorder(Stop("daemon", LIMITS))
    resort = recorder.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()  # turns of the loop are recorded from the next one on
    began = time.monotonic()
    recorder.stop_requested_at = began
    resort.wake()
    wait_for(recorder.exited.is_set)
    resort.end()
    assert len(recorder.exits) == 1
    assert time.monotonic() - began >= 0.3
    assert any("wait_for" in line for line in recorder.exits[0].where)


@pytest.mark.usefixtures("short_times")
async def test_an_open_critical_operation_is_waited_for() -> None:
    """A process whose loop is blocked does not exit before the deadline of a critical operation."""
    limits = StopLimits(drain=0.1, critical=60, cleanup=0.1)
    stop = Stop("daemon", limits)
    recorder = Recorder(stop)
    resort = recorder.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    with Work("w", stop) as work:
        async with work.critical("write", budget=30):
            recorder.stop_requested_at = time.monotonic()
            resort.wake()
            wait_for(lambda: recorder.blocked)
            block(0.3)
    resort.end()
    assert recorder.exits == []
    assert len(recorder.blocked) >= 1


@pytest.mark.usefixtures("short_times")
async def test_a_hang_without_a_watchdog_is_ended() -> None:
    """Without a manager's watchdog a hang outside a stop is reported, then the process exits."""
    recorder = Recorder(Stop("daemon", LIMITS), has_watchdog=False)
    resort = recorder.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    wait_for(recorder.exited.is_set)
    resort.end()
    assert len(recorder.blocked) == 1
    assert recorder.exits[0].seconds >= 0.6
    assert any("in wait_for" in line for line in recorder.exits[0].where)


@pytest.mark.usefixtures("short_times")
async def test_r10_a_hang_with_a_watchdog_is_only_reported() -> None:
    """R10: where the manager's watchdog is on, it alone ends a hang; the thread only reports."""
    recorder = Recorder(Stop("daemon", LIMITS))
    resort = recorder.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    block(1.5)
    assert recorder.exits == []
    recorder.has_watchdog = False  # as before READY
    wait_for(recorder.exited.is_set)
    resort.end()
    assert len(recorder.exits) == 1


@pytest.mark.usefixtures("short_times")
async def test_a_hang_beside_a_critical_operation_waits_for_it() -> None:
    """Without a watchdog a hang is not ended before an open critical operation's deadline."""
    limits = StopLimits(drain=0.1, critical=60, cleanup=0.1)
    stop = Stop("daemon", limits)
    recorder = Recorder(stop, has_watchdog=False)
    resort = recorder.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    with Work("w", stop) as work:
        async with work.critical("write", budget=30):
            wait_for(lambda: recorder.blocked)
            block(1.0)
    resort.end()
    assert recorder.exits == []


async def test_the_loops_thread_is_interrupted_once_after_a_halt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal of the interruption wakes the thread: that must not lead to the next one."""
    sent: list[int] = []
    resort = Recorder(Stop("daemon", LIMITS)).resort()

    def interrupt(resort: LastResort) -> None:
        sent.append(1)
        resort.wake()

    monkeypatch.setattr(LastResort, "_interrupt_loop", interrupt)
    resort._observed.checked_at -= 10
    resort.begin()
    wait_for(lambda: sent)
    block(0.3)
    resort.end()
    assert sent == [1]


async def test_the_timer_is_not_set_outside_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The C timer cannot distinguish a halt from a hang, so in normal running it is never set."""
    armed: list[float] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda later, **_: armed.append(later)
    )
    resort = Recorder(Stop("daemon", LIMITS), has_watchdog=False).resort()
    resort.progress.busy_since = time.monotonic() - 50
    assert resort.due() < math.inf
    resort.arm()
    assert armed == []


async def test_the_timer_is_set_during_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer is set from the instant on, after the deadline; not before, nor after end()."""
    armed: list[float] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda later, **_: armed.append(later)
    )
    recorder = Recorder(Stop("daemon", LIMITS))
    resort = recorder.resort()
    resort.arm()
    assert armed == []
    recorder.stop_requested_at = time.monotonic()
    resort.arm()
    assert armed == [pytest.approx(LIMITS.budget + last_resort.FAULTHANDLER_MARGIN, abs=1)]
    resort.end()
    resort.arm()
    assert len(armed) == 1


async def test_the_timer_outlasts_a_halt(monkeypatch: pytest.MonkeyPatch) -> None:
    """However near the deadline is, the timer allows for the longest halt."""
    armed: list[float] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda later, **_: armed.append(later)
    )
    recorder = Recorder(Stop("daemon", LIMITS))
    resort = recorder.resort()
    recorder.stop_requested_at = time.monotonic() - LIMITS.budget
    resort.arm()
    assert armed == [last_resort.LONGEST_HALT + last_resort.FAULTHANDLER_MARGIN]


async def test_a_timer_that_cannot_be_set_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the timer's thread cannot start, the signal handler that sets it does not fail."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", refuse)
    recorder = Recorder(Stop("daemon", LIMITS), stop_requested_at=time.monotonic())
    recorder.resort().arm()


async def test_a_halt_moves_the_exit_deadline() -> None:
    """Each deadline of a stop moves by the time in which the process was halted."""
    stop = Stop("daemon", LIMITS)
    recorder = Recorder(stop)
    resort = recorder.resort()
    now = time.monotonic()
    with Work("w", stop) as work:
        async with work.critical("write", budget=10):
            recorder.stop_requested_at = now
            before = resort.due()
            resort._observed.record_check(now)
            resort._observed.record_check(now + 31)
            assert resort.due() == pytest.approx(before + 30)
    assert resort.due() == pytest.approx(now + LIMITS.budget + 30)
    resort.progress.busy_since = now + 1
    assert resort.due() == pytest.approx(now + 1 + 29 + last_resort.BLOCKED_AFTER)
