"""Delays a shutdown of the machine until active runs have ended, by a delay lock of logind.

The daemon holds the lock while it runs. Before logind stops any service, it announces the shutdown
and waits for the lock: the daemon pauses the dispatcher, waits for active runs while network and
disks still work, and releases the lock. The stop itself follows by SIGTERM, as always.

1. This is a pause of the dispatcher, not a stop; it is lifted when the shutdown is cancelled.
2. The lock is optional. Without it, or after an error of the bus, the daemon logs this once,
   continues, and tries again with a growing delay.
3. logind releases the lock of a closed connection: a daemon that cannot receive announcements
   delays no shutdown. The pause is kept then, because the bus itself ends in a shutdown, but for
   PAUSE_TIMEOUT at most.
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
WHY = "waits for active runs before services stop"
PAUSED = "the machine is about to shut down"

# Seconds before logind's own limit at which the lock is released.
MARGIN = 1.0
# Seconds between checks for active runs, during the short wait. Rejected: a hook at the end of
# each run, whose cost every run of the daemon would pay.
POLL_INTERVAL = 0.05
# Seconds without a connection after which a pause is lifted: other services get 90 s to stop.
PAUSE_TIMEOUT = 120.0
# Seconds between attempts to reconnect during a pause.
PAUSED_RECONNECT = 5.0
MAX_NAMED = 5  # runs named in one log line
RECONNECT_BACKOFF = Backoff(1.0, 300.0)


@attrs.define(eq=False)
class ShutdownDelay:
    """Holds the lock and pauses the dispatcher. A service, which outlives all work."""

    context: RuntimeContext
    dispatcher: Dispatcher
    _ready: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Failures since the lock was last taken.
    _failures: int = attrs.field(default=0, init=False)
    _lock: DelayLock | None = attrs.field(default=None, init=False)
    # When the lock is released in any case; when logind last confirmed the pause.
    _release_at: float = attrs.field(default=math.inf, init=False)
    _confirmed: float = attrs.field(default=-math.inf, init=False)

    def ready(self) -> None:
        """The start is over: serve() may import the D-Bus client, which would have delayed it."""
        self._ready.set()

    async def serve(self) -> None:
        """Run until cancelled, which releases the lock. Errors are logged, never raised."""
        await self._ready.wait()
        while True:
            try:
                await self._follow_logind()
            except Exception as error:  # noqa: BLE001 - the daemon does not depend on it
                self._log_lock_missing(error)
            self._failures += 1
            await self._back_off()

    async def _follow_logind(self) -> None:
        """Follow logind over one connection, until that fails."""
        # Not before ready(): the import takes longer than many a start.
        from reconciled.service.inhibitor import Logind

        logind = await Logind.connect()
        try:
            while True:
                if await logind.is_preparing_for_shutdown():
                    self._announce(await logind.delay_max())
                    await self._wait_drained(logind)
                else:
                    self._lift_pause("the shutdown was cancelled")
                    await self._take_lock(logind)
                    await logind.wait_changed()
        finally:
            self._release_lock()
            logind.close()

    async def _take_lock(self, logind: Logind) -> None:
        if self._lock is None:
            self._lock = await logind.inhibit(WHO, WHY)
            self._failures = 0
            delay = await logind.delay_max()
            self.context.log.info("shutdown.lock_held", delay_max_s=delay)

    # -- a shutdown -------------------------------------------------------------------------

    def _announce(self, delay_max: float) -> None:
        """Pause and log it; called repeatedly while the shutdown is prepared."""
        if self.context.pause_reason:
            return
        wait = drain_wait(self.context.stop.limits.drain, delay_max)
        self._release_at = trio.current_time() + wait
        self.dispatcher.pause(PAUSED)
        self.context.log.info(
            "shutdown.announced",
            running=len(self._running()),
            # Without the lock, logind does not wait for active runs.
            wait_s=wait if self._lock else 0.0,
        )

    async def _wait_drained(self, logind: Logind) -> None:
        """Release the lock when nothing runs or its time is over; returns at a change of logind."""
        try:
            while self._lock is not None:
                now = trio.current_time()
                if not self._busy():
                    self._release_lock()
                    self.context.log.info("shutdown.drained")
                elif now >= self._release_at:
                    self._release_lock()
                    self._log_overrun()
                else:
                    with trio.move_on_at(min(now + POLL_INTERVAL, self._release_at)):
                        await logind.wait_changed()
                        return
            await logind.wait_changed()
        finally:
            self._confirmed = trio.current_time()

    def _lift_pause(self, reason: str) -> None:
        if self.context.pause_reason:
            self.dispatcher.resume()
            self.context.log.info("shutdown.cancelled", reason=reason)

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- what runs ---------------------------------------------------------------------------

    def _busy(self) -> bool:
        # A job that was just handed out has no Work yet, and an adopted program has no job.
        return self.context.queue.running > 0 or bool(self._running())

    def _running(self) -> list[str]:
        return sorted(work.name for work in self.context.stop.all_works())

    def _log_overrun(self) -> None:
        running = self._running()
        self.context.log.warning(
            "shutdown.overran",
            running=running[:MAX_NAMED],
            count=len(running),
            reason="the shutdown continues: the stop that follows handles active runs",
        )

    # -- without a connection ----------------------------------------------------------------

    def _log_lock_missing(self, error: Exception) -> None:
        context, log = self.context, self.context.log
        if self._failures or context.pause_reason or context.stopping:
            level = "debug"  # logged already, or expected
        elif isinstance(error, FileNotFoundError):
            level = "info"  # no bus at all, as in a container
        else:
            level = "warning"
        getattr(log, level)("shutdown.lock_missing", reason=str(error) or repr(error))

    async def _back_off(self) -> None:
        """Wait before the next attempt; lift a pause that was not confirmed in time."""
        rng = random.Random()  # noqa: S311 - spreads load
        backoff = RECONNECT_BACKOFF.delay(self._failures, rng)
        if self.context.pause_reason:
            backoff = min(backoff, PAUSED_RECONNECT)
            if trio.current_time() - self._confirmed >= PAUSE_TIMEOUT:
                self._lift_pause("logind did not confirm the shutdown")
        await trio.sleep(backoff)


def drain_wait(drain: float, delay_max: float) -> float:
    """Seconds to wait for active runs before the lock is released."""
    return min(drain, max(delay_max - MARGIN, delay_max / 2))
