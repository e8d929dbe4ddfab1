"""Accepts and serves a bounded number of connections.

A listener outlives every fault of its connections: a fault ends its own connection alone, and a
process without free descriptors pauses accepting instead of ending.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import attrs
import trio

from reconciled.observe.bound_log import BoundLog

# The errors of accept() when this process or the machine is at a limit; they are temporary.
_AT_A_LIMIT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Seconds until the next accept() after such an error.
PAUSE = 0.5


@attrs.define(eq=False)
class Connections:
    """The connections of one kind, over all of its listeners.

    limit  the number that is open at once
    evict  whether one more ends the oldest (True), or waits in the kernel's queue until another
           has ended (False)
    """

    kind: str
    log: BoundLog
    handle: Callable[[trio.SocketStream], Awaitable[None]]
    limit: int
    evict: bool
    # In the order of accept().
    _open: dict[trio.CancelScope, None] = attrs.field(factory=dict, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Serve the connections of *listener*, in *nursery*, until cancelled."""
        while True:
            while len(self._open) >= self.limit and not self.evict:
                await self._ended.wait()
            try:
                stream = await listener.accept()
            except OSError as error:
                if error.errno not in _AT_A_LIMIT:
                    raise
                self.log.warning("control.exhausted", listener=self.kind, reason=error.strerror)
                await trio.sleep(PAUSE)
                continue
            if self.evict and len(self._open) >= self.limit:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel(reason="one connection too many")
            # Here and not in the task: a connection counts as soon as it is accepted.
            scope = trio.CancelScope()
            self._open[scope] = None
            nursery.start_soon(self._serve, stream, scope, name=f"{self.kind} connection")

    async def _serve(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            with scope:
                async with stream:
                    await self.handle(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return  # the client closed the connection
        except Exception as error:
            # Other connections are unaffected.
            self.log.error("control.failed", listener=self.kind, reason=repr(error), exc_info=error)
        finally:
            self._open.pop(scope, None)
            self._ended.set()
            self._ended = trio.Event()
