"""Work in a thread, also while the system starts none: that passes, and is nobody's fault here.

A unit's ``TasksMax=`` counts the daemon's threads and all processes of its programs together. One
program that forks without end keeps the daemon from starting a thread; it must not end it.

1. The function runs once or never: what it raises by itself is passed on and never repeated.
2. Who waits is told after PATIENCE, by an OSError: these are expected wherever files are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from reconciled.core.errors import NoThread

T = TypeVar("T")

# For a thread to be had, in seconds, and from one attempt to the next.
START_TIMEOUT, RETRY_INTERVAL = 5.0, 0.05


async def in_thread(
    function: Callable[[], T],
    *,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """Run *function* as trio.to_thread.run_sync does, with all that it says of cancellation.

    Raises NoThread.
    """
    started = False

    def run() -> T:
        nonlocal started
        started = True
        return function()

    give_up = trio.current_time() + START_TIMEOUT
    while True:
        try:
            return await trio.to_thread.run_sync(
                run, limiter=limiter, abandon_on_cancel=abandon_on_cancel
            )
        except RuntimeError as error:
            # All that the interpreter says of it is this type; from within it would be another's.
            if started:
                raise
            if trio.current_time() >= give_up:
                raise NoThread(
                    "no thread can be started: raise TasksMax= of the unit, or ulimit -u"
                ) from error
        await trio.sleep(RETRY_INTERVAL)
