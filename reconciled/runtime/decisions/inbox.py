"""The service that receives people's decisions: finds their files, claims them, has them act.

1. A decision is claimed before it is read, so that it cannot be withdrawn while it takes effect.
2. A decision that may take effect only once is removed, durably, before it takes effect. Any
   other one is removed after it has: a kill in between repeats it, and never loses it.
3. No disk work runs in the event loop, which a slow disk would block: each step runs in a thread,
   one at a time and in order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import asyncinotify
import attrs
import trio

from reconciled.core.errors import StoreClosed, WriteFailed
from reconciled.journal.decision_files import DecisionFiles
from reconciled.observe.bound_log import BoundLog
from reconciled.threads import in_thread

# Seconds until the next scan without inotify, and until a decision that failed is tried again.
SCAN_INTERVAL = 5.0

T = TypeVar("T")
D = TypeVar("D")


@attrs.frozen
class DecisionKind(Generic[D]):
    """What differs between the kinds of decisions.

    topic    prefix of its log events
    subject  log field with the decision's name
    read     parses a claimed file, in a thread; raises OSError or ValueError
    act      carries one out, by name; OSError, WriteFailed or StoreClosed: tried again later
    reject   logs why a file (first argument) cannot be used
    once     it may take effect only once
    """

    topic: str
    subject: str
    read: Callable[[DecisionFiles, Path], D]
    act: Callable[[str, D], Awaitable[None]]
    reject: Callable[[Path, str], None]
    once: bool


@attrs.define(eq=False)
class Inbox(Generic[D]):
    """The decisions of one kind.

    scanned  set after the first scan
    lock     held during a scan of the service: whoever holds it keeps decisions from taking effect
    """

    files: DecisionFiles
    kind: DecisionKind[D]
    log: BoundLog
    scanned: trio.Event = attrs.field(factory=trio.Event, init=False)
    lock: trio.Lock = attrs.field(factory=trio.Lock, init=False)
    _limiter: trio.CapacityLimiter = attrs.field(
        factory=lambda: trio.CapacityLimiter(1), init=False
    )

    async def run(self, function: Callable[[], T]) -> T:
        """Run a step on the disk in a thread, after those before it.

        Raises NoThread and what *function* raises. Cancelled, it returns at once; the step
        completes all the same, and later steps wait for it.
        """
        return await in_thread(function, limiter=self._limiter, abandon_on_cancel=True)

    async def prepare(self) -> None:
        """Make the directory; decisions that an earlier daemon left stay in it. Raises OSError."""
        await self.run(self.files.make_directory)

    async def serve(self) -> None:
        """Carry decisions out as they arrive; for a service nursery. Runs until cancelled.

        Cancelled during an action that may be repeated, the next start repeats it.
        """
        with contextlib.ExitStack() as stack:
            inotify = self._watch(stack)
            while True:
                async with self.lock:
                    again = await self.scan()
                self.scanned.set()
                if inotify is None:
                    await trio.sleep(SCAN_INTERVAL)
                    continue
                with trio.move_on_after(SCAN_INTERVAL if again else math.inf):
                    await trio.lowlevel.wait_readable(inotify.fd)
                while inotify.sync_get() is not None:
                    pass

    def _watch(self, stack: contextlib.ExitStack) -> asyncinotify.Inotify | None:
        try:
            inotify = stack.enter_context(asyncinotify.Inotify(sync_timeout=0))
            inotify.add_watch(self.files.directory, asyncinotify.Mask.MOVED_TO)
        except OSError as error:
            # Other programs have used up the kernel's limit: decisions are only found later.
            reason = f"inotify is not available: {error}"
            self.log.warning(
                f"{self.kind.topic}.polling", reason=reason, look_every_s=SCAN_INTERVAL
            )
            return None
        return inotify

    async def scan(self, name: str = "") -> bool:
        """Carry out every decision, or the one *name*; whether one has to be tried again."""
        try:
            files = await self.run(partial(self.files.claim, name))
        except OSError as error:
            self._log_deferred(error)
            return True
        again = False
        for file in files:
            try:
                await self._receive(file)
            except (OSError, WriteFailed, StoreClosed) as error:
                self._log_deferred(error, **{self.kind.subject: file.stem})
                again = True
        return again

    async def _receive(self, file: Path) -> None:
        finish = partial(self.files.finish, file)
        try:
            decision = await self.run(partial(self.kind.read, self.files, file))
        except ValueError as error:
            self.kind.reject(file, str(error))
            await self.run(finish)
            return
        if self.kind.once:
            await self.run(finish)
            await self.kind.act(file.stem, decision)
        else:
            await self.kind.act(file.stem, decision)
            await self.run(finish)

    def _log_deferred(self, error: Exception, **fields: str) -> None:
        self.log.error(f"{self.kind.topic}.deferred", **fields, reason=str(error))
