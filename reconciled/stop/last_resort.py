"""The last resort: a thread outside the event loop that ends a process whose loop hangs.

Nothing inside trio can end a blocked loop, a third-party shield or a hung thread. So one
thread, the only one of the daemon without a limiter, watches from outside the loop:

1. In normal running it logs what blocks the loop. Where no service manager's watchdog ends a
   hung loop (before the daemon is ready, or without a manager), it ends the process.
2. From the instant of a stop on it has a deadline by which the process must have ended. The
   manager's watchdog is off by then, and nothing else ends a hang before the manager's own limit.
3. Only time that it observed counts as a hang: a process that was halted, or a machine that was
   suspended or starved, let this thread run as seldom as the loop.

A thread needs the interpreter's lock, so faulthandler's C timer backs it up during a stop.
Rejected: a C timer outside a stop as well. It would fire in a process that was merely halted.

``exit_deadline`` and ``hang_deadline`` are pure; ``LastResort`` is the thread.
"""

from __future__ import annotations

import faulthandler
import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import attrs
import trio

from reconciled.core.stages import BLOCKED_AFTER, LAST_RESORT, StopLimits
from reconciled.stop.stop import Stop

# The C timer fires so long after the thread's deadline: the thread's report is better.
FAULTHANDLER_MARGIN = 2.0
# How often the thread checks in normal running: 1 wake-up/s costs 0.005 % of a core.
CHECK_INTERVAL = 1.0
# Outside a stop, a loop that has not turned for so long is taken as hung.
HUNG_AFTER = 60.0


def exit_deadline(
    begun_at: float, busy_since: float, deadlines: Sequence[float], limits: StopLimits
) -> float:
    """When a process whose stop began at *begun_at* must have exited; all monotonic.

    *busy_since* is when the loop's current turn began, inf while it waits; *deadlines* are
    those of the open critical operations. A blocked loop with nothing critical open gets a
    short time from the instant of the stop, or from when it blocked if that was later.
    """
    hard_at = begun_at + limits.critical
    if deadlines:
        return min(max(deadlines), hard_at) + limits.cleanup + LAST_RESORT
    end = hard_at + limits.cleanup + LAST_RESORT
    if busy_since == math.inf:
        return end
    return min(end, max(begun_at, busy_since) + BLOCKED_AFTER)


def hang_deadline(busy_since: float, deadlines: Sequence[float], limits: StopLimits) -> float:
    """When a process outside a stop is ended because its loop hangs; all monotonic.

    An open critical operation may be what blocks the loop, in code that only looks hung: it
    keeps its deadline and its cleanup.
    """
    at = busy_since + HUNG_AFTER
    if busy_since < math.inf and deadlines:
        return max(at, max(deadlines) + limits.cleanup + LAST_RESORT)
    return at


class Progress(trio.abc.Instrument):
    """Records when the loop's current turn began. Costs nothing while the loop waits."""

    def __init__(self) -> None:
        self.busy_since = math.inf

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - the instrument's interface
        """A turn begins."""
        self.busy_since = time.monotonic()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - the instrument's interface
        """A turn has ended."""
        self.busy_since = math.inf


@attrs.define(eq=False)
class MissedTime:
    """How much of the loop's current turn the thread did not observe."""

    checked_at: float
    _turn: float = attrs.field(default=math.inf, init=False)
    _missed: float = attrs.field(default=0.0, init=False)

    def record_check(self, now: float, busy_since: float) -> None:
        """Record a check of the thread, which is due at least every CHECK_INTERVAL seconds."""
        if busy_since != self._turn:
            self._turn, self._missed = busy_since, 0.0
        if now - self.checked_at > 2 * CHECK_INTERVAL:
            since = max(self.checked_at, min(busy_since, now))
            self._missed += max(0.0, now - since - CHECK_INTERVAL)
        self.checked_at = now

    def adjusted_start(self, busy_since: float) -> float:
        """The start of the turn that began at *busy_since*, moved later by the unobserved time."""
        return busy_since + self._missed if busy_since == self._turn else busy_since


@attrs.frozen
class Blocked:
    """What blocks the loop."""

    seconds: float
    task: str
    where: tuple[str, ...]  # innermost last


@attrs.define(eq=False)
class LastResort:
    """Watches one loop. Created in the loop; ends with the process or by end().

    stop_requested_at  returns when a stop was requested, in monotonic time; None: not yet
    has_watchdog       returns whether the service manager ends a hung loop; called outside a stop
    on_blocked         called in the thread, once each time that the loop blocks
    exit_process       called in the thread when the deadline has passed; must not return
    stacks             an open descriptor for faulthandler; a write to it must not block for ever
    """

    stop: Stop
    stop_requested_at: Callable[[], float | None]
    has_watchdog: Callable[[], bool]
    on_blocked: Callable[[Blocked], None]
    exit_process: Callable[[Blocked], None]
    stacks: int
    progress: Progress = attrs.field(factory=Progress, init=False)
    _loop: int = attrs.field(factory=threading.get_ident, init=False)
    # trio's clock has an offset of its own against time.monotonic().
    _offset: float = attrs.field(factory=lambda: trio.current_time() - time.monotonic(), init=False)
    _wake: int = attrs.field(factory=lambda: os.eventfd(0, os.EFD_CLOEXEC), init=False)
    _ended: bool = attrs.field(default=False, init=False)
    _missed_time: MissedTime = attrs.field(factory=lambda: MissedTime(time.monotonic()), init=False)

    def begin(self) -> None:
        """Start watching the current loop."""
        trio.lowlevel.add_instrument(self.progress)
        threading.Thread(target=self._watch, name="last resort", daemon=True).start()

    def end(self) -> None:
        """Stop watching: the loop has ended. Final; a process has one last resort."""
        self._ended = True
        faulthandler.cancel_dump_traceback_later()
        self.wake()

    def wake(self) -> None:
        """Make the thread check now; safe in a signal handler."""
        os.eventfd_write(self._wake, 1)

    def due(self) -> float:
        """When the process must have exited, in monotonic time; inf: no deadline now."""
        busy_since = self._missed_time.adjusted_start(self.progress.busy_since)
        begun_at = self._begun_at()
        if begun_at == math.inf and (busy_since == math.inf or self.has_watchdog()):
            return math.inf
        deadlines = [at - self._offset for at in self.stop.registry.section_deadlines()]
        if begun_at == math.inf:
            return hang_deadline(busy_since, deadlines, self.stop.limits)
        return exit_deadline(begun_at, busy_since, deadlines, self.stop.limits)

    def arm(self) -> None:
        """In a stop, set the C timer that backs up the thread; safe in a signal handler."""
        if self._begun_at() < math.inf and not self._ended:
            later = max(0.1, self.due() - time.monotonic() + FAULTHANDLER_MARGIN)
            faulthandler.dump_traceback_later(later, exit=True, file=self.stacks)

    def _begun_at(self) -> float:
        """The instant of the stop, in monotonic time; inf before."""
        at = self.stop_requested_at()
        return self.stop.began_at - self._offset if at is None else at

    def _watch(self) -> None:
        reported = math.inf
        while not self._ended:
            busy_since = self.progress.busy_since
            now = time.monotonic()
            self._missed_time.record_check(now, busy_since)
            due = self.due()
            if now >= due:
                self.exit_process(self._blocked(now, busy_since))
            self.arm()
            if busy_since != reported and now - busy_since >= BLOCKED_AFTER:
                reported = busy_since
                self.on_blocked(self._blocked(now, busy_since))
            pause = min(CHECK_INTERVAL, max(0.0, due - now))
            if select.select([self._wake], [], [], pause)[0]:
                os.eventfd_read(self._wake)

    def _blocked(self, now: float, busy_since: float) -> Blocked:
        frame = sys._current_frames().get(self._loop)  # noqa: SLF001 - the only way from outside
        where = tuple(line.rstrip() for line in traceback.format_stack(frame)) if frame else ()
        return Blocked(max(0.0, now - busy_since), _task_name(frame), where)


def _task_name(frame: FrameType | None) -> str:
    """The name of the task that trio is running: a local of its run loop, so at best a hint."""
    while frame is not None:
        if frame.f_code.co_name == "unrolled_run":
            task = frame.f_locals.get("task")
            return str(getattr(task, "name", ""))
        frame = frame.f_back
    return ""
