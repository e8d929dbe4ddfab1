"""Adoption of programs that outlived their daemon: their keys wait, and a stop counts them."""

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
from reconciled.core.queue.states import Priority
from reconciled.journal.operation_record import Ending
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import (
    Assignment,
    ChildRecord,
    EndRecord,
    Identity,
    boot_id,
)
from reconciled.runtime.runs import program_adoption
from reconciled.runtime.runs.program_adoption import enqueue_open_operations


@attrs.define(eq=False)
class Program:
    """A scripted survivor; records the calls made on it."""

    left: float = 0.0  # of its budget
    lives: bool = True
    owned: bool = True
    dies: bool = True  # when it is ended
    broken: Exception | None = None  # what reading its exit record raises
    lost: Exception | None = None  # what finding it raises
    code: int | None = None  # its exit code, as its small parent records it
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

    async def wait(self) -> EndRecord | None:
        await self.ended.wait()
        if self.broken is not None:
            raise self.broken
        if self.code is None:
            return None
        return EndRecord(self.assignment, self.record.program, self.code, None, 1.0)

    async def terminate(self, term: float) -> None:
        self.ended_by_us.append(trio.current_time())
        await trio.sleep(term / 2)
        if self.dies:
            self.end()

    def end(self) -> None:
        """The program exits."""
        self.lives = False
        self.ended.set()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Program]:
    """Scripted survivors by the id of their operation, in place of real ones."""
    found: dict[str, Program] = {}

    def find(directory: Path) -> Program | None:
        program = found.get(directory.name)
        if program is not None and program.lost is not None:
            raise program.lost
        return program

    monkeypatch.setattr(program_adoption, "find_survivor", find)
    return found


async def test_the_key_of_an_adopted_program_waits_and_others_run(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A key does not run while its program is alive, whatever the cause; its end queues the key."""
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
        assert key("a") in runtime.context.adopting
        record = runtime.context.operations.journal.find_by_key(key("a"))
        assert record is not None
        # Waiting for a program does not count as a recovery.
        assert (record.attempt, record.recoveries) == (1, 0)
        program.end()
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile", "reconcile"]
        assert [request.spec.value for request in script.requests if request.name == "a"] == [1, 2]
        assert program.ended_by_us == []
        assert program.closed == 1
        assert key("a") not in runtime.context.adopting
        check_consistent(runtime)


async def test_an_adopted_program_holds_no_slot(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """An adopted program holds no concurrency slot: other keys run."""
    script = RecoveringReconciler()
    for name in ("a", "c"):
        programs[await leave_open_operation(tmp_path, name=name)] = Program(left=3600.0)
    async with run_restarted(tmp_path, script, concurrency=1) as runtime:
        runtime.declare(thing("a"), thing("b"), thing("c"), thing("d"))
        await runtime.wait_all_blocked()
        assert sorted(script.ran) == ["b", "d"]
        assert runtime.context.queue.running == 0


async def test_a_program_that_is_not_critical_is_ended_at_once(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A program that is not critical is ended at once; then its key is recovered."""
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


async def test_an_adopted_program_has_the_rest_of_its_budget(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A critical program is ended when the rest of its budget is used up, and this is logged."""
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


async def test_a_stop_counts_an_adopted_program_as_critical(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A stop waits for an adopted program as for critical work, and ends with it."""
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
        # The next start recovers it: nothing starts after the instant of a stop (invariant 2).
        assert script.calls == []
        assert program.closed == 1


async def test_a_stop_cuts_an_adopted_program(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """In a stop an adopted program has the rest of its budget, at most stop.critical."""
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


async def test_a_program_is_adopted_once(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A second adopt(), as at a reload, starts no second wait for the same program."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=100.0)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        runtime.adoption.adopt_survivors()
        enqueue_open_operations(runtime.controller, trio.current_time())
        await runtime.wait_all_blocked()
        assert len(list(runtime.context.stop.all_works())) == 1
        assert len(runtime.log_lines("program.adopted")) == 1
        program.end()
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]


async def test_a_dead_program_is_not_waited_for(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A program that has ended delays nothing, and its descriptors are closed."""
    script = RecoveringReconciler()
    program = programs[await leave_open_operation(tmp_path)] = Program(left=100.0, lives=False)
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        assert script.calls_for("a") == ["observe", "recover", "reconcile"]
        assert program.closed == 1
        assert runtime.log_lines("program.adopted") == []


async def test_an_unkillable_program_blocks_recovery(
    tmp_path: Path, autojump_clock: MockClock, programs: dict[str, Program]
) -> None:
    """A key is not recovered while its program cannot be killed, and the program is logged."""
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


@pytest.mark.parametrize("error", [RecordDamaged("not a valid record"), OSError(5, "I/O")])
@pytest.mark.parametrize("when", ["found", "ended"])
async def test_a_damaged_record_affects_its_key_alone(
    tmp_path: Path,
    autojump_clock: MockClock,
    programs: dict[str, Program],
    error: Exception,
    when: str,
) -> None:
    """Unreadable records are logged; the daemon and other keys go on (invariant 12)."""
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
        assert key("a") not in runtime.context.adopting


@pytest.mark.parametrize(("code", "count"), [(0, 1), (7, 1), (None, 3)])
async def test_an_attempt_whose_program_was_adopted_was_not_interrupted(
    tmp_path: Path,
    autojump_clock: MockClock,
    programs: dict[str, Program],
    code: int | None,
    count: int,
) -> None:
    """The attempt does not count if its program ended by itself, and counts if it was killed."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path, recoveries=2)
    program = programs[identity] = Program(left=100.0, code=code)

    async def hang(_: Any) -> None:
        await trio.sleep_forever()

    script.acts["a"] = hang
    async with run_restarted(tmp_path, script) as runtime:
        await runtime.wait_all_blocked()
        program.end()
        await runtime.wait_all_blocked()
        record = runtime.context.operations.journal.find(identity)
        assert record is not None
        assert record.recoveries == count


# -- with records on the disk, and a real program -----------------------------


def record(tmp_path: Path, identity: str, program: Identity, **fields: Any) -> Path:
    """Write the record of *program* as the operation's small parent does."""
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
    """An operation whose program record cannot be read is held; the start goes on."""
    script = RecoveringReconciler()
    identity = await leave_open_operation(tmp_path)
    directory = record(tmp_path, identity, Identity(2**22 + 1, 7))
    (directory / file).write_text("{")
    async with run_restarted(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert "cannot read the program's exit record" in held(runtime)
        assert script.calls_for("a") == []
        assert script.calls_for("b") == ["reconcile"]
        check_consistent(runtime)


async def test_recover_gets_the_program_end(tmp_path: Path, autojump_clock: MockClock) -> None:
    """recover() gets the end of the program as the small parent has recorded it."""
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


async def test_no_program_is_adopted_after_a_reboot(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """After a reboot no program is adopted, even if its pid is in use."""
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
    """Programs of older attempts cannot record steps once code of the next attempt runs."""
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
    """A program in its own process group."""
    with subprocess.Popen(["sleep", "1000"], process_group=0) as process:
        yield process
        process.kill()


@pytest.mark.processes
async def test_a_real_program_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """A live program that is not critical is found by its record and ended; its key recovers."""
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
