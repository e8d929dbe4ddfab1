"""Operations as reconcilers open them: journaled before their first effect, on request critical.

The journal decides what is durable when; this module ties it to a run.

1. An operation that fails before a step took effect is closed as failed; its retry is a new
   operation.
2. One that is cancelled or cut off is *interrupted*: neither success nor failure (invariant 8).
3. An interrupted operation stays open, and so does one that failed after a step took effect:
   recovery comes before any other work on its key.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.api import StepKind
from reconciled.core.durations import format_duration, parse_duration
from reconciled.core.resources import Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import AppliedSpec, Ending, OperationRecord, StepState
from reconciled.observe.bound_log import BoundLog
from reconciled.programs import ProgramFailed, attempt_fence
from reconciled.stop import Overrun, Section, Work
from reconciled.threads import in_thread


@attrs.define(eq=False)
class RunOperation:
    """One open operation, as ``request.operation()`` returns it."""

    _opened: OperationRecord
    _work: Work
    _journal: OperationJournal
    _root: Path
    _undoable: bool = False

    def __repr__(self) -> str:
        return f"<Operation {self.name} {self.id}, last step {self.last_step!r}>"

    @property
    def record(self) -> OperationRecord:
        """The present state of its record."""
        return self._journal.find(self._opened.id) or self._opened

    @property
    def id(self) -> str:
        """The idempotency key."""
        return self._opened.id

    @property
    def key(self) -> Key:
        """The key that it changes."""
        return self._opened.key

    @property
    def name(self) -> str:
        """As the reconciler named it."""
        return self._opened.name

    @property
    def attempt(self) -> int:
        """1 for the first one."""
        return self._opened.attempt

    @property
    def epoch(self) -> int:
        """The epoch of the daemon's start in which this attempt runs."""
        return self._opened.epoch

    @property
    def undoes(self) -> str:
        """The id of the operation that this one undoes; empty: none."""
        return self._opened.undoes

    @property
    def last_step(self) -> str:
        """The last step that is done; empty before the first."""
        return self.record.last_step

    @property
    def directory(self) -> Path:
        """``STATE/operations/ID``, created at first use."""
        directory = self._root / self.id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def critical(self, *, budget: float | str) -> AbstractAsyncContextManager[Section]:
        """The part that outlives a stop; see Work.critical(). ValueError for a bad budget."""
        seconds = parse_duration(budget) if isinstance(budget, str) else float(budget)
        if not 0 < seconds < math.inf:
            raise ValueError(f"a budget must be positive and finite, got {budget!r}")
        limit = self._work.stop.limits.critical
        if seconds > limit:
            raise ValueError(
                f"the budget {format_duration(seconds)} exceeds stop.critical"
                f" ({format_duration(limit)}), and a stop could cut the operation:"
                " lower the budget, or raise stop.critical"
            )
        self._journal.mark_critical(self.id)
        return self._work.critical(self.name, budget=seconds)

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        *,
        kind: StepKind = StepKind.IDEMPOTENT,
    ) -> Any:
        """Run *function* as step *name*, or return the data of that step if it is done already.

        A cancellation leaves the step recorded as started and not done.
        """
        recorded = self.record.step(name)
        if recorded is not None and recorded.state is StepState.DONE:
            return recorded.data
        await self._journal.record_step_started(self.id, name, kind.value, undoable=self._undoable)
        data = await function()
        return await self._journal.record_step_done(self.id, name, kind.value, data)


@attrs.frozen(eq=False)
class Operations:
    """All operations of the daemon: their journal, and the directory of their files."""

    journal: OperationJournal
    root: Path  # STATE/operations

    @asynccontextmanager
    async def open_operation(  # noqa: PLR0913, PLR0917 - one argument a fact
        self,
        work: Work,
        name: str,
        pinned: Any,
        owned: AppliedSpec | None,
        log: BoundLog,
        resumed: OperationRecord | None = None,
        *,
        undoable: bool = False,
    ) -> AsyncIterator[RunOperation]:
        """Open an operation of *work*'s key around the body; close it by how the body ended.

        resumed   an interrupted operation to continue, instead of a new one
        owned     the spec that counts as applied from here on; None: it does already
        log       the run's logger
        undoable  its steps can be undone

        Raises at entry trio.Cancelled from the stage STOPPING on, OperationAlreadyOpen and
        NotJournaled.
        """
        await work.admit(name)
        record = resumed
        if record is None:
            record = await self.journal.begin(Key(work.key), name, pinned, applied_spec=owned)
            log.debug("operation.began", operation=record.id, name=name)
        operation = RunOperation(record, work, self.journal, self.root, undoable)
        try:
            yield operation
        except BaseException as error:
            async with work.cleanup(f"outcome of {name}"):  # noqa: ASYNC102 - it is a shield
                await self._leave(operation, error, work, log)  # noqa: ASYNC102 - inside it
            raise
        async with work.cleanup(f"outcome of {name}"):
            await self._close(operation, Ending.DONE)

    async def close_attempts(self, operation: str) -> None:
        """Fence the programs of *operation*: none of them can record a step from here on."""
        directory = self.root / operation
        if directory.exists():
            await in_thread(partial(attempt_fence.close_attempts, directory))

    async def _close(self, operation: RunOperation, ending: Ending) -> None:
        await self.journal.end(operation.id, ending)
        await self.close_attempts(operation.id)

    async def _leave(
        self, operation: RunOperation, error: BaseException, work: Work, log: BoundLog
    ) -> None:
        """Close *operation* as failed, or leave it open for recovery (rules 1 to 3)."""
        record = operation.record
        interrupted = is_interruption(error)
        has_effects = record.last_step or record.started_once_step or record.undoes
        if not interrupted and not has_effects:
            await self._close(operation, Ending.FAILED)
            return
        if interrupted:
            await self.journal.flush(record.id)
        else:
            await self.journal.record_own_outcome(record.id)
            await self.journal.flush(record.id)
        log.warning(
            "operation.interrupted" if interrupted else "operation.left_open",
            operation=record.id,
            name=record.name,
            last_step=record.last_step or None,
            reason=_reason(error, work),
        )


def is_interruption(error: BaseException) -> bool:
    """Whether *error* stopped an operation from outside: it has no outcome of its own."""
    return BaseExceptionGroup("", [error]).subgroup(_is_interruption) is not None


def was_cancelled(error: BaseException) -> bool:
    """Whether *error* is a cancellation alone: no program was killed, no critical part cut."""
    return BaseExceptionGroup("", [error]).split(trio.Cancelled)[1] is None


def _is_interruption(error: BaseException) -> bool:
    if isinstance(error, ProgramFailed):
        return error.ended is not None and error.ended.code is None
    return isinstance(error, Overrun | trio.Cancelled)


def _reason(error: BaseException, work: Work) -> str:
    named = BaseExceptionGroup("", [error]).subgroup((Overrun, ProgramFailed))
    if named is None and not is_interruption(error):
        return f"{type(error).__name__}: {error}"
    if named is None:
        return work.stop.reason or "cancelled"
    first: BaseException = named
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)
