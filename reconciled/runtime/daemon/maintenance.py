"""What the daemon looks after every few seconds: loops that have ended, and its own signals."""

from __future__ import annotations

import trio

from reconciled.runtime.context import Host
from reconciled.runtime.runs.completion import tell_loop

EVERY = 5.0  # seconds: one look costs microseconds


async def keep(host: Host) -> None:
    """The service; runs until cancelled, in the main thread."""
    while True:
        await trio.sleep(EVERY)
        # A plugin's run may change the handlers of the whole process.
        if lost := host.signals.keep():
            reason = "code of a plugin had taken them over: no stop would have been heard"
            host.log.error("signals.restored", signals=lost, reason=reason)
        for notice in host.loops.quiet(trio.current_time()):
            tell_loop(host, notice)
