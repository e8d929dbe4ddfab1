"""Runs a function in a thread, and retries while the system cannot start a thread.

A unit's ``TasksMax=`` limits the daemon's threads and all processes of its programs together. A
program that forks without end keeps the daemon from starting a thread. The condition passes, and
it must not end the daemon.

1. The function runs once or never: an exception of its own is passed on and not retried.
2. After START_TIMEOUT the caller gets an OSError, which every caller that uses files handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from reconciled.core.errors import NoThread

T = TypeVar("T")

# Seconds to keep trying to start a thread, and from one attempt to the next.
START_TIMEOUT, RETRY_INTERVAL = 5.0, 0.05


async def in_thread(
    function: Callable[[], T],
    *,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """Run *function* as trio.to_thread.run_sync does, with the same cancellation behaviour.

    Raises NoThread where no thread could be started for START_TIMEOUT seconds.
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
            # The interpreter raises only this type for it; once started it came from the function.
            if started:
                raise
            if trio.current_time() >= give_up:
                raise NoThread(
                    "no thread can be started: raise TasksMax= of the unit, or ulimit -u"
                ) from error
        await trio.sleep(RETRY_INTERVAL)
