"""Hints from inotify that a directory may have changed: a reason to list it, never a fact.

1. The kernel's queue is the only buffer of hints: one that arrives during a listing is still in
   the queue after it, so none is lost between list and watch. An overflow is a hint as well.
2. Every wait can be cancelled at once. Without inotify only the timeouts remain.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Self

import attrs
import trio
from asyncinotify import Inotify, Mask

from reconciled.watchers.listing import is_manifest

if TYPE_CHECKING:
    from types import TracebackType

    from asyncinotify import Event, Watch

DEBOUNCE = 0.05  # seconds without a hint that end a burst
MAX_DEBOUNCE = 0.5  # seconds after which a burst is taken as ended
# Events read between two checkpoints: a full queue of 16384 must not block the loop.
_MAX_BATCH = 512

_ENTRIES = Mask.CREATE | Mask.DELETE | Mask.MOVED_FROM | Mask.MOVED_TO
_CONTENTS = Mask.CLOSE_WRITE | Mask.ATTRIB
# Not MODIFY: a file that is being written is not usable until its writer closes it.
_DIRECTORY = _ENTRIES | _CONTENTS | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR


@attrs.define(eq=False)
class Hints:
    """Watches the directory *path*, and its entry in the parent for its creation and removal."""

    path: Path
    fault: str = attrs.field(init=False, default="")  # why there are no hints; empty: there are
    _inotify: Inotify | None = attrs.field(init=False, default=None)
    _watches: dict[Path, Watch] = attrs.field(init=False, factory=dict)

    def __enter__(self) -> Self:
        try:
            self._inotify = Inotify(sync_timeout=0, cache_size=_MAX_BATCH)
        except OSError as error:
            self._set_fault(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._inotify is not None:
            self._inotify.close()

    def subscribe(self) -> None:
        """Watch the directory that *path* names now. Call it before each listing; may block."""
        self.fault = "" if self._inotify is not None else self.fault
        self._watch(self.path, _DIRECTORY)
        # The root is its own parent: it has one watch, which keeps its mask.
        if self.path.parent != self.path:
            self._watch(self.path.parent, _ENTRIES | Mask.ONLYDIR)

    def _watch(self, path: Path, mask: Mask) -> None:
        if self._inotify is None:
            return
        try:
            watch = self._inotify.add_watch(path, mask)
        except ValueError:
            return  # closed: this thread was abandoned, and its listing is discarded
        except OSError as error:
            # The listing reports a directory that is missing or cannot be read.
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                self._set_fault(error)
            return
        last = self._watches.get(path)
        self._watches[path] = watch
        if last is not None and last is not watch:
            # Another directory has this path now; the old one may be deleted with its watch.
            with contextlib.suppress(OSError):
                self._inotify.rm_watch(last)

    def _set_fault(self, error: OSError) -> None:
        self.fault = (
            f"changes are noticed at full listings only: {error.strerror or error};"
            " raise fs.inotify.max_user_watches or max_user_instances"
        )

    async def wait(self, seconds: float) -> bool:
        """Wait for a hint, *seconds* at most. True: one came."""
        with trio.move_on_after(seconds):
            if self._inotify is None:
                await trio.sleep_forever()
            while not await self.take_pending():
                assert self._inotify is not None
                await trio.lowlevel.wait_readable(self._inotify.fd)
            return True
        return False

    async def debounce(self) -> None:
        """Wait until no hint comes for DEBOUNCE seconds, MAX_DEBOUNCE at most."""
        with trio.move_on_after(MAX_DEBOUNCE):
            while await self.wait(DEBOUNCE):
                pass

    async def take_pending(self) -> bool:
        """Consume all queued hints. True: one of them was relevant. A checkpoint."""
        relevant = False
        while True:
            await trio.lowlevel.checkpoint()
            for _ in range(_MAX_BATCH):
                event = self._inotify.sync_get() if self._inotify is not None else None
                if event is None:
                    return relevant
                relevant = relevant or self._is_relevant(event)

    def _is_relevant(self, event: Event) -> bool:
        if event.name is None or event.watch is None:
            return Mask.IGNORED not in event.mask  # about the directory itself, or an overflow
        name = os.fspath(event.name)
        if event.watch is self._watches.get(self.path.parent):
            return name == self.path.name
        # Any entry may be on the path to a manifest, as ..data of a mounted ConfigMap is.
        return is_manifest(name) or bool(event.mask & _ENTRIES)
