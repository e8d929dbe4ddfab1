"""The last resort: a thread outside the event loop that ends a process whose loop hangs.

Nothing inside trio can end a blocked loop, a third-party shield or a hung thread. So one
thread, the only one of the daemon without a limiter, watches from outside the loop:

1. In normal running it logs what blocks the loop. Where no service manager's watchdog ends a
   hung loop (before the daemon is ready, or without a manager), it ends the process.
2. From the instant of a stop on it has a deadline by which the process must have ended. The
   manager's watchdog is off by then, and nothing else ends a hang before the manager's own limit.
3. A halt is no hang. Every deadline counts observed time only: a process that was halted, or a
   machine that was suspended or starved, let this thread run as seldom as the loop. A check that
   is itself late does not end the process: the loop first gets another CHECK_INTERVAL.

A thread needs the interpreter's lock, so faulthandler's C timer backs it up during a stop. Each
check sets that timer anew, LONGEST_HALT ahead at least. It therefore fires only where neither the
thread nor a signal handler has run for so long: where a call holds the lock, or in a process that
was halted longer. A shorter halt at any instant cannot let it fire, however late in the stop.
It has to be that long because it counts halted time, and runs before any Python code when the
process continues. Rejected:
* Setting it shortly behind the thread's deadline: a halt across that instant ends the process.
* A timer on processor time: it never fires for a call that waits with the lock held.
* Setting a second, short timer when the first has fired: a handler in Python needs the lock, too.
* A watchdog process: one more process for each daemon, which would have to end with it in every
  case, against a halt of more than a minute in a stop.
* A C timer outside a stop as well: nothing there bounds how long a process may be halted.

``exit_deadline`` and ``hang_deadline`` are pure; ``LastResort`` is the thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import signal
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

# The C timer fires so long after the thread's deadline at least: the thread's report is better.
FAULTHANDLER_MARGIN = 2.0
# How often the thread checks in normal running: 1 wake-up/s costs 0.005 % of a core.
CHECK_INTERVAL = 1.0
# Outside a stop, a loop that has not turned for so long is taken as hung.
HUNG_AFTER = 60.0
# In a stop, a halt up to so long cannot let the C timer fire; a call that holds the interpreter's
# lock is ended no sooner.
LONGEST_HALT = 60.0
# So many late checks in a row may find the deadline passed without ending the process. More are
# no halts: code that holds the interpreter's lock most of the time makes each check late.
EXCUSED_CHECKS = 3


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
        self.ended = False

    def after_run(self) -> None:
        """The loop has ended; what follows it counts as a part of its last turn."""
        self.ended = True

    def after_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - the instrument's interface
        """A turn begins."""
        self.busy_since = time.monotonic()

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - the instrument's interface
        """A turn has ended."""
        self.busy_since = math.inf


@attrs.define(eq=False)
class ObservedTime:
    """Which time the thread observed; the rest, in which the process was halted, does not count."""

    checked_at: float
    # Until then a deadline that has passed does not end the process: the last check was late.
    excused_until: float = attrs.field(default=-math.inf, init=False)
    _missed: list[tuple[float, float]] = attrs.field(factory=list, init=False)
    _late_checks: int = attrs.field(default=0, init=False)

    def record_check(self, now: float) -> bool:
        """Record a check, due at least every CHECK_INTERVAL seconds; return whether it is late."""
        late = now - self.checked_at > 2 * CHECK_INTERVAL
        if late:
            self._missed.append((self.checked_at, now - CHECK_INTERVAL))
            self._late_checks += 1
            if self._late_checks <= EXCUSED_CHECKS:
                self.excused_until = now + CHECK_INTERVAL
        elif now - self.checked_at >= CHECK_INTERVAL / 2:
            self._late_checks = 0
        self.checked_at = now
        return late

    def missed_since(self, at: float) -> float:
        """How much of the time since *at* was not observed."""
        return sum(max(0.0, end - max(begin, at)) for begin, end in self._missed)

    def adjust(self, at: float) -> float:
        """*at*, moved later by the time since then that was not observed."""
        return at + self.missed_since(at)

    def forget_before(self, at: float) -> None:
        """Drop what only times before *at* need."""
        self._missed = [each for each in self._missed if each[1] > at]


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
    _observed: ObservedTime = attrs.field(
        factory=lambda: ObservedTime(time.monotonic()), init=False
    )

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
        busy_since = self.progress.busy_since
        begun_at = self._begun_at()
        if begun_at == math.inf and (busy_since == math.inf or self.has_watchdog()):
            return math.inf
        # The deadlines of sections were set before they could be missed.
        missed = self._observed.missed_since(min(begun_at, busy_since))
        deadlines = [at - self._offset + missed for at in self.stop.registry.section_deadlines()]
        busy_since = self._observed.adjust(busy_since)
        if begun_at == math.inf:
            return hang_deadline(busy_since, deadlines, self.stop.limits)
        begun_at = self._observed.adjust(begun_at)
        return exit_deadline(begun_at, busy_since, deadlines, self.stop.limits)

    def arm(self) -> None:
        """In a stop, set the C timer that backs up the thread; safe in a signal handler."""
        if self._begun_at() < math.inf and not self._ended:
            later = max(LONGEST_HALT, self.due() - time.monotonic()) + FAULTHANDLER_MARGIN
            # No thread for the timer: the process ends without it, and the thread tries again.
            with contextlib.suppress(RuntimeError):
                faulthandler.dump_traceback_later(later, exit=True, file=self.stacks)

    def _begun_at(self) -> float:
        """The instant of the stop, in monotonic time; inf before."""
        at = self.stop_requested_at()
        return self.stop.began_at - self._offset if at is None else at

    def _watch(self) -> None:
        reported = math.inf
        while not self._ended:
            now = time.monotonic()
            busy_since = self.progress.busy_since
            late = self._observed.record_check(now)
            self._observed.forget_before(min(self._begun_at(), busy_since, now))
            if late and not self.progress.ended:
                self._interrupt_loop()
            # First: what follows, the report of the last resort included, then has that long.
            self.arm()
            due = self.due()
            excused = now < self._observed.excused_until
            if now >= due and not excused:
                self.exit_process(self._blocked(now, busy_since))
            blocked_at = self._observed.adjust(busy_since) + BLOCKED_AFTER
            if busy_since != reported and now >= blocked_at and not excused:
                reported = busy_since
                self.on_blocked(self._blocked(now, busy_since))
            pause = CHECK_INTERVAL if excused else min(CHECK_INTERVAL, max(0.0, due - now))
            if select.select([self._wake], [], [], pause)[0]:
                os.eventfd_read(self._wake)

    def _interrupt_loop(self) -> None:
        """Make the loop's thread run the handlers of signals that arrived during a halt.

        The kernel prefers the main thread for a signal, but not while the process is halted. A
        call that blocks the loop then goes on, since another thread was interrupted instead of it.
        """
        # One that the daemon receives at any time: it scans for ended children.
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(self._loop, signal.SIGCHLD)

    def _blocked(self, now: float, busy_since: float) -> Blocked:
        frame = sys._current_frames().get(self._loop)  # noqa: SLF001 - the only way from outside
        where = tuple(line.rstrip() for line in traceback.format_stack(frame)) if frame else ()
        seconds = max(0.0, now - self._observed.adjust(busy_since))
        return Blocked(seconds, _task_name(frame), where)


def _task_name(frame: FrameType | None) -> str:
    """The name of the task that trio is running: a local of its run loop, so at best a hint."""
    while frame is not None:
        if frame.f_code.co_name == "unrolled_run":
            task = frame.f_locals.get("task")
            return str(getattr(task, "name", ""))
        frame = frame.f_back
    return ""
