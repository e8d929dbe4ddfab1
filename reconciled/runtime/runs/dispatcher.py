"""The dispatcher: hands keys to runs, one at a time, and none from the instant of a stop.

It reads the signal handler's own flag before each start (invariant 2); a run reads it once
more in its first step, since a signal may come between the two. A pause is no stage of a stop: it
can be lifted, what runs goes on, and a stop during it is a stop as always.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import trio

from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.runs import worker


@attrs.define(eq=False)
class Dispatcher:
    """controllers gives those that run now, by name: a reload changes them."""

    context: RuntimeContext
    controllers: Callable[[], Mapping[str, Controller]]
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.context.queue.wake = self.wake

    def wake(self) -> None:
        """There may be something to hand out, or a stop has begun."""
        self._wake.set()

    def pause(self, reason: str) -> None:
        """Hand out nothing more until resume(); *reason* is what readiness tells meanwhile."""
        self.context.pause_reason = reason

    def resume(self) -> None:
        """Lift the pause; harmless without one."""
        self.context.pause_reason = ""
        # Not left to the queue: it wakes who asked it in vain, and nobody has asked.
        self.wake()

    async def run(self) -> None:
        """Hand out until a stop begins, except in a pause; then close the queue and end."""
        host, queue = self.context, self.context.queue
        while True:
            self._wake = trio.Event()
            self._hand_out()
            if host.stopping:
                break
            # Nobody takes what is due in a pause: its time, once past, would turn this loop hot.
            due = None if host.pause_reason else queue.next_due()
            with trio.CancelScope(deadline=math.inf if due is None else due):
                await self._wake.wait()
        unserved = queue.close(trio.current_time())
        host.stop_recorder.not_served = unserved.waiting + unserved.dirty

    def _hand_out(self) -> None:
        host, queue = self.context, self.context.queue
        controllers = self.controllers()
        now = trio.current_time()
        while not host.stopping and not host.pause_reason:
            job = queue.get(now)
            if job is None:
                return
            controller = controllers.get(job.lane.name)
            if controller is None or controller.nursery is None:
                # Its controller left at a reload: the lane is dropped, the key forgotten.
                job.lane.done(job, now)
                continue
            name = f"reconcile {job.key}"
            controller.nursery.start_soon(worker.run_job, controller, job, name, name=name)
