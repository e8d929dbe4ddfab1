"""Operations as reconcilers open them: noted before their first effect, critical where asked.

What is durable is the operation log's business; this module ties it to a run. An operation
that ends with an error is closed as failed, and the retry opens a new one. One that is
cancelled or cut off is *interrupted*: neither success nor failure (invariant 8).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.api import StepKind
from reconciled.core.durations import format_duration, parse_duration
from reconciled.core.resources import Key
from reconciled.journal.operations import Ending, OperationLog, OperationRecord, StepState
from reconciled.observe.bound import BoundLog
from reconciled.programs import ProgramFailed
from reconciled.stop import Overrun, Section, Work


@attrs.define(eq=False)
class OpenOperation:
    """One open operation; what ``request.operation()`` gives."""

    record: OperationRecord
    _work: Work
    _log: OperationLog
    _root: Path
    _last_step: str = ""

    def __repr__(self) -> str:
        return f"<Operation {self.record.name} {self.record.id}, last step {self.last_step!r}>"

    @property
    def id(self) -> str:
        """The idempotency key."""
        return self.record.id

    @property
    def name(self) -> str:
        """As the reconciler named it."""
        return self.record.name

    @property
    def attempt(self) -> int:
        """1 for the first one."""
        return self.record.attempt

    @property
    def epoch(self) -> int:
        """The start that it belongs to."""
        return self.record.epoch

    @property
    def last_step(self) -> str:
        """The last step that is done; empty before the first."""
        return self._last_step

    @property
    def directory(self) -> Path:
        """``STATE/operations/ID``, made when it is first asked for."""
        directory = self._root / self.record.id
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
        return self._work.critical(self.record.name, budget=seconds)

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        *,
        kind: StepKind = StepKind.IDEMPOTENT,
    ) -> Any:
        """Run *function* as step *name*, or give the data of the one that is done already."""
        record = self._log.find(self.record.id) or self.record
        done = record.step(name)
        if done is not None and done.state is StepState.DONE:
            return done.data
        await self._log.step(self.id, name, kind.value, StepState.STARTED)
        data = await function()
        kept = await self._log.step(self.id, name, kind.value, StepState.DONE, data)
        self._last_step = name
        return kept


@attrs.frozen(eq=False)
class Operations:
    """All operations of the daemon: where they are noted, and where their files go."""

    log: OperationLog
    root: Path  # STATE/operations

    @asynccontextmanager
    async def opened(
        self, work: Work, name: str, pinned: Any, told: BoundLog
    ) -> AsyncIterator[OpenOperation]:
        """Open an operation of *work*'s key around the body; close it by how the body ended.

        *told* is the run's logger. Raises trio.Cancelled at entry once the stop is at STOPPING.
        """
        await work.admit(name)
        record = await self.log.begin(Key(work.key), name, pinned)
        operation = OpenOperation(record, work, self.log, self.root)
        told.debug("operation.begun", operation=record.id, name=name)
        try:
            yield operation
        except BaseException as error:
            ending = _ending_of(error)
            async with work.cleanup(f"outcome of {name}"):  # noqa: ASYNC102 - it is a shield
                await self.log.end(record.id, ending)  # noqa: ASYNC102 - inside that shield
            if ending is Ending.ABANDONED:
                told.warning(
                    "operation.interrupted",
                    operation=record.id,
                    name=name,
                    last_step=operation.last_step or None,
                    reason=_why(error, work),
                )
            raise
        async with work.cleanup(f"outcome of {name}"):
            await self.log.end(record.id, Ending.DONE)


def _is_interruption(error: BaseException) -> bool:
    """Whether the operation was stopped from outside, and did not fail by a word of its own."""
    if isinstance(error, ProgramFailed):
        return error.ended is not None and error.ended.code is None
    return isinstance(error, Overrun | trio.Cancelled)


def _ending_of(error: BaseException) -> Ending:
    found = BaseExceptionGroup("", [error]).subgroup(_is_interruption)
    return Ending.FAILED if found is None else Ending.ABANDONED


def _why(error: BaseException, work: Work) -> str:
    said = BaseExceptionGroup("", [error]).subgroup((Overrun, ProgramFailed))
    if said is None:
        return work.stop.root.reason or work.stop.reason or "cancelled"
    first: BaseException = said
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)
