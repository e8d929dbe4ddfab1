"""Signal handlers that are installed before anything else is imported; they set the stop's instant.

The handlers are plain Python functions (``signal.signal``), not a task that receives signals:
while the loop is busy a handler runs within milliseconds, a receiving task only when the loop
turns again. The dispatcher reads ``stop_requested_at`` before each start, so that no run starts
after the instant, whatever the loop is doing (invariant 2).

This module imports only small parts of the standard library, so that ``run`` can import it
first.
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
    """The signals received, in order; read by the loop and by the last resort.

    stop_requested_at   monotonic time of the first stop signal, None before
    received            each signal that was not yet handled, with its monotonic time
    """

    def __init__(self) -> None:
        self.stop_requested_at: float | None = None
        self.received: deque[tuple[int, float]] = deque()
        self._started = False
        self._wake: Callable[[], None] = _wake_nothing

    def install(self) -> None:
        """Install the handlers.

        SIGCHLD too: inherited as ignored, it would turn every exit status of a child into 0.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop)
        for number in OTHER_SIGNALS:
            signal.signal(number, self._on_other)
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            # There is no log to dump stacks into yet, and by default it would end the process.
            # Only where none is set: a later call must not replace faulthandler's own handler.
            signal.signal(signal.SIGUSR1, _ignore_signal)

    def reclaim(self) -> list[str]:
        """Reinstall the handlers that other code has replaced; returns the names of those signals.

        A plugin may replace handlers, and a stop must still be received. In the main thread only.
        """
        ours = dict.fromkeys(STOP_SIGNALS, self._on_stop) | dict.fromkeys(
            OTHER_SIGNALS, self._on_other
        )
        lost = [number for number, handler in ours.items() if signal.getsignal(number) != handler]
        if lost:
            self.install()
        return [signal.Signals(number).name for number in lost]

    def finish_start(self, wake: Callable[[], None]) -> None:
        """The start is complete: from now on a stop has stages. Handlers call *wake*."""
        self._wake = wake
        self._started = True
        if self.received:
            wake()

    def ignore_stops(self) -> None:
        """Ignore stop signals at the very end: a late one must not change the exit code."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self._started:
            # Nothing was started that has to be ended, and the kernel releases the lock.
            os._exit(0)
        if self.stop_requested_at is None:
            self.stop_requested_at = now
        self.received.append((number, now))
        self._wake()

    def _on_other(self, number: int, _: FrameType | None) -> None:
        # A burst of equal signals counts as one: the requested action runs once, after the last.
        if all(number != seen for seen, _ in self.received.copy()):
            self.received.append((number, time.monotonic()))
        self._wake()


def _ignore_signal(_: int, __: FrameType | None) -> None:
    """Does nothing: there is no log to dump stacks into yet."""


def _wake_nothing() -> None:
    """Does nothing: before the start is complete signals are only recorded."""
