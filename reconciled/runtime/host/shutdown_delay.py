"""A shutdown of the machine: what runs may end while network and disks of others are still there.

A delay lock of logind is held for as long as the daemon runs. Before anything is stopped, logind
says what is coming and waits for the lock: no key is handed out any more, what runs may end, the
lock is let go. The stop itself comes as always, by SIGTERM, and finds little left to do.

1. This is no stop: a pause of the dispatcher, lifted when the shutdown is called off.
2. The lock is a courtesy. Without it, or with a bus that fails, nothing is worse than before:
   the daemon says so once, tries again more and more slowly, and is never harmed by it.
3. Who hears nothing delays nobody: with its connection the lock goes too. The pause stays, since
   the bus itself ends in a shutdown; but not for ever.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import attrs
import trio

from reconciled.core.queue.backoff import Backoff
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.runs.dispatcher import Dispatcher

if TYPE_CHECKING:
    from reconciled.service.inhibitor import DelayLock, Logind

WHO = "reconciled"
WHY = "lets what runs end while the machine still works"
PAUSED = "the machine is about to shut down"

# logind gets the lock back so much before it would lose patience.
MARGIN = 1.0
# How often, during the few seconds of the wait, is looked whether anything still runs. Rejected:
# a hook in the end of each run, which all of a daemon's life would pay for.
POLL_INTERVAL = 0.05
# A pause whose end nobody can tell is lifted: other services get 90 s to stop by default.
PAUSE_TIMEOUT = 120.0
# While it is not known whether the shutdown still comes, it is asked for as often as this.
ASKING = 5.0
NAMED = 5  # so many runs are named in one line
RECONNECT_BACKOFF = Backoff(1.0, 300.0)


@attrs.define(eq=False)
class ShutdownDelay:
    """Holds the lock, and makes way. Serve it in a nursery that outlives all work."""

    context: RuntimeContext
    dispatcher: Dispatcher
    _ready: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Only failures since the lock was last there count.
    _failures: int = attrs.field(default=0, init=False)
    _lock: DelayLock | None = attrs.field(default=None, init=False)
    # When the lock is let go, whatever still runs; and when the pause was last known to be right.
    _late: float = attrs.field(default=math.inf, init=False)
    _confirmed: float = attrs.field(default=-math.inf, init=False)

    def ready(self) -> None:
        """The daemon's start is over: serve() may load what would have delayed it."""
        self._ready.set()

    async def serve(self) -> None:
        """Run until cancelled, which lets go of the lock. Raises nothing else."""
        await self._ready.wait()
        while True:
            try:
                await self._attend()
            except Exception as error:  # noqa: BLE001 - the daemon does not depend on it
                self._log_lock_missing(error)
            self._failures += 1
            await self._back_off()

    async def _attend(self) -> None:
        """One connection: ask, act, and wait until there is something to ask again."""
        # Not before ready(): the library takes longer to load than many a start.
        from reconciled.service.inhibitor import Logind

        logind = await Logind.connect()
        try:
            while True:
                if await logind.is_preparing_for_shutdown():
                    self._announce(await logind.delay_max())
                    await self._wait_drained(logind)
                else:
                    self._call_off("the shutdown was called off")
                    await self._hold(logind)
                    await logind.wait_changed()
        finally:
            self._let_go()
            logind.close()

    async def _hold(self, logind: Logind) -> None:
        if self._lock is None:
            self._lock = await logind.inhibit(WHO, WHY)
            self._failures = 0
            delay = await logind.delay_max()
            self.context.log.info("shutdown.lock_held", delay_max_s=delay)

    # -- a shutdown -------------------------------------------------------------------------

    def _announce(self, delay_max: float) -> None:
        """Pause; known again and again while it is being prepared, told once."""
        if self.context.pause_reason:
            return
        wait = drain_wait(self.context.stop.limits.drain, delay_max)
        self._late = trio.current_time() + wait
        self.dispatcher.pause(PAUSED)
        self.context.log.info(
            "shutdown.announced",
            running=len(self._running()),
            # The lock was not there, or has gone: nothing waits for what runs.
            wait_s=wait if self._lock else 0.0,
        )

    async def _wait_drained(self, logind: Logind) -> None:
        """Let go of the lock once nothing runs, or in time; back when something has changed."""
        try:
            while self._lock is not None:
                now = trio.current_time()
                if not self._busy():
                    self._let_go()
                    self.context.log.info("shutdown.drained")
                elif now >= self._late:
                    self._let_go()
                    self._log_overrun()
                else:
                    with trio.move_on_at(min(now + POLL_INTERVAL, self._late)):
                        await logind.wait_changed()
                        return
            await logind.wait_changed()
        finally:
            self._confirmed = trio.current_time()

    def _call_off(self, reason: str) -> None:
        if self.context.pause_reason:
            self.dispatcher.resume()
            self.context.log.info("shutdown.cancelled", reason=reason)

    def _let_go(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- what runs ---------------------------------------------------------------------------

    def _busy(self) -> bool:
        # A job that was handed out has no work yet, and an adopted program no job.
        return self.context.queue.running > 0 or bool(self._running())

    def _running(self) -> list[str]:
        return sorted(work.name for work in self.context.stop.all_works())

    def _log_overrun(self) -> None:
        running = self._running()
        self.context.log.warning(
            "shutdown.overran",
            running=running[:NAMED],
            count=len(running),
            reason="the shutdown goes on: what still runs gets the stop that follows",
        )

    # -- without a connection ----------------------------------------------------------------

    def _log_lock_missing(self, error: Exception) -> None:
        host, log = self.context, self.context.log
        if self._failures or host.pause_reason or host.stopping:
            level = "debug"  # told already, or to be expected
        elif isinstance(error, FileNotFoundError):
            level = "info"  # no bus at all, as in a container
        else:
            level = "warning"
        getattr(log, level)("shutdown.lock_missing", reason=str(error) or repr(error))

    async def _back_off(self) -> None:
        """Pause before the next attempt; a pause of the dispatcher is not forgotten over it."""
        rest = RECONNECT_BACKOFF.delay(self._failures, random.Random())  # noqa: S311 - spreads load
        if self.context.pause_reason:
            rest = min(rest, ASKING)
            if trio.current_time() - self._confirmed >= PAUSE_TIMEOUT:
                self._call_off("nobody can say whether it still comes")
        await trio.sleep(rest)


def drain_wait(drain: float, delay_max: float) -> float:
    """For how long runs are waited for, in seconds, before the lock is let go."""
    return min(drain, max(delay_max - MARGIN, delay_max / 2))
