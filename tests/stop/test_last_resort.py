"""When a process that hangs has to be gone, and who says so."""

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
    MissedTime,
    exit_deadline,
    hang_deadline,
)

LIMITS = StopLimits(drain=20, critical=300, cleanup=5)
IDLE = math.inf
LEAVE = {
    "the loop turns": (IDLE, [], 408),
    "blocked when the signal came": (50.0, [], 105),
    "blocked by what the signal began": (150.0, [], 155),
    "blocked just before the end": (406.0, [], 408),
    "a critical operation is open": (IDLE, [160.0], 168),
    "several are open: the longest counts": (IDLE, [160.0, 260.0, 110.0], 268),
    "none outlives the hard limit": (IDLE, [999.0], 408),
    "blocked with one open: it has its time": (50.0, [160.0], 168),
    "its deadline has passed, and the loop is blocked": (50.0, [90.0], 98),
}


@pytest.mark.parametrize("case", LEAVE)
def test_when_to_leave(case: str) -> None:
    """The time by which the process has to be gone, asked to stop at 100 with 300 + 5 + 3 s."""
    busy_since, deadlines, expected = LEAVE[case]
    assert exit_deadline(100.0, busy_since, deadlines, LIMITS) == expected


def test_no_case_is_longer_than_the_budget() -> None:
    """Whatever is open and however long it is blocked: the stop budget holds (invariant 7)."""
    for busy_since in (0.0, 100.0, 399.0, 1e9, IDLE):
        for deadlines in ([], [0.0], [399.0], [1e9]):
            assert exit_deadline(100.0, busy_since, deadlines, LIMITS) <= 100 + LIMITS.budget


HANGS = {
    "the loop waits": (IDLE, [], IDLE),
    "the loop waits, and a critical operation is open": (IDLE, [130.0], IDLE),
    "nothing is open": (100.0, [], 160.0),
    "a critical operation has time": (100.0, [180.0, 250.0], 258.0),
    "its deadline is near": (100.0, [101.0], 160.0),
}


@pytest.mark.parametrize("case", HANGS)
def test_when_a_hang_is_left(case: str) -> None:
    """Outside a stop: after a minute, and not before what is critical has had its time."""
    busy_since, deadlines, expected = HANGS[case]
    assert hang_deadline(busy_since, deadlines, LIMITS) == expected


LOOKS = {
    # the turn began at 100; (looks, how much of it was missed by the last look)
    "each second": ([100.5, 101.5, 102.5], 0.0),
    "a little late": ([100.5, 102.4, 104.3], 0.0),
    "halted for an hour": ([100.5, 3700.5], 3599.0),
    "halted twice": ([100.5, 110.5, 111.5, 121.5], 18.0),
    "halted before the first look": ([3700.0], 3599.0),
    "starved: a look every five seconds": ([105.0, 110.0, 115.0], 12.0),
}


@pytest.mark.parametrize("case", LOOKS)
def test_what_nobody_saw_is_no_hang(case: str) -> None:
    """Of a turn counts what the thread got to see: not a halt, nor a machine that starves it."""
    looks, missed = LOOKS[case]
    seen = MissedTime(99.9)
    for now in looks:
        seen.record_check(now, 100.0)
    assert seen.adjusted_start(100.0) == pytest.approx(100.0 + missed)


def test_a_new_turn_is_seen_anew() -> None:
    """What was missed of one turn of the loop is not credited to the next."""
    seen = MissedTime(99.0)
    seen.record_check(100.5, 100.0)
    seen.record_check(200.0, 100.0)
    seen.record_check(201.0, 200.5)
    assert seen.adjusted_start(200.5) == 200.5
    assert seen.adjusted_start(200.7) == 200.7  # one that began since the last look
    seen.record_check(202.0, math.inf)
    assert seen.adjusted_start(math.inf) == math.inf


@attrs.define(eq=False)
class Watched:
    """What a last resort told; leaving ends its thread instead of the process."""

    stop: Stop
    stop_at: float | None = None
    # As if a manager's watchdog were on.
    watched: bool = True
    blocked: list[Blocked] = attrs.field(factory=list)
    left: list[Blocked] = attrs.field(factory=list)
    gone: threading.Event = attrs.field(factory=threading.Event)

    def resort(self) -> LastResort:
        def leave(blocked: Blocked) -> None:
            self.left.append(blocked)
            made._ended = True
            self.gone.set()

        made = LastResort(
            self.stop, lambda: self.stop_at, lambda: self.watched, self.blocked.append, leave, 2
        )
        return made


@pytest.fixture(autouse=True)
def no_timer() -> Iterator[None]:
    """No timer is left that would end this process."""
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds become tenths."""
    monkeypatch.setattr(last_resort, "BLOCKED_AFTER", 0.3)
    monkeypatch.setattr(last_resort, "CHECK_INTERVAL", 0.02)
    monkeypatch.setattr(last_resort, "HUNG_AFTER", 0.6)


async def test_without_a_stop_nothing_is_due() -> None:
    """In normal running there is no time by which to leave, whatever is open."""
    stop = Stop("daemon", LIMITS)
    resort = Watched(stop).resort()
    assert resort.due() == math.inf
    with Work("w", stop) as work:
        async with work.critical("write", budget=10):
            assert resort.due() == math.inf


@pytest.mark.parametrize("by_signal", [True, False], ids=["signal", "crash"])
async def test_due_follows_what_is_open(*, by_signal: bool) -> None:
    """From the instant on: the whole budget, less once critical work has a nearer deadline."""
    stop = Stop("daemon", LIMITS)
    watched = Watched(stop)
    resort = watched.resort()
    now = time.monotonic()
    if by_signal:
        watched.stop_at = now
    else:
        stop.begin("crash: ValueError()")
    assert resort.due() == pytest.approx(now + LIMITS.budget, abs=1)
    with Work("w", stop) as work:
        async with work.critical("write", budget=10):
            assert resort.due() == pytest.approx(now + 10 + 5 + 3, abs=1)
    assert resort.due() == pytest.approx(now + LIMITS.budget, abs=1)


def block(seconds: float) -> None:
    """The fault itself: code in the loop that does not give way."""
    time.sleep(seconds)


def wait_for(seen: Callable[[], object]) -> None:
    """Block the loop until the thread has seen it, ten seconds at most."""
    give_up = time.monotonic() + 10
    while not seen() and time.monotonic() < give_up:
        block(0.01)


@pytest.mark.usefixtures("soon")
async def test_c06_a_blocked_loop_is_named_once() -> None:
    """What does not give way is told with its task and where it stands, once each time (C06)."""
    watched = Watched(Stop("daemon", LIMITS))
    resort = watched.resort()
    resort.begin()

    async def spin() -> None:
        for turn in (1, 2):
            wait_for(lambda turn=turn: len(watched.blocked) == turn)  # type: ignore[misc]
            block(0.4)  # still blocked, and told already
            await trio.lowlevel.checkpoint()
            # A turn of the loop without anything to do.
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spin, name="reconcile c/spins")
        nursery.start_soon(trio.lowlevel.checkpoint)
    resort.end()
    assert len(watched.blocked) == 2
    assert watched.blocked[0].task == "reconcile c/spins"
    assert any("in block" in line for line in watched.blocked[0].where)
    assert watched.blocked[0].seconds >= 0.3
    assert watched.left == []


@pytest.mark.usefixtures("soon")
async def test_c06_a_loop_that_is_blocked_at_the_signal_is_left() -> None:
    """With nothing critical open a process whose loop hangs leaves a little after the instant."""
    watched = Watched(Stop("daemon", LIMITS))
    resort = watched.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()  # the turns of the loop are seen from the next one on
    began = time.monotonic()
    watched.stop_at = began
    resort.wake()
    wait_for(watched.gone.is_set)
    resort.end()
    assert len(watched.left) == 1
    assert time.monotonic() - began >= 0.3
    assert any("wait_for" in line for line in watched.left[0].where)


@pytest.mark.usefixtures("soon")
async def test_an_open_critical_operation_is_waited_for() -> None:
    """A blocked loop is not left while a critical operation has time."""
    limits = StopLimits(drain=0.1, critical=60, cleanup=0.1)
    stop = Stop("daemon", limits)
    watched = Watched(stop)
    resort = watched.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    with Work("w", stop) as work:
        async with work.critical("write", budget=30):
            watched.stop_at = time.monotonic()
            resort.wake()
            wait_for(lambda: watched.blocked)
            block(0.3)
    resort.end()
    assert watched.left == []
    assert len(watched.blocked) >= 1


@pytest.mark.usefixtures("soon")
async def test_a_hang_that_nobody_watches_is_left() -> None:
    """Without a manager's watchdog a loop that hangs outside a stop is named, and then left."""
    watched = Watched(Stop("daemon", LIMITS), watched=False)
    resort = watched.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    wait_for(watched.gone.is_set)
    resort.end()
    assert len(watched.blocked) == 1
    assert watched.left[0].seconds >= 0.6
    assert any("in wait_for" in line for line in watched.left[0].where)


@pytest.mark.usefixtures("soon")
async def test_r10_a_hang_that_the_manager_watches_is_named_only() -> None:
    """R10: where the manager's watchdog is on, it alone ends a hang; so nobody fights it."""
    watched = Watched(Stop("daemon", LIMITS))
    resort = watched.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    block(1.5)
    assert watched.left == []
    watched.watched = False  # as it is before READY, say
    wait_for(watched.gone.is_set)
    resort.end()
    assert len(watched.left) == 1


@pytest.mark.usefixtures("soon")
async def test_a_hang_beside_a_critical_operation_waits_for_it() -> None:
    """A loop that nobody watches is left no earlier than an open critical operation's end."""
    limits = StopLimits(drain=0.1, critical=60, cleanup=0.1)
    stop = Stop("daemon", limits)
    watched = Watched(stop, watched=False)
    resort = watched.resort()
    resort.begin()
    await trio.lowlevel.checkpoint()
    with Work("w", stop) as work:
        async with work.critical("write", budget=30):
            wait_for(lambda: watched.blocked)
            block(1.0)
    resort.end()
    assert watched.left == []


async def test_no_timer_stands_behind_the_thread_outside_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The C timer cannot tell a halted process from a hang: in normal running it is never set."""
    armed: list[float] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda later, **_: armed.append(later)
    )
    resort = Watched(Stop("daemon", LIMITS), watched=False).resort()
    resort.progress.busy_since = time.monotonic() - 50
    assert resort.due() < math.inf
    resort.arm()
    assert armed == []


async def test_a_timer_stands_behind_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Armed from the instant on, behind the time to leave; never before, nor after end()."""
    armed: list[float] = []
    monkeypatch.setattr(
        faulthandler, "dump_traceback_later", lambda later, **_: armed.append(later)
    )
    watched = Watched(Stop("daemon", LIMITS))
    resort = watched.resort()
    resort.arm()
    assert armed == []
    watched.stop_at = time.monotonic()
    resort.arm()
    assert armed == [pytest.approx(LIMITS.budget + last_resort.FAULTHANDLER_MARGIN, abs=1)]
    resort.end()
    resort.arm()
    assert len(armed) == 1
