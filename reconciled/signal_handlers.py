"""The instant of a stop: signal handlers that are in place before anything is imported.

The handlers are plain Python functions (``signal.signal``), not a task that receives signals:
while a loop is busy a handler runs within milliseconds, a receiving task only when the loop
turns again. The dispatcher reads ``stop_at`` before each start, so that nothing begins after
the instant, whatever the loop is doing (invariant 2).

This module imports nothing but small parts of the standard library, so that it can be the
first thing that ``run`` touches.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OTHER_SIGNALS = (signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


class SignalHandlers:
    """What the handlers saw, in order; read by the loop and by the last resort.

    stop_at   monotonic time of the first stop signal, None before
    """

    def __init__(self) -> None:
        self.stop_requested_at: float | None = None
        self.received: deque[tuple[int, float]] = deque()
        self._started = False
        self._wake: Callable[[], None] = _wake_nobody

    def install(self) -> None:
        """Take over the signals.

        SIGCHLD too: inherited as ignored, it would turn every exit status of a child into 0.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        for number in OTHER_SIGNALS:
            signal.signal(number, self._on_other)
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            # There is no log to dump stacks into yet, and by default it would end the process.
            # Not again later: faulthandler's own handler cannot be seen from here.
            signal.signal(signal.SIGUSR1, _ignore_signal)

    def reclaim(self) -> list[str]:
        """Take back what somebody else has taken over; the names of those signals.

        Whatever a plugin's run does to the handlers, a stop must get through. In the main thread.
        """
        ours = dict.fromkeys(STOP_SIGNALS, self._on_stop) | dict.fromkeys(
            OTHER_SIGNALS, self._on_other
        )
        lost = [number for number, handler in ours.items() if signal.getsignal(number) != handler]
        if lost:
            self.install()
        return [signal.Signals(number).name for number in lost]

    def finish_start(self, wake: Callable[[], None]) -> None:
        """The start is over: from now on a stop has stages. *wake* is called from handlers."""
        self._wake = wake
        self._started = True
        if self.received:
            wake()

    def ignore_stops(self) -> None:
        """At the very end: a late signal must not change the exit code."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self._started:
            # Nothing has been begun that would have to end, and the kernel frees the lock.
            os._exit(0)
        if self.stop_requested_at is None:
            self.stop_requested_at = now
        self.received.append((number, now))
        self._wake()

    def _on_other(self, number: int, _: FrameType | None) -> None:
        # A burst of equal signals is one: what they ask for is done once, after the last.
        if all(number != seen for seen, _ in self.received.copy()):
            self.received.append((number, time.monotonic()))
        self._wake()


def _ignore_signal(_: int, __: FrameType | None) -> None:
    """Nothing can be dumped before the log is there."""


def _wake_nobody() -> None:
    """Before the start is over, nobody waits for signals: they are kept."""
