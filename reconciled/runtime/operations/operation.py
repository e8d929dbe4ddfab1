"""Operations as reconcilers open them: noted before their first effect, critical where asked.

What is durable is the journal's business; this module ties it to a run. An operation that ends
with an error before any step took effect is closed as failed, and the retry is a new one. One
that is cancelled or cut off is *interrupted*: neither success nor failure (invariant 8). It
stays open, as does one that failed half-way, and recovery comes before any other work on its key.
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
from reconciled.programs import ProgramFailed, attempts
from reconciled.stop import Overrun, Section, Work
from reconciled.threads import in_thread


@attrs.define(eq=False)
class RunOperation:
    """One open operation; what ``request.operation()`` gives."""

    _begun: OperationRecord
    _work: Work
    _journal: OperationJournal
    _root: Path
    _undoable: bool = False

    def __repr__(self) -> str:
        return f"<Operation {self.name} {self.id}, last step {self.last_step!r}>"

    @property
    def record(self) -> OperationRecord:
        """As it stands now."""
        return self._journal.find(self._begun.id) or self._begun

    @property
    def id(self) -> str:
        """The idempotency key."""
        return self._begun.id

    @property
    def name(self) -> str:
        """As the reconciler named it."""
        return self._begun.name

    @property
    def attempt(self) -> int:
        """1 for the first one."""
        return self._begun.attempt

    @property
    def epoch(self) -> int:
        """The start that this attempt belongs to."""
        return self._begun.epoch

    @property
    def undoes(self) -> str:
        """The id of the operation that this one takes back; empty: none."""
        return self._begun.undoes

    @property
    def last_step(self) -> str:
        """The last step that is done; empty before the first."""
        return self.record.last_step

    @property
    def directory(self) -> Path:
        """``STATE/operations/ID``, made when it is first asked for."""
        directory = self._root / self.id
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory

    def critical(self, *, budget: float | str) -> AbstractAsyncContextManager[Section]:
        """The part that outlives a stop; see Work.critical()."""
        seconds = parse_duration(budget) if isinstance(budget, str) else float(budget)
        if not 0 < seconds < math.inf:
            raise ValueError(f"a budget must be positive and finite, got {budget!r}")
        limit = self._work.stop.limits.critical
        if seconds > limit:
            raise ValueError(
                f"the budget {format_duration(seconds)} is longer than stop.critical"
                f" ({format_duration(limit)}), so that a stop could cut it:"
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
        """Run *function* as step *name*, or give the data of the one that is done already."""
        noted = self.record.step(name)
        if noted is not None and noted.state is StepState.DONE:
            return noted.data
        await self._journal.record_step_started(self.id, name, kind.value, undoable=self._undoable)
        data = await function()
        return await self._journal.record_step_done(self.id, name, kind.value, data)


@attrs.frozen(eq=False)
class Operations:
    """All operations of the daemon: where they are noted, and where their files go."""

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

        resumed goes on with one that was interrupted; told is the run's logger; undoable: its
        steps can be taken back. Raises trio.Cancelled at entry once the stop is at STOPPING,
        NotJournaled.
        """
        await work.admit(name)
        record = resumed
        if record is None:
            record = await self.journal.begin(Key(work.key), name, pinned, applied_spec=owned)
            log.debug("operation.begun", operation=record.id, name=name)
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
        """No program of it may note a step any more."""
        directory = self.root / operation
        if directory.exists():
            await in_thread(partial(attempts.close_attempts, directory))

    async def _close(self, operation: RunOperation, ending: Ending) -> None:
        await self.journal.end(operation.id, ending)
        await self.close_attempts(operation.id)

    async def _leave(
        self, operation: RunOperation, error: BaseException, work: Work, log: BoundLog
    ) -> None:
        """An interrupted one stays open, and so does one whose effects have begun."""
        record = operation.record
        interrupted = is_interruption(error)
        begun = record.last_step or record.started_once_step or record.undoes
        if not interrupted and not begun:
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
            reason=_why(error, work),
        )


def is_interruption(error: BaseException) -> bool:
    """Whether *error* stopped an operation from outside: it did not fail by a word of its own."""
    return BaseExceptionGroup("", [error]).subgroup(_is_interruption) is not None


def was_cancelled(error: BaseException) -> bool:
    """Whether *error* is a cancellation and nothing else: nobody was killed or cut off for it."""
    return BaseExceptionGroup("", [error]).split(trio.Cancelled)[1] is None


def _is_interruption(error: BaseException) -> bool:
    if isinstance(error, ProgramFailed):
        return error.ended is not None and error.ended.code is None
    return isinstance(error, Overrun | trio.Cancelled)


def _why(error: BaseException, work: Work) -> str:
    said = BaseExceptionGroup("", [error]).subgroup((Overrun, ProgramFailed))
    if said is None and not is_interruption(error):
        return f"{type(error).__name__}: {error}"
    if said is None:
        return work.stop.root.reason or work.stop.reason or "cancelled"
    first: BaseException = said
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)
