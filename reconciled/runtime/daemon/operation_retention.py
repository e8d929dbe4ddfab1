"""Old files of operations: ``STATE/operations/ID`` goes some time after its operation's end.

1. An open operation keeps its files, held or not, and so does one of which a program lives.
2. The newest ``ALWAYS`` directories stay, and so do those that changed within ``AGE``, but never
   more than ``MOST`` of what is over: an output may be large.
3. Files of which the journal knows nothing are evidence: they stay for ``AGE`` and go with a
   line. While the store is degraded, nothing goes at all.

Rejected: removal at the end of the operation. What a program wrote is what a person wants to see
after it failed, and a program that is still on its way out must be refused its steps.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.core.errors import NoThread, RecordDamaged
from reconciled.programs import survivors
from reconciled.runtime.context import RuntimeContext
from reconciled.threads import in_thread

MIN_KEPT = 200
MAX_KEPT = 2000
AGE = 7 * 86400.0  # seconds since the directory last changed, which its operation's end does
FIRST = 300.0  # seconds after the start, which has better things to do
EVERY = 3600.0
AT_ONCE = 100  # directories in one round, so that a disk is not kept busy by this
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")


@attrs.frozen(order=True)
class OperationFiles:
    """The directory of an operation that is over: its id, which sorts by time, and its age."""

    operation: str
    age: float


def superfluous(over: Sequence[OperationFiles]) -> list[OperationFiles]:
    """Those of *over* that may go, the oldest first."""
    newest = sorted(over, reverse=True)
    gone = [
        files
        for place, files in enumerate(newest)
        if place >= MAX_KEPT or (place >= MIN_KEPT and files.age > AGE)
    ]
    return gone[::-1]


@attrs.define(eq=False)
class OperationRetention:
    """Removes what is superfluous, a little at a time."""

    context: RuntimeContext
    now: Callable[[], float] = time.time

    async def serve(self) -> None:
        """A round each hour, and at once after a full one; runs until cancelled."""
        await trio.sleep(FIRST)
        while True:
            try:
                removed = await self.tidy()
            except NoThread as error:
                self.context.log.error("background.failed", task="old files", reason=str(error))
                removed = 0
            await trio.sleep(FIRST if removed == AT_ONCE else EVERY)

    async def tidy(self) -> int:
        """One round; how many directories went. Cancelled, what is removed is removed."""
        if self.context.store.degraded:
            return 0
        listed = await in_thread(self._list)
        journal = self.context.operations.journal
        over = [
            files
            for files in listed
            if journal.find(files.operation) is None and not journal.is_closing(files.operation)
        ]
        removed = 0
        doomed = {files.operation for files in superfluous(over)}
        for files in sorted(over):
            if removed == AT_ONCE:
                break
            unknown = files.age > AGE and await self._unknown(files)
            if unknown or files.operation in doomed:
                removed += await self._remove(files, unknown=unknown)
        return removed

    def _list(self) -> list[OperationFiles]:
        try:
            found = list(self.context.operations.root.iterdir())
        except FileNotFoundError:
            return []
        now = self.now()
        # What has another name was not made here, and is none of our business.
        return [
            OperationFiles(each.name, now - each.lstat().st_mtime)
            for each in found
            if _ID.fullmatch(each.name) and each.is_dir() and not each.is_symlink()
        ]

    async def _unknown(self, files: OperationFiles) -> bool:
        past = await self.context.operations.journal.past_operations(1, files.operation)
        return not past.records and not past.damaged

    async def _remove(self, files: OperationFiles, *, unknown: bool) -> bool:
        directory = self.context.operations.root / files.operation
        try:
            if not await in_thread(partial(_remove, directory)):
                return False
        except OSError as error:
            self.context.log.error("background.failed", task="old files", reason=str(error))
            return False
        if unknown:
            reason = "the journal knows nothing of it, and nothing in it has changed for a week"
            self.context.log.info(
                "operation.files_removed", operation=files.operation, reason=reason
            )
        return True


def _remove(directory: Path) -> bool:
    """Remove *directory*, unless a program of it lives. For a thread. Raises OSError."""
    try:
        survivor = survivors.find_survivor(directory)
    except RecordDamaged:
        survivor = None
    if survivor is not None:
        try:
            if survivor.alive:
                return False
        finally:
            survivor.close()
    shutil.rmtree(directory)
    return True
