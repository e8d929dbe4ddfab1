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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import asyncinotify
import attrs
import trio

from reconciled.core.errors import StoreClosed, WriteFailed
from reconciled.journal.decision_files import DecisionFiles
from reconciled.threads import in_thread

# Seconds until the next scan without inotify, and until a decision that failed is tried again.
SCAN_INTERVAL = 5.0

T = TypeVar("T")
D = TypeVar("D")


class DecisionHandler(Protocol[D]):
    """What differs between the kinds of decisions.

    at_most_once: a decision may take effect only once.
    """

    at_most_once: bool

    def read(self, files: DecisionFiles, file: Path) -> D:
        """Parse a claimed file; called in a thread. Raises OSError, or ValueError."""

    async def act(self, name: str, decision: D) -> None:
        """Carry a decision out. OSError, WriteFailed, StoreClosed: it is tried again later."""

    def log_rejected(self, file: Path, reason: str) -> None:
        """Log that *file* cannot be used."""

    def log_deferred(self, name: str, reason: str) -> None:
        """Log that the decision *name* (empty: any) is tried again later."""

    def log_polling(self, reason: str) -> None:
        """Log that decisions are found by scans every SCAN_INTERVAL."""


@attrs.define(eq=False)
class Inbox(Generic[D]):
    """The decisions of one kind.

    scanned  set after the first scan
    lock     held by serve() during a scan; a caller that holds it delays decisions
    """

    files: DecisionFiles
    handler: DecisionHandler[D]
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

    async def serve(self) -> None:
        """Carry decisions out as they arrive; for a service nursery. Runs until cancelled.

        Cancelled during an action that may be repeated, the next start repeats it.
        """
        with contextlib.ExitStack() as stack:
            inotify = self._open_inotify(stack)
            watched = inotify is not None and await self._watch(inotify)
            while True:
                async with self.lock:
                    again = await self.scan()
                self.scanned.set()
                if inotify is None or not watched:
                    await trio.sleep(SCAN_INTERVAL)
                    continue
                with trio.move_on_after(SCAN_INTERVAL if again else math.inf):
                    watched = await self._wait_arrival(inotify)
                if not watched:
                    watched = await self._watch(inotify)

    def _open_inotify(self, stack: contextlib.ExitStack) -> asyncinotify.Inotify | None:
        try:
            return stack.enter_context(asyncinotify.Inotify(sync_timeout=0))
        except OSError as error:
            # Other programs have used up the kernel's limit: decisions are only found later.
            self.handler.log_polling(f"inotify is not available: {error}")
            return None

    async def _watch(self, inotify: asyncinotify.Inotify) -> bool:
        """Watch the directory, made if it is missing; False: decisions are polled for.

        Not a condition of a start: a full disk, or no thread, must not end the daemon.
        """
        try:
            await self.run(self.files.make_directory)
            inotify.add_watch(self.files.directory, asyncinotify.Mask.MOVED_TO)
        except OSError as error:
            self.handler.log_polling(f"inotify is not available: {error}")
            return False
        return True

    async def _wait_arrival(self, inotify: asyncinotify.Inotify) -> bool:
        """Wait for a new decision, or lost events; claims and reports are renames as well.

        False: the directory was deleted, and its watch ended.
        """
        arrived, watched = False, True
        while not arrived:
            await trio.lowlevel.wait_readable(inotify.fd)
            while (event := inotify.sync_get()) is not None:
                arrived |= event.name is None or event.name.suffix == self.files.suffix
                watched &= asyncinotify.Mask.IGNORED not in event.mask
        return watched

    async def scan(self, name: str = "") -> bool:
        """Carry out every decision, or the one *name*; whether one has to be tried again."""
        try:
            files = await self.run(partial(self.files.claim, name))
        except OSError as error:
            self.handler.log_deferred("", str(error))
            return True
        again = False
        for file in files:
            try:
                await self._receive(file)
            except (OSError, WriteFailed, StoreClosed) as error:
                self.handler.log_deferred(file.stem, str(error))
                again = True
        return again

    async def _receive(self, file: Path) -> None:
        finish = partial(self.files.finish, file)
        try:
            decision = await self.run(partial(self.handler.read, self.files, file))
        except ValueError as error:
            self.handler.log_rejected(file, str(error))
            await self.run(finish)
            return
        if self.handler.at_most_once:
            await self.run(finish)
            await self.handler.act(file.stem, decision)
        else:
            await self.handler.act(file.stem, decision)
            await self.run(finish)
