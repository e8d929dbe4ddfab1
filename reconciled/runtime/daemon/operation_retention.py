"""Removal of old operation files: the directories ``STATE/operations/ID`` of ended operations.

1. The files of an open operation are kept, held or not, and so are those of an operation with a
   program that is still alive.
2. Of ended operations the newest ``MIN_KEPT`` directories are kept, and those that changed within
   ``AGE``, but never more than ``MAX_KEPT``: an output may be large.
3. Files that the journal has no operation for are evidence: they are kept for ``AGE``, and their
   removal is logged. While the store is degraded, nothing is removed.

Rejected: removal at the end of the operation. A person needs a program's output after it failed,
and a program that has not ended yet must be refused its steps.
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
AGE = 7 * 86400.0  # seconds since the directory changed; the operation's end changes it
FIRST = 300.0  # seconds after the start, which must not be slowed down
EVERY = 3600.0
AT_ONCE = 100  # directories in one round, to limit the load on the disk
_ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")


@attrs.frozen(order=True)
class OperationFiles:
    """The directory of an ended operation: its id, which sorts by time, and its age in seconds."""

    operation: str
    age: float


def superfluous(over: Sequence[OperationFiles]) -> list[OperationFiles]:
    """Those of *over* that are to be removed, the oldest first."""
    newest = sorted(over, reverse=True)
    removed = [
        files
        for rank, files in enumerate(newest)
        if rank >= MAX_KEPT or (rank >= MIN_KEPT and files.age > AGE)
    ]
    return removed[::-1]


@attrs.define(eq=False)
class OperationRetention:
    """The service that removes superfluous files, a limited number in each round."""

    context: RuntimeContext
    now: Callable[[], float] = time.time

    async def serve(self) -> None:
        """One round an hour, or FIRST seconds after a full one; runs until cancelled."""
        await trio.sleep(FIRST)
        while True:
            try:
                removed = await self.remove_superfluous()
            except NoThread as error:
                self.context.log.error("background.failed", task="old files", reason=str(error))
                removed = 0
            await trio.sleep(FIRST if removed == AT_ONCE else EVERY)

    async def remove_superfluous(self) -> int:
        """One round; the number of removed directories. A cancellation undoes no removal."""
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
        old = {files.operation for files in superfluous(over)}
        for files in sorted(over):
            if removed == AT_ONCE:
                break
            unknown = files.age > AGE and await self._unknown(files)
            if unknown or files.operation in old:
                removed += await self._remove(files, unknown=unknown)
        return removed

    def _list(self) -> list[OperationFiles]:
        try:
            found = list(self.context.operations.root.iterdir())
        except FileNotFoundError:
            return []
        now = self.now()
        # Other names were not made by the daemon.
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
            reason = "the journal has no such operation, and nothing in it has changed for a week"
            self.context.log.info(
                "operation.files_removed", operation=files.operation, reason=reason
            )
        return True


def _remove(directory: Path) -> bool:
    """Remove *directory*, unless a program of it is alive. For a thread. Raises OSError."""
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
