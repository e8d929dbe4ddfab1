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
from reconciled.instant import STOPS
from reconciled.observe import tasktree
from reconciled.programs.orphans import Orphans
from reconciled.runtime.context import Host
from reconciled.runtime.daemon.reload import Reloader, Round
from reconciled.runtime.daemon.shutdown import Ending
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.stop.last_resort import LastResort

STOPS_ALREADY = "a stop is under way"


@attrs.define(eq=False)
class Commands:
    """The daemon's ear. listen() opens it: from then on a stop has stages."""

    host: Host
    dispatcher: Dispatcher
    ending: Ending
    reloader: Reloader
    orphans: Orphans
    last_resort: LastResort
    # Set when the start is over: until then nobody is asked for anything but by a signal.
    listening: trio.Event = attrs.field(factory=trio.Event, init=False)

    def listen(self) -> None:
        """Act on signals, those that came during the start as well."""
        token = trio.lowlevel.current_trio_token()

        def wake() -> None:
            # In a signal handler: nothing here may wait or take a lock.
            if self.host.signals.stop_at is not None:
                self.last_resort.arm()
                self.last_resort.wake()
            token.run_sync_soon(self._deliver, idempotent=True)

        self.host.signals.started(wake)
        self.listening.set()

    def stop(self, reason: str) -> None:
        """Begin a stop, unless one is under way: *reason* is who asks for it."""
        if self.host.stopping:
            return
        self.ending.tell_begun(reason=reason)
        self.host.stop.begin(reason)
        # Nobody else tells it: without this it would sleep through the whole drain.
        self.dispatcher.wake()

    def escalate(self, reason: str) -> None:
        """Begin a stop, or take the one that is under way one stage on."""
        if self.host.stop.stage is Stage.RUNNING:
            self.stop(reason)
        else:
            self.host.stop.escalate(reason)

    def reload(self) -> Round | None:
        """Reload soon; None where a stop came first, which the log tells."""
        if self.host.stopping:
            self.host.log.warning("reload.refused", reason=STOPS_ALREADY)
            return None
        return self.reloader.ask()

    def _deliver(self) -> None:
        """In the loop: act on what the handlers saw, in order."""
        received = self.host.signals.received
        while received:
            number, at = received.popleft()
            if number in STOPS:
                self._stop(number, at)
            elif number == signal.SIGHUP:
                self.reload()
            elif number == signal.SIGUSR2:
                tasktree.dump(self.host.log)
            elif number == signal.SIGCHLD:
                self.orphans.look()

    def _stop(self, number: int, at: float) -> None:
        stop, name = self.host.stop, signal.Signals(number).name
        if stop.stage is Stage.RUNNING:
            self.host.record.signal = number
            self.ending.tell_begun(signal=name)
            stop.begin(name, at=trio.current_time() - (time.monotonic() - at))
            self.dispatcher.wake()
        elif number == signal.SIGINT:
            stop.escalate("SIGINT again")
        else:
            stop.end_drain("SIGTERM again")
