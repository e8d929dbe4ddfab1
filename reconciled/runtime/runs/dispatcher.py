"""The dispatcher: takes keys from the queue and starts a run for each, until a stop begins.

1. No run starts after the instant of a stop (invariant 2). The dispatcher reads the signal
   handler's own flag before each start; a run reads it once more in its first step, since a
   signal may arrive between the two.
2. A pause is not a stage of a stop: it can be lifted, current runs go on, and a stop during a
   pause proceeds as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs
import trio

from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.runs import worker
from reconciled.runtime.runs.unattended import UnattendedKeys


@attrs.define(eq=False)
class Dispatcher:
    """controllers returns the present ones by name: a reload replaces them."""

    context: RuntimeContext
    controllers: Callable[[], Mapping[str, Controller]]
    unattended: UnattendedKeys
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.context.queue.wake = self.wake

    def wake(self) -> None:
        """Check the queue again: a key may be ready, or a stop has begun."""
        self._wake.set()

    def pause(self, reason: str) -> None:
        """Start no further runs until resume(); readiness reports *reason* meanwhile."""
        self.context.pause_reason = reason

    def resume(self) -> None:
        """Lift the pause; without one, nothing happens."""
        self.context.pause_reason = ""
        # The queue does not wake the dispatcher here: it does so only after get() gave no key,
        # and nothing has called get() during the pause.
        self.wake()

    async def run(self) -> None:
        """Start runs until a stop begins, except in a pause; then close the queue and return."""
        context, queue = self.context, self.context.queue
        while True:
            self._wake = trio.Event()
            self._start_ready()
            if context.stopping:
                break
            # In a pause nothing takes the keys that are due: a deadline in the past would make
            # this a busy loop.
            due = None if context.pause_reason else queue.next_due()
            with trio.CancelScope(deadline=math.inf if due is None else due):
                await self._wake.wait()
        unserved = queue.close()
        context.stop_recorder.not_served = unserved.waiting + unserved.dirty

    def _start_ready(self) -> None:
        """Start a run for each key that is ready now."""
        context, queue = self.context, self.context.queue
        controllers = self.controllers()
        now = trio.current_time()
        while not context.stopping and not context.pause_reason:
            job = queue.get(now)
            if job is None:
                return
            controller = controllers.get(job.lane.name)
            if controller is None or controller.nursery is None:
                # A reload removed its controller: the lane is dropped and the key forgotten.
                job.lane.done(job, now)
                continue
            name = f"reconcile {job.key}"
            controller.nursery.start_soon(
                worker.run_job, controller, job, name, self.unattended, name=name
            )
