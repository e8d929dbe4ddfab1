"""Earlier runs of a daemon, and a reconciler that decides about the operations they left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import trio
from one_controller import (
    Act,
    OneController,
    RemovingReconciler,
    Thing,
    key,
    run_one_controller,
    thing,
)

from reconciled.api import Decision, Observation, Observed, Request, Step, StepKind, done
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending, Hold, OperationRecord, StepState
from reconciled.journal.sqlite.store import Store
from reconciled.runtime.operations.pinned import pin
from reconciled.runtime.runs.program_adoption import enqueue_open_operations

Asked = tuple[str, str]

AS_DESIRED = Observation(Observed.AS_DESIRED, "it is there")
DIFFERENT = Observation(Observed.DIFFERENT, "it is not")
UNKNOWN = Observation(Observed.UNKNOWN, "no route")
STEPS = [
    ("look", "pure", True, None),
    ("one", "idempotent", True, 1),
    ("pay", "once", True, 2),
    ("two", "idempotent", False, None),
]


class RecoveringReconciler(RemovingReconciler):
    """A script that can observe and recover; calls has its calls, in order."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.calls: list[Asked] = []
        self.interrupted: list[Any] = []
        self.observations: list[Any] = []  # answers of observe(), or exceptions; the last one stays
        self.decision: Any = None
        self.on_call: Callable[[str, str], None] = lambda _, __: None

    def record_call(self, what: str, name: str) -> None:
        self.calls.append((what, name))
        self.on_call(what, name)

    async def observe(self, request: Request[Thing]) -> Observation | None:
        self.record_call("observe", request.name)
        await trio.lowlevel.checkpoint()
        if not self.observations:
            return None
        answer = self.observations.pop(0) if len(self.observations) > 1 else self.observations[0]
        if isinstance(answer, BaseException):
            raise answer
        seen: Observation | None = answer
        return seen

    def recover(self, interrupted: Any, _: Observation | None) -> Decision | None:
        self.record_call("recover", interrupted.key.partition("/")[2])
        self.interrupted.append(interrupted)
        if isinstance(self.decision, BaseException):
            raise self.decision
        word: Decision | None = self.decision
        return word

    async def reconcile(self, request: Request[Thing]) -> Any:
        self.record_call("reconcile", request.name)
        return await super().reconcile(request)

    async def remove(self, request: Request[Thing]) -> Any:
        self.record_call("remove", request.name)
        return await super().remove(request)

    def calls_for(self, name: str) -> list[str]:
        """Its calls for *name*, in order."""
        return [what for what, whose in self.calls if whose == name]


class UndoingReconciler(RecoveringReconciler):
    """A reconciler that can undo steps."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.undone: list[Step] = []
        self.undo_act: Act | None = None

    async def undo(self, request: Request[Thing], step: Step) -> None:
        self.record_call("undo", request.name)
        self.undone.append(step)
        if self.undo_act is not None:
            await self.undo_act(step)


@attrs.frozen
class OpenOperation:
    """An operation as a killed daemon leaves it. steps: (name, kind, done, data)."""

    name: str = "a"
    value: int = 1
    operation: str = "apply"
    steps: Iterable[tuple[str, str, bool, Any]] = ()
    removal: bool = False
    recoveries: int = 0
    hold: Hold | None = None
    machine: HostIdentity | None = None
    kind: str = "Thing"
    undoable: bool = False


def open_store(tmp_path: Path) -> Store:
    """The store of a daemon with its state in *tmp_path*."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    return Store.open(state)


async def in_earlier_run(
    tmp_path: Path,
    act: Callable[[Store, OperationJournal], Awaitable[Any]],
    machine: HostIdentity | None = None,
) -> Any:
    """The result of *act*, carried out by an earlier run of the daemon, on *machine*."""
    store = open_store(tmp_path)
    operations = OperationJournal.load(store, identity=machine)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        given = await act(store, operations)
        nursery.cancel_scope.cancel(reason="the earlier run has ended")
    return given


async def leave_open_operation(tmp_path: Path, **fields: Any) -> str:
    """Leave an open operation with these fields; its id."""
    left = OpenOperation(**fields)

    async def act(__: Store, operations: OperationJournal) -> str:
        pinned = pin(thing(left.name, left.value), removal=left.removal)
        record = await operations.begin(
            key(left.name), left.operation, pinned | {"kind": left.kind}
        )
        for step, kind, is_done, data in left.steps:
            await operations.record_step_started(record.id, step, kind, undoable=left.undoable)
            if is_done:
                await operations.record_step_done(record.id, step, kind, data)
        await operations.flush(record.id)
        for _ in range(left.recoveries):
            await operations.count_recovery(record.id)
        if left.hold is not None:
            await operations.hold(record.id, left.hold)
        return record.id

    identity: str = await in_earlier_run(tmp_path, act, left.machine)
    return identity


@asynccontextmanager
async def run_restarted(
    tmp_path: Path,
    script: RecoveringReconciler,
    *,
    policy: Literal["roll-forward", "roll-back", "hold"] = "roll-forward",
    cap: int = 3,
    **options: Any,
) -> AsyncIterator[OneController]:
    """A controller that has queued what earlier runs left, before any source has reported."""
    async with run_one_controller(tmp_path, script, **options) as runtime:
        runtime.controller.config = attrs.evolve(
            runtime.controller.config, interrupted=policy, max_recoveries=cap
        )
        runtime.adoption.adopt_survivors()
        enqueue_open_operations(runtime.controller, trio.current_time())
        yield runtime


def operation_act(
    *steps: str, name: str = "apply", seen: list[Any] | None = None, **fails: BaseException
) -> Act:
    """An act that opens *name* and does *steps* (``name`` or ``name:kind``), each as its data.

    A step named in *fails* raises that instead. seen collects (id, attempt, spec) and the data.
    """

    async def act(request: Any) -> Any:
        async with request.operation(name) as operation:
            if seen is not None:
                seen.append((operation.id, operation.attempt, request.spec.value))
            for each in steps:
                step, _, kind = each.partition(":")

                async def function(step: str = step) -> str:
                    await trio.lowlevel.checkpoint()
                    if step in fails:
                        raise fails[step]
                    return f"new {step}"

                data = await operation.step(step, function, kind=StepKind(kind or "idempotent"))
                if seen is not None:
                    seen.append(data)
        return done()

    return act


async def closed_operation(runtime: OneController, operation: str) -> OperationRecord | None:
    """The record of *operation*, if it has ended."""
    past = await runtime.context.operations.journal.past_operations(1, operation)
    return past.records[0] if past.records else None


async def ending_of(runtime: OneController, operation: str) -> Ending | None:
    """How it ended; None: it is open or unknown."""
    record = await closed_operation(runtime, operation)
    return None if record is None else record.ending


def check_consistent(runtime: OneController) -> None:
    """The mirror and the disk agree on what is open, and each key has its one operation."""
    log = runtime.context.operations.journal
    assert log.pending == ()
    open_ = {record.key: record for record in log.list_open()}
    assert log._mirror._by_key.keys() == open_.keys()
    on_disk = {record.key: record for record in runtime.context.store.open_operations()}
    assert on_disk.keys() == open_.keys()
    for each, record in open_.items():
        # A step that was started and may be run again need not be on the disk.
        steps = on_disk[each].steps
        assert steps == tuple(step for step in record.steps if step in steps)
        assert all(step in steps for step in record.steps if step.state is StepState.DONE)
        assert attrs.evolve(on_disk[each], steps=record.steps) == record
    for each, record in open_.items():
        assert log.find_by_key(each) == record


def open_record(runtime: OneController, name: str = "a") -> OperationRecord:
    record = runtime.context.operations.journal.find_by_key(key(name))
    assert record is not None
    return record


def hold_of(runtime: OneController, name: str = "a") -> Hold:
    """How the key is held: in the journal, in the queue and in the log."""
    check_consistent(runtime)
    hold = open_record(runtime, name).hold
    assert hold is not None
    assert runtime.queue_state(name) == "terminal"
    return hold


async def record_earlier_apply(tmp_path: Path, name: str = "a", value: int = 1) -> None:
    """Record *name* as applied by an earlier run."""

    async def act(store: Store, _: OperationJournal) -> None:
        manifest = thing(name, value)
        await store.record_applied(
            key(name), "Thing", manifest.spec, manifest.fingerprint, base="/m", complete=True
        )

    await in_earlier_run(tmp_path, act)


def set_read_only(runtime: OneController, *, on: bool) -> None:
    """Make SQLite refuse writes to the store, or accept them again."""
    runtime.context.store.writer.connection.execute(
        f"PRAGMA query_only={'ON' if on else 'OFF'}"
    ).close()
