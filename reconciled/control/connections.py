"""Connections that are accepted and served, so many at once and no more.

A listener outlives every trouble of its connections: what one of them does ends that one alone,
and a process without descriptors takes in nobody for a while instead of giving up.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable

import attrs
import trio

from reconciled.observe.bound_log import BoundLog

# accept() fails so when this process or the machine is at a limit, which passes.
_AT_A_LIMIT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# Until descriptors are tried for again.
PAUSE = 0.5


@attrs.define(eq=False)
class Connections:
    """Those of one kind, over all of its listeners.

    limit    so many are open at once
    evict    what happens to one more: the oldest goes (True), or the new one waits in the
             kernel's queue until another has ended (False)
    """

    kind: str
    log: BoundLog
    handle: Callable[[trio.SocketStream], Awaitable[None]]
    limit: int
    evict: bool
    # In the order in which they came.
    _open: dict[trio.CancelScope, None] = attrs.field(factory=dict, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    async def accept(self, listener: trio.SocketListener, nursery: trio.Nursery) -> None:
        """Serve who connects to *listener*, in *nursery*, until cancelled."""
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
            # Here and not in its task: who is accepted counts at once.
            scope = trio.CancelScope()
            self._open[scope] = None
            nursery.start_soon(self._serve, stream, scope, name=f"{self.kind} connection")

    async def _serve(self, stream: trio.SocketStream, scope: trio.CancelScope) -> None:
        try:
            with scope:
                async with stream:
                    await self.handle(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return  # the other end has left
        except Exception as error:
            # One connection's fault harms no other.
            self.log.error("control.failed", listener=self.kind, reason=repr(error), exc_info=error)
        finally:
            self._open.pop(scope, None)
            self._ended.set()
            self._ended = trio.Event()
