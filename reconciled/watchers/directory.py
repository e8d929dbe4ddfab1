"""The watcher of one directory of manifests.

1. Subscribe, then list, and list again if a hint came meanwhile: what is reported as complete
   is a listing during which nothing changed.
2. A directory that is missing, on another device, or empty in place of another directory is
   Unavailable, never empty (invariant 11). The last good state is kept.
3. Listing and parsing run in a thread that only reads: a stalled file system blocks neither the
   loop nor a stop. The thread is abandoned, with its one token of this watcher's limiter.
4. The first state is reported, then only changes.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.core.durations import format_duration
from reconciled.core.errors import DeviceChanged, NoThread
from reconciled.core.problems import Problem
from reconciled.core.resources import Origin
from reconciled.core.sources import Report, Snapshot, Unavailable
from reconciled.threads import in_thread
from reconciled.watchers.change_hints import MAX_DEBOUNCE, Hints
from reconciled.watchers.documents import Documents
from reconciled.watchers.listing import Listing, Parse, ReadFile, read_listing

RELIST = 60.0  # seconds between full listings; symlink targets and mounts give no hints
SLOW = 10.0  # seconds after which an unfinished listing is reported
_BACKOFF_INITIAL = 0.25  # seconds; doubled while the directory is unavailable
_BACKOFF_MAX = 5.0


@attrs.define(eq=False)
class DirectoryWatcher:
    """Reports the manifests of *path*: ``*.yaml`` and ``*.yml``, not hidden, not recursive.

    parse          gives manifests and problems of a file's bytes and name; runs in a thread
    last_identity  the identity of the last snapshot of an earlier process, or empty
    """

    path: Path
    parse: Parse
    last_identity: str = ""
    _identity: str = attrs.field(init=False)
    # From a listing of this process: the number of a device may change at a reboot.
    _device: int | None = attrs.field(init=False, default=None)
    _files: Mapping[str, ReadFile] = attrs.field(init=False, factory=dict)
    _documents: Documents = attrs.field(init=False, factory=Documents)
    _reported: Report | None = attrs.field(init=False, default=None)
    _limiter: trio.CapacityLimiter = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._identity = self.last_identity
        self._limiter = trio.CapacityLimiter(1)

    def __repr__(self) -> str:
        return f"<DirectoryWatcher {self.path}: {len(self._files)} files>"

    @property
    def name(self) -> str:
        """``directory PATH``."""
        return f"directory {self.path}"

    @property
    def declares(self) -> bool:
        """True: a directory declares resources."""
        return True

    async def watch(self, report: Callable[[Report], None]) -> None:
        """Report until cancelled, first when it is listed. A cancellation takes effect at once."""
        retry = _BACKOFF_INITIAL
        with Hints(self.path) as hints:
            while True:
                outcome = await self._scan(hints, report)
                self._publish(outcome, report)
                if isinstance(outcome, Unavailable):
                    pause, retry = retry, min(2 * retry, _BACKOFF_MAX)
                else:
                    retry = _BACKOFF_INITIAL
                    settled = not (self._documents.torn or self._documents.unstable)
                    pause = RELIST if settled else MAX_DEBOUNCE
                if await hints.wait(pause):
                    await hints.debounce()

    async def _scan(self, hints: Hints, report: Callable[[Report], None]) -> Report:
        """List until nothing changes during a listing, for MAX_DEBOUNCE seconds at most."""
        give_up = trio.current_time() + MAX_DEBOUNCE
        while True:
            await hints.take_pending()
            listing = await self._list_in_thread(hints, report)
            torn = await hints.take_pending()
            last = trio.current_time() >= give_up
            if isinstance(listing, Unavailable):
                if last or not torn:
                    return listing
            else:
                torn = torn or listing.torn
                documents = await self._join_documents(listing, torn=torn)
                self._files = listing.files
                if last or not (torn or documents.unstable):
                    self._documents = documents
                    self._identity, self._device = listing.identity, listing.device
                    return self._snapshot(hints)
            await hints.debounce()

    async def _list_in_thread(
        self, hints: Hints, report: Callable[[Report], None]
    ) -> Listing | Unavailable:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_slowness, report, name=f"slow listing of {self.path}")
            lists = partial(self._list, hints)
            try:
                listing = await in_thread(lists, abandon_on_cancel=True, limiter=self._limiter)
            except NoThread as error:
                listing = Unavailable(_describe_os_error(self.path, error))
            nursery.cancel_scope.cancel(reason="listed")
        return listing

    async def _join_documents(self, listing: Listing, *, torn: bool) -> Documents:
        # In a thread: ten thousand documents would block the loop for about 20 ms.
        following = partial(self._documents.updated, listing.files, time.time(), torn=torn)
        return await in_thread(following, abandon_on_cancel=True, limiter=self._limiter)

    async def _report_slowness(self, report: Callable[[Report], None]) -> None:
        await trio.sleep(SLOW)
        reason = f"listing {self.path} has taken {format_duration(SLOW)} and is not finished"
        self._publish(Unavailable(reason), report)

    def _list(self, hints: Hints) -> Listing | Unavailable:
        """List, in the thread. Changes no state of the watcher, so that it may be abandoned."""
        try:
            hints.subscribe()
            listing = read_listing(self.path, self._files, self.parse, self._device)
        except DeviceChanged as error:
            return Unavailable(
                f"{self.path} {error}: it was mounted or unmounted; restart the daemon to accept it"
            )
        except OSError as error:
            return Unavailable(_describe_os_error(self.path, error))
        if not listing.files and self._identity not in ("", listing.identity):
            return Unavailable(
                f"{self.path} is empty and is not the directory it was: if nothing is declared any"
                " more, write a file with only a comment into it"
            )
        return listing

    def _snapshot(self, hints: Hints) -> Snapshot:
        documents = self._documents
        problems = documents.problems
        if hints.fault:
            problems = (Problem(Origin(str(self.path)), hints.fault), *problems)
        return Snapshot(
            manifests=tuple(documents.good.values()),
            complete=documents.complete,
            problems=problems,
            identity=self._identity,
        )

    def _publish(self, outcome: Report, report: Callable[[Report], None]) -> None:
        if outcome != self._reported:
            self._reported = outcome
            report(outcome)


def _describe_os_error(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return f"{path} does not exist"
    if error.errno == errno.ENOTDIR:
        return f"{path} is not a directory"
    return f"{path} cannot be listed: {error.strerror or error}"
