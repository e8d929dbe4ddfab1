"""Requests without a daemon, for tests of the built-in reconcilers.

They behave like the real interface as far as a reconciler can observe: operations record how they
ended, done steps are not repeated, a critical section is a real shield with a real deadline.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs
import trio

from reconciled.api import Critical, StepKind
from reconciled.core.durations import parse_duration

S = TypeVar("S")


class FakeLog:
    """A log that keeps its lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def _keep(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    debug = info = warning = error = _keep


@attrs.define(eq=False)
class FakeCritical:
    """An open critical section."""

    scope: trio.CancelScope

    @property
    def remaining(self) -> float:
        return self.scope.deadline - trio.current_time()


@attrs.define(eq=False)
class FakeOperation:
    """An operation that records its steps, critical sections and outcome."""

    name: str
    directory: Path
    id: str = "op-1"
    attempt: int = 1
    epoch: int = 7
    last_step: str = ""
    undoes: str = ""
    steps: dict[str, Any] = attrs.field(factory=dict)
    budgets: list[float | str] = attrs.field(factory=list)
    ended: str = ""  # "" while open, then done, failed or interrupted

    @asynccontextmanager
    async def critical(self, *, budget: float | str) -> AsyncIterator[Critical]:
        self.budgets.append(budget)
        seconds = parse_duration(budget) if isinstance(budget, str) else budget
        await trio.lowlevel.checkpoint_if_cancelled()
        scope = trio.CancelScope(deadline=trio.current_time() + seconds, shield=True)
        with scope:
            yield FakeCritical(scope)

    async def step(
        self,
        name: str,
        function: Callable[[], Awaitable[Any]],
        *,
        kind: StepKind = StepKind.IDEMPOTENT,  # noqa: ARG002 the interface has it
    ) -> Any:
        if name not in self.steps:
            self.steps[name] = json.loads(json.dumps(await function()))
            self.last_step = name
        return self.steps[name]


@attrs.define(eq=False)
class FakeRequest(Generic[S]):
    """A request for one run of one key, with every field settable."""

    spec: S
    base: Path
    state: Path
    key: str = "site/x"
    name: str = "x"
    namespace: str | None = None
    labels: dict[str, str] = attrs.field(factory=dict)
    annotations: dict[str, str] = attrs.field(factory=dict)
    raw_spec: dict[str, Any] = attrs.field(factory=dict)
    fingerprint: str = "new"
    applied: str | None = None
    causes: tuple[str, ...] = ()
    failures: int = 0
    stopping: bool = False
    critical_limit: float = 300.0
    log: FakeLog = attrs.field(factory=FakeLog)
    operations: list[FakeOperation] = attrs.field(factory=list)
    # An interrupted operation, which the next call of operation() enters.
    interrupted: FakeOperation | None = None

    @property
    def output(self) -> Path:
        return self.state / "output" / self.key

    @property
    def memory(self) -> Path:
        return self.state / "memory" / self.key

    @asynccontextmanager
    async def operation(self, name: str) -> AsyncIterator[FakeOperation]:
        operation = self.interrupted
        if operation is None:
            number = f"op-{len(self.operations) + 1}"
            directory = self.state / "operations" / number
            operation = FakeOperation(name, directory, id=number)
        self.interrupted = None
        assert operation.name == name
        self.operations.append(operation)
        try:
            yield operation
        except trio.Cancelled:
            operation.ended = "interrupted"
            raise
        except Exception:
            operation.ended = "failed"
            raise
        operation.ended = "done"

    @asynccontextmanager
    async def cleanup(self) -> AsyncIterator[None]:
        scope = trio.CancelScope(deadline=trio.current_time() + 5, shield=True)
        with scope:
            yield
