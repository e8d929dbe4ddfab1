"""Programs that outlived their daemon: their key waits, nobody else does, and a stop knows them."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import OneController, key, thing
from restarts import (
    RecoveringReconciler,
    check_consistent,
    ending_of,
    leave_open_operation,
    operation_act,
    run_restarted,
)
from trio.testing import MockClock

from reconciled.core.errors import RecordDamaged
from reconciled.core.queue.entry import Priority
from reconciled.journal.operation_record import Ending
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import Assignment, ChildRecord, Identity, boot_id
from reconciled.runtime.runs import adoption
from reconciled.runtime.runs.adoption import enqueue_open_operations


@attrs.define(eq=False)
class Program:
    """A survivor as the test wants it; what is done to it is kept."""

    left: float = 0.0  # of its budget
    lives: bool = True
    dies: bool = True  # when it is ended
    broken: Exception | None = None  # what its end raises when it is read
    lost: Exception | None = None  # what looking for it raises
    ended: trio.Event = attrs.field(factory=trio.Event)
    ended_by_us: list[float] = attrs.field(factory=list)
    closed: int = 0

    @property
    def assignment(self) -> Assignment:
        return Assignment(boot_id(), 1, "apply", self.left > 0, None)

    @property
    def record(self) -> ChildRecord:
        return ChildRecord(self.assignment, Identity(4, 2), Identity(3, 1))

    @property
    def alive(self) -> bool:
        return self.lives

    def remaining(self) -> float:
        return self.left

    async def wait(self) -> None:
        await self.ended.wait()
        if self.broken is not None:
            raise self.broken

    async def terminate(self, term: float) -> None:
        self.ended_by_us.append(trio.current_time())
        await trio.sleep(term / 2)
        if self.dies:
            self.end()

    def end(self) -> None:
        """It ends by itself."""
        self.lives = False
        self.ended.set()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Program]:
    """Survivors by the id of their operation, in place of those of the kernel."""
    found: dict[str, Program] = {}

    def find(directory: Path) -> Program | None:
        program = found.get(directory.name)
        if program is not None and program.lost is not None:
            raise program.lost
        return program

    monkeypatch.setattr(adoption, "find_survivor", find)
    return found


async def test_its_key_waits_and_others_do_not(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A key whose program lives is not run, for whatever cause; its end queues the key."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    program = programs[identity] = Program(left=3600.0)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a", 2), thing("b"))
        for priority in Priority:
            runtime.enqueue("a", priority=priority)
            await runtime.wait_all_blocked()
        await trio.sleep(600)
        assert script.calls_for("a") == []
        assert script.calls_for("b") == ["reconcile"]
        assert key("a") in runtime.context.adoptions
        record = runtime.context.operations.journal.find_by_key(key("a"))
        assert record is not None
        # Waiting counts nothing.
        assert (record.attempt, record.recoveries) == (1, 0)
        program.end()
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile", "reconcile"]
        assert [request.spec.value for request in script.requests if request.name == "a"] == [1, 2]
        assert program.ended_by_us == []
        assert program.closed == 1
        assert key("a") not in runtime.context.adoptions
        check_consistent(runtime)


async def test_it_holds_no_slot(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """With as many programs as slots, other keys run all the same."""
    script = RecoveringReconciler()
    for name in ("a", "c"):
        programs[await leave_open_operation(tmp_path, name=name)] = Program(left=3600.0)
    async with run_restarted(tmp_path, script, concurrency=1) as runtime:
        runtime.declare(thing("a"), thing("b"), thing("c"), thing("d"))
        await runtime.wait_all_blocked()
        assert sorted(script.ran) == ["b", "d"]
        assert runtime.context.queue.running == 0


async def test_an_ordinary_one_is_ended_at_once(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A program that was not critical is ended at once; then its key is recovered."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    program = programs[identity] = Program()
    async with run_restarted(tmp_path, script) as runtime:
        began = trio.current_time()
        await runtime.wait_all_blocked()
        assert program.ended_by_us == [began]
        assert script.calls == []
        await trio.sleep(5)
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]
        assert await ending_of(runtime, identity) is Ending.COMPLETED


async def test_its_budget_is_what_was_left(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A critical one has what is left of its own budget, and is ended then; that is told."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=20.0)
    async with run_restarted(tmp_path, script) as runtime:
        began = trio.current_time()
        await trio.sleep(19.9)
        assert program.ended_by_us == []
        await trio.sleep(5)
        assert program.ended_by_us == [began + 20.0]
        (line,) = runtime.log_lines("program.overran")
        assert "its own budget" in line["reason"]
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]


async def test_a_stop_counts_it_as_critical(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A stop waits for it as for critical work, and is over when it is."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=50.0)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        await runtime.signal()
        await trio.sleep(30)
        (work,) = runtime.context.stop.all_works()
        assert work.key == key("a")
        assert [section.name for section in work.sections] == ["apply"]
        program.end()
        await runtime.wait_all_blocked()
        assert list(runtime.context.stop.all_works()) == []
        assert program.ended_by_us == []
        # Its outcome is the next start's: none runs after the instant (invariant 2).
        assert script.calls == []
        assert program.closed == 1


async def test_a_stop_cuts_what_outlasts_it(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """In a stop it has what is left of its budget, and no more than stop.critical; then it ends."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=3600.0)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        began = trio.current_time()
        await runtime.signal()
        await trio.sleep(200)
        (ended,) = program.ended_by_us
        limits = runtime.context.stop.limits
        assert ended - began <= limits.drain + limits.critical
        assert list(runtime.context.stop.all_works()) == []
        assert runtime.stragglers == []


async def test_it_is_adopted_once(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """Asked again, as a reload does, the same program has one who waits for it."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=100.0)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        enqueue_open_operations(runtime.controller, trio.current_time())
        await runtime.wait_all_blocked()
        assert len(list(runtime.context.stop.all_works())) == 1
        assert len(runtime.log_lines("program.adopted")) == 1
        program.end()
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]


async def test_the_dead_are_not_waited_for(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A program that is gone delays nothing, and its descriptors are let go."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=100.0, lives=False)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]
        assert program.closed == 1
        assert runtime.log_lines("program.adopted") == []


async def test_nothing_races_what_does_not_die(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A program that cannot be ended keeps its key from being recovered, and is named."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(dies=False)
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await trio.sleep(600)
        assert script.calls_for("a") == []
        assert script.calls_for("b") == ["reconcile"]
        (line,) = runtime.log_lines("program.stuck")
        assert (line["key"], line["pid"]) == (key("a"), 4)
        program.end()
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile", "reconcile"]


@pytest.mark.parametrize("error", [RecordDamaged("it is no record"), OSError(5, "I/O")])
@pytest.mark.parametrize("when", ["found", "ended"])
async def test_a_damaged_record_harms_its_key_alone(
    tmp_path: Path,
    autojump_clock: MockClock,
    programs: dict[str, Program],
    error: Exception,
    when: str,
) -> None:
    """Records that cannot be read are named; the daemon and other keys go on (invariant 12)."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=100.0)
    program.lost = error if when == "found" else None
    program.broken = error
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        program.end()
        await runtime.wait_all_blocked()
        (line,) = runtime.log_lines("program.unreadable")
        assert str(error) in line["reason"]
        assert program.closed == (when == "ended")
        assert runtime.context.stop.stage.name == "RUNNING"
        assert script.calls_for("b") == ["reconcile"]
        assert key("a") not in runtime.context.adoptions


# -- with records on the disk, and a real program -----------------------------


def record(tmp_path: Path, identity: str, program: Identity, **fields: Any) -> Path:
    """Record *program* as that of the operation, as its small parent does."""
    directory = tmp_path / "state" / "operations" / identity
    directory.mkdir(parents=True)
    assignment = Assignment(boot_id(), 1, "apply", critical=False, deadline=None)
    data = attrs.asdict(attrs.evolve(assignment, **fields))
    data |= {"program": attrs.asdict(program), "parent": attrs.asdict(Identity(program.pid, 1))}
    (directory / "child").write_text(json.dumps(data))
    return directory


def held(runtime: OneController) -> str:
    """Why the key is held."""
    open_ = runtime.context.operations.journal.find_by_key(key("a"))
    assert open_ is not None
    assert open_.hold is not None
    return open_.hold.reason


@pytest.mark.parametrize("file", ["child", "end"])
async def test_damage_on_the_disk_holds_the_key(
    tmp_path: Path, autojump_clock: MockClock, file: str
) -> None:
    """From a record that cannot be read nothing is concluded: held; the start goes on."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    directory = record(tmp_path, identity, Identity(2**22 + 1, 7))
    (directory / file).write_text("{")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert "how its program ended cannot be told" in held(runtime)
        assert script.calls_for("a") == []
        assert script.calls_for("b") == ["reconcile"]
        check_consistent(runtime)


async def test_recover_is_shown_how_it_ended(tmp_path: Path, autojump_clock: MockClock) -> None:
    """What the small parent has recorded of a program's end is shown to recover()."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    directory = record(tmp_path, identity, Identity(2**22 + 1, 7))
    data = json.loads((directory / "child").read_text())
    del data["parent"]
    (directory / "end").write_text(json.dumps(data | {"code": 6, "signal": None, "at": 1.0}))
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        (view,) = script.interrupted
        assert (view.ended.action, view.ended.code, view.ended.signal) == ("apply", 6, None)
        assert await ending_of(runtime, identity) is Ending.COMPLETED


async def test_another_boot_has_no_survivors(tmp_path: Path, autojump_clock: MockClock) -> None:
    """After a reboot there is nobody to wait for, whoever has the number now."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    mine = find_process(os.getpid())
    assert mine is not None
    record(tmp_path, identity, Identity(mine.pid, mine.started), boot_id="another")
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]
        assert runtime.log_lines("program.adopted") == []


async def test_the_attempt_is_fenced_before_any_code(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Programs of older attempts are refused their steps before code of the next one runs."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    directory = record(tmp_path, identity, Identity(2**22 + 1, 7))
    fenced: list[str] = []
    script.on_call = lambda _, __: fenced.append((directory / "attempt").read_text().strip())
    script.acts["a"] = operation_act("one")
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert fenced == ["2", "2", "2"]
        assert (directory / "attempt").read_text().strip() == "closed"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A program in a group of its own."""
    with subprocess.Popen(["sleep", "1000"], process_group=0) as process:
        yield process
        process.kill()


@pytest.mark.processes
async def test_a_real_one_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """An ordinary program that lives is found by its record and ended; its key is recovered."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    found = find_process(sleeper.pid)
    assert found is not None
    record(tmp_path, identity, Identity(found.pid, found.started))
    recovered = trio.Event()
    script.on_call = lambda what, _: recovered.set() if what == "reconcile" else None
    async with run_restarted(tmp_path, script) as runtime:
        with trio.fail_after(20):
            await recovered.wait()
        assert sleeper.wait() == -signal.SIGTERM
        assert runtime.log_lines("program.adopted")[0]["pid"] == sleeper.pid
