"""What the daemon looks after every few seconds: loops that have ended, and its own signals."""

from __future__ import annotations

import trio

from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.runs.completion import log_loop

EVERY = 5.0  # seconds: one look costs microseconds


async def run_maintenance(context: RuntimeContext) -> None:
    """The service; runs until cancelled, in the main thread."""
    while True:
        await trio.sleep(EVERY)
        # A plugin's run may change the handlers of the whole process.
        if lost := context.signals.reclaim():
            reason = "code of a plugin had taken them over: no stop would have been heard"
            context.log.error("signals.restored", signals=lost, reason=reason)
        for notice in context.loops.expire_quiet(trio.current_time()):
            log_loop(context, notice)
