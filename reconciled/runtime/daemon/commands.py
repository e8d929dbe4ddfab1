"""Commands to the running daemon, by signals and by the control socket.

They are a stop, the next stage of a stop, a reload, a dump of the tasks and a scan for orphans.
Each is carried out here, in the loop, in the order in which it was received.
"""

from __future__ import annotations

import contextlib
import signal
import time

import attrs
import trio

from reconciled.core.stages import Stage
from reconciled.observe import task_tree
from reconciled.programs.orphan_reaper import OrphanReaper
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.daemon.reload import Reloader, ReloadRequest
from reconciled.runtime.daemon.shutdown import Shutdown
from reconciled.signal_handlers import STOP_SIGNALS
from reconciled.stop.last_resort import LastResort

STOP_IN_PROGRESS = "stop in progress"


@attrs.define(eq=False)
class Commands:
    """Carries commands out. From start() on, a stop has stages."""

    context: RuntimeContext
    shutdown: Shutdown
    reloader: Reloader
    orphans: OrphanReaper
    last_resort: LastResort
    # Set when the start is over: until then the control socket's verbs wait.
    started: trio.Event = attrs.field(factory=trio.Event, init=False)

    def start(self) -> None:
        """Act on signals, including those that arrived during the start."""
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            # In a signal handler: nothing here may wait or take a lock.
            if self.context.signals.stop_requested_at is not None:
                self.last_resort.arm()
                self.last_resort.wake()
            # Between the end of the loop and the exit: the stop is over, and keeps its exit code.
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._deliver, idempotent=True)

        self.context.signals.finish_start(wake)
        self.started.set()

    def stop(self, reason: str) -> None:
        """Begin a stop, unless one is in progress. *reason* names who requested it."""
        if not self.context.stopping:
            self.shutdown.begin_stop(reason)

    def escalate(self, reason: str) -> None:
        """Begin a stop, or take the one in progress one stage further."""
        if self.context.stop.stage is Stage.RUNNING:
            self.stop(reason)
        else:
            self.context.stop.escalate(reason)

    def reload(self) -> ReloadRequest | None:
        """Request a reload; None, with a log line, while a stop is in progress."""
        if self.context.stopping:
            self.log_reload_refused()
            return None
        return self.reloader.request()

    def log_reload_refused(self) -> None:
        """Log that a reload does not take place, because of a stop."""
        self.context.log.warning("reload.refused", reason=STOP_IN_PROGRESS)

    def _deliver(self) -> None:
        """In the loop: act on what the handlers received, in order."""
        received = self.context.signals.received
        while received:
            number, at = received.popleft()
            if number in STOP_SIGNALS:
                self._stop_by_signal(number, at)
            elif number == signal.SIGHUP:
                self.reload()
            elif number == signal.SIGUSR2:
                task_tree.dump(self.context.log)
            elif number == signal.SIGCHLD:
                self.orphans.request_scan()

    def _stop_by_signal(self, number: int, at: float) -> None:
        stop = self.context.stop
        if stop.stage is Stage.RUNNING:
            received_at = trio.current_time() - (time.monotonic() - at)
            self.shutdown.begin_stop(signal.Signals(number).name, number, received_at)
        elif number == signal.SIGINT:
            stop.escalate("SIGINT again")
        else:
            stop.end_drain("SIGTERM again")
