"""What the running daemon is asked for: a stop, one stage on, a reload, a look at its tasks.

Signals and the control socket ask for the same few things; each is carried out here, in the
loop, in the order in which it was asked for.
"""

from __future__ import annotations

import signal
import time

import attrs
import trio

from reconciled.core.stages import Stage
from reconciled.observe import task_tree
from reconciled.programs.orphans import OrphanReaper
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.daemon.reload import Reloader, ReloadRequest
from reconciled.runtime.daemon.shutdown import Shutdown
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.signal_handlers import STOP_SIGNALS
from reconciled.stop.last_resort import LastResort

STOPS_ALREADY = "a stop is under way"


@attrs.define(eq=False)
class Commands:
    """The daemon's ear. listen() opens it: from then on a stop has stages."""

    context: RuntimeContext
    dispatcher: Dispatcher
    shutdown: Shutdown
    reloader: Reloader
    orphans: OrphanReaper
    last_resort: LastResort
    # Set when the start is over: until then nobody is asked for anything but by a signal.
    started: trio.Event = attrs.field(factory=trio.Event, init=False)

    def start(self) -> None:
        """Act on signals, those that came during the start as well."""
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            # In a signal handler: nothing here may wait or take a lock.
            if self.context.signals.stop_requested_at is not None:
                self.last_resort.arm()
                self.last_resort.wake()
            token.run_sync_soon(self._deliver, idempotent=True)

        self.context.signals.finish_start(wake)
        self.started.set()

    def stop(self, reason: str) -> None:
        """Begin a stop, unless one is under way: *reason* is who asks for it."""
        if self.context.stopping:
            return
        self.shutdown.log_stop_began(reason=reason)
        self.context.stop.begin(reason)
        # Nobody else tells it: without this it would sleep through the whole drain.
        self.dispatcher.wake()

    def escalate(self, reason: str) -> None:
        """Begin a stop, or take the one that is under way one stage on."""
        if self.context.stop.stage is Stage.RUNNING:
            self.stop(reason)
        else:
            self.context.stop.escalate(reason)

    def reload(self) -> ReloadRequest | None:
        """Reload soon; None where a stop came first, which the log tells."""
        if self.context.stopping:
            self.context.log.warning("reload.refused", reason=STOPS_ALREADY)
            return None
        return self.reloader.request()

    def _deliver(self) -> None:
        """In the loop: act on what the handlers saw, in order."""
        received = self.context.signals.received
        while received:
            number, at = received.popleft()
            if number in STOP_SIGNALS:
                self._stop(number, at)
            elif number == signal.SIGHUP:
                self.reload()
            elif number == signal.SIGUSR2:
                task_tree.dump(self.context.log)
            elif number == signal.SIGCHLD:
                self.orphans.request_scan()

    def _stop(self, number: int, at: float) -> None:
        stop, name = self.context.stop, signal.Signals(number).name
        if stop.stage is Stage.RUNNING:
            self.context.stop_recorder.signal = number
            self.shutdown.log_stop_began(signal=name)
            stop.begin(name, at=trio.current_time() - (time.monotonic() - at))
            self.dispatcher.wake()
        elif number == signal.SIGINT:
            stop.escalate("SIGINT again")
        else:
            stop.end_drain("SIGTERM again")
