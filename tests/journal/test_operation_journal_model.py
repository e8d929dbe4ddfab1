"""Durable operations compared with a plain model, with a crash at any moment.

A crash is a copy of the files, truncated anywhere in what the last write added to the log. The copy
is opened instead of the store.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from images import HERE, LOG

from reconciled.core.errors import OnceStepStarted, OperationAlreadyOpen
from reconciled.core.resources import Fingerprint, Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import AppliedSpec, Ending, Hold, Resolution, StepState
from reconciled.journal.sqlite import wal
from reconciled.journal.sqlite.store import Store

MEMORY = Path("/dev/shm")
KEYS = [Key(f"a/{name}") for name in "xyz"]
KINDS = ["pure", "idempotent", "once"]


@attrs.define
class Step:
    """A step in the model; written: it is on the disk in this state."""

    kind: str
    done: bool
    data: Any = None


@attrs.define
class Model:
    """One open operation: its state in memory, and the least of it that is on the disk."""

    id: str
    key: Key
    attempt: int = 1
    recoveries: int = 0
    held: bool = False
    steps: dict[str, Step] = attrs.field(factory=dict)
    pending: set[str] = attrs.field(factory=set)
    unwritten: set[str] = attrs.field(factory=set)  # started, and never on the disk

    def flushed(self) -> None:
        """A write included all pending changes."""
        self.pending.clear()


class Journal(RuleBasedStateMachine):
    """The rules are the calls of the interface; after each one everything is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.place = Path(
            tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None, prefix="journal-")
        )
        self.number = 0
        self.open_models: dict[str, Model] = {}
        self.over: dict[str, Ending] = {}
        self.owned: dict[Key, str] = {}
        self.undo: tuple[dict[str, Model], dict[str, Ending], dict[Key, str]] | None = None

    @initialize()
    def start(self) -> None:
        """Open the first store."""
        self.state = self.place / "0"
        self.state.mkdir()
        self._open()

    def teardown(self) -> None:
        """Remove the store."""
        self.store.close()
        shutil.rmtree(self.place)

    def _open(self) -> None:
        self.store = Store.open(self.state)
        assert not self.store.integrity.damage, self.store.integrity
        self.operations = OperationJournal.load(self.store, identity=HERE)

    def _run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """One call, with the writer running until it returns."""
        before = self.store.commits
        self.log_before = self._log()
        self.undo = (
            {name: _copy(model) for name, model in self.open_models.items()},
            dict(self.over),
            dict(self.owned),
        )

        async def main() -> Any:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                try:
                    return await call(*arguments, **named)  # noqa: ASYNC121 - the writer is cancelled below
                finally:
                    nursery.cancel_scope.cancel(reason="done")

        try:
            return trio.run(main)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # noqa: ASYNC123 - the rule's own error
        finally:
            self.commits = self.store.commits - before
            if not self.commits:
                self.undo = None

    async def _write(self) -> None:
        """The loop of the writer, without the end that closes the store."""
        writer = self.store.writer
        while True:
            await writer._arrival.wait()
            await writer._commit_batch()

    def _log(self) -> bytes:
        log = self.state / "store" / LOG
        return log.read_bytes() if log.exists() else b""

    def _pick(self, data: st.DataObject) -> Model:
        return self.open_models[data.draw(st.sampled_from(sorted(self.open_models)))]

    @rule(key=st.sampled_from(KEYS), own=st.booleans())
    def begin(self, key: Key, *, own: bool) -> None:
        """Open an operation, unless the key has one."""
        print_ = Fingerprint(f"{len(self.over)}{len(self.open_models)}{self.number}")
        owned = AppliedSpec("File", {"a": 1}, print_, "/") if own else None
        taken = any(model.key == key for model in self.open_models.values())
        try:
            record = self._run(self.operations.begin, key, "apply", {"k": key}, applied_spec=owned)
        except OperationAlreadyOpen:
            assert taken
            return
        assert not taken
        assert self.commits == 1
        self.open_models[record.id] = Model(record.id, key)
        if own:
            self.owned[key] = print_
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data(), name=st.sampled_from("abc"), kind=st.sampled_from(KINDS))
    def started(self, data: st.DataObject, name: str, kind: str) -> None:
        """A step starts; pending changes become durable."""
        model = self._pick(data)
        if name in model.steps:
            return
        flushes = bool(model.pending) or kind == "once"
        self._run(self.operations.record_step_started, model.id, name, kind)
        assert self.commits == flushes
        model.steps[name] = Step(kind, done=False)
        if flushes:
            model.flushed()
        else:
            model.unwritten.add(name)
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data(), value=st.none() | st.integers() | st.lists(st.text(max_size=3)))
    def done(self, data: st.DataObject, value: Any) -> None:
        """A started step is done; durable at once only if it is a ONCE step."""
        model = self._pick(data)
        started = sorted(name for name, step in model.steps.items() if not step.done)
        if not started:
            return
        name = data.draw(st.sampled_from(started))
        step = model.steps[name]
        self._run(self.operations.record_step_done, model.id, name, step.kind, value)
        assert self.commits == (step.kind == "once")
        step.done, step.data = True, value
        model.unwritten.discard(name)
        if step.kind == "once":
            model.flushed()
        else:
            model.pending.add(name)
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data(), ending=st.sampled_from([Ending.DONE, Ending.FAILED, Ending.ABANDONED]))
    def end(self, data: st.DataObject, ending: Ending) -> None:
        """An operation ends, in one commit."""
        model = self._pick(data)
        self._run(self.operations.end, model.id, ending)
        assert self.commits == 1
        del self.open_models[model.id]
        self.over[model.id] = ending
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data())
    def count(self, data: st.DataObject) -> None:
        """A recovery is counted."""
        model = self._pick(data)
        self._run(self.operations.count_recovery, model.id)
        assert self.commits == 1
        model.attempt += 1
        model.recoveries += 1
        model.flushed()
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data(), hold=st.booleans())
    def hold(self, data: st.DataObject, *, hold: bool) -> None:
        """A hold is set or lifted."""
        model = self._pick(data)
        if hold:
            self._run(self.operations.hold, model.id, Hold("why", "code", "seen", 1.0))
        else:
            self._run(self.operations.unhold, model.id)
            model.recoveries = 0
        assert self.commits == 1
        model.held = hold
        model.flushed()
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """All steps are deleted, unless one is a ONCE step."""
        model = self._pick(data)
        try:
            self._run(self.operations.reset_steps, model.id)
        except OnceStepStarted:
            assert any(step.kind == "once" for step in model.steps.values())
            return
        assert not any(step.kind == "once" for step in model.steps.values())
        model.steps.clear()
        model.pending.clear()
        model.unwritten.clear()
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data(), decision=st.sampled_from(Resolution))
    def resolve(self, data: st.DataObject, decision: Resolution) -> None:
        """A person decides."""
        model = self._pick(data)
        self._run(self.operations.resolve, model.id, decision, "root", "why")
        assert self.commits == 1
        ending = {Resolution.COMPLETE: Ending.COMPLETED, Resolution.ABANDON: Ending.ABANDONED}
        if decision in ending:
            del self.open_models[model.id]
            self.over[model.id] = ending[decision]
        else:
            model.held, model.recoveries = False, 0
            model.flushed()
        self.compare()

    @precondition(lambda self: self.open_models)
    @rule(data=st.data())
    def undo_it(self, data: st.DataObject) -> None:
        """A compensation replaces an operation."""
        model = self._pick(data)
        record = self._run(self.operations.begin, model.key, "undo", {}, undoes=model.id)
        assert self.commits == 1
        del self.open_models[model.id]
        self.over[model.id] = Ending.ROLLED_BACK
        self.open_models[record.id] = Model(record.id, model.key)
        self.compare()

    @rule()
    def close(self) -> None:
        """A clean end loses pending changes of steps, and nothing else."""
        self.store.close()
        self._open()
        assert not self.store.integrity.warning
        self.undo = None
        self._forget_unwritten()
        self.compare()

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """A kill between two calls, or during the write of the last one."""
        log = self._log()
        cut = len(log)
        if self.undo is not None and log[:32] == self.log_before[:32]:
            begun = wal.scan(self.log_before).end
            end = wal.scan(log).end
            if begun < end == len(log):
                cut = data.draw(st.integers(begun, end), label="cut")
        if cut < len(log):
            self.open_models, self.over, self.owned = self.undo or ({}, {}, {})
        self.number += 1
        before, self.state = self.state, self.place / str(self.number)
        self.state.mkdir()
        shutil.copytree(before / "store", self.state / "store")
        with (self.state / "store" / LOG).open("r+b") as stream:
            stream.truncate(cut)
        self.store.close()
        self._open()
        self.undo = None
        self._forget_unwritten()
        self.compare()

    def _forget_unwritten(self) -> None:
        """Drop what was never on the disk: pending steps, and started ones that may be repeated."""
        for model in self.open_models.values():
            on_disk = self.operations.find(model.id)
            assert on_disk is not None
            for name in model.pending | model.unwritten:
                kept = on_disk.step(name)
                assert kept is None or kept.kind != "once"
                if kept is None:
                    del model.steps[name]
                else:  # its start was included in another write
                    assert kept.state is StepState.STARTED
                    model.steps[name] = Step(kept.kind, done=False)
            model.pending.clear()
            model.unwritten.clear()

    def compare(self) -> None:
        """Memory equals the model; so does the disk, except for pending changes."""
        assert {record.id for record in self.operations.list_open()} == set(self.open_models)
        on_disk = {record.id: record for record in self.store.open_operations()}
        assert set(on_disk) == set(self.open_models)
        for model in self.open_models.values():
            record = self.operations.find(model.id)
            assert record is not None
            assert self.operations.find_by_key(model.key) == record
            for found in (record, on_disk[model.id]):
                assert (found.attempt, found.recoveries) == (model.attempt, model.recoveries)
                assert (found.hold is not None) == model.held
            assert {
                step.name: Step(step.kind, step.state is StepState.DONE, step.data)
                for step in record.steps
            } == model.steps
            for name, step in model.steps.items():
                kept = on_disk[model.id].step(name)
                if name not in model.pending | model.unwritten:
                    assert kept is not None
                    assert (kept.state is StepState.DONE, kept.data) == (step.done, step.data)
        found_past = self._past()
        assert found_past == self.over
        assert {key: self.store.incomplete_fingerprint(key) for key in self.owned} == self.owned

    def _past(self) -> dict[str, Ending]:
        from reconciled.journal.sqlite.rows import read_past

        past = read_past(self.store.writer.connection, 10_000)
        assert not past.damaged
        return {record.id: record.ending or Ending.DONE for record in past.records}


def _copy(model: Model) -> Model:
    return attrs.evolve(
        model,
        steps={name: attrs.evolve(step) for name, step in model.steps.items()},
        pending=set(model.pending),
        unwritten=set(model.unwritten),
    )


TestJournal = Journal.TestCase
TestJournal.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
