"""Which files of ended operations are kept, and which are removed."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from one_controller import OneController, ScriptedReconciler, key, run_one_controller
from trio.testing import MockClock

from reconciled.journal.operation_record import Ending, Hold
from reconciled.programs.attempt_fence import fence
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import boot_id
from reconciled.runtime.daemon import operation_retention
from reconciled.runtime.daemon.operation_retention import (
    AGE,
    MAX_KEPT,
    MIN_KEPT,
    OperationFiles,
    OperationRetention,
    superfluous,
)

OLD = AGE + 60.0


def files(count: int, age: float) -> list[OperationFiles]:
    return [OperationFiles(f"{number:026}", age) for number in range(count)]


def test_the_newest_are_kept_at_any_age() -> None:
    """Of old directories the newest MIN_KEPT are kept; the others are removed, the oldest first."""
    old = files(MIN_KEPT + 3, OLD)
    assert superfluous(old[::-1]) == old[:3]
    assert superfluous(old[:MIN_KEPT]) == []


def test_young_directories_are_kept_up_to_a_limit() -> None:
    """Directories younger than AGE are kept, but never more than MAX_KEPT of them."""
    assert superfluous(files(MAX_KEPT, AGE - 60.0)) == []
    young = files(MAX_KEPT + 2, AGE - 60.0)
    assert superfluous(young) == young[:2]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory is kept for being among the newest."""
    monkeypatch.setattr(operation_retention, "MIN_KEPT", 0)


def directory(runtime: OneController, operation: str, age: float = OLD) -> Path:
    """Make files of *operation* that last changed *age* seconds ago."""
    place = runtime.context.operations.root / operation
    place.mkdir(parents=True)
    fence(place, 1)
    then = time.time() - age
    os.utime(place, (then, then))
    return place


async def begun(runtime: OneController, name: str, age: float = OLD) -> tuple[str, Path]:
    record = await runtime.context.operations.journal.begin(key(name), "write", {"removal": False})
    return record.id, directory(runtime, record.id, age)


async def test_only_files_of_ended_operations_are_removed(
    few: None, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Files of an open or held operation are kept; after its end they are removed."""
    async with run_one_controller(tmp_path, ScriptedReconciler()) as runtime:
        log, keeper = runtime.context.operations.journal, OperationRetention(runtime.context)
        _, opened = await begun(runtime, "a")
        held, waiting = await begun(runtime, "b")
        over, gone = await begun(runtime, "c")
        young, recent = await begun(runtime, "d", age=60.0)
        stranger = runtime.context.operations.root / "notes"
        stranger.mkdir()
        os.utime(stranger, (0, 0))
        await log.hold(held, Hold("why", "decision", "", 0.0))
        await log.end(over, Ending.DONE)
        await log.end(young, Ending.DONE)
        assert await keeper.remove_superfluous() == 1
        assert not gone.exists()
        assert all(place.exists() for place in (opened, waiting, recent, stranger))
        assert runtime.log_lines("operation.files_removed") == []


async def test_files_without_a_record_are_evidence(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Files without a record are removed after AGE and logged; not while the store is degraded."""
    async with run_one_controller(tmp_path, ScriptedReconciler()) as runtime:
        keeper = OperationRetention(runtime.context)
        old, young = "0" * 26, "1" * 26
        directory(runtime, old)
        directory(runtime, young, age=60.0)
        whole = runtime.context.store.writer.meta
        runtime.context.store.writer.meta = attrs.evolve(whole, degraded="lost")
        assert await keeper.remove_superfluous() == 0
        runtime.context.store.writer.meta = whole
        assert await keeper.remove_superfluous() == 1
        assert [each.name for each in runtime.context.operations.root.iterdir()] == [young]
        assert runtime.log_lines("operation.files_removed")[0]["operation"] == old


async def test_a_round_is_bounded_and_repeated(
    few: None, tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round removes AT_ONCE directories; the service continues until none is superfluous."""
    monkeypatch.setattr(operation_retention, "AT_ONCE", 2)
    async with run_one_controller(tmp_path, ScriptedReconciler()) as runtime:
        for number in range(5):
            directory(runtime, f"{number:026}")
        runtime.context.services.start_soon(OperationRetention(runtime.context).serve)
        await runtime.wait_all_blocked()
        left = []
        for _ in range(4):
            left.append(len(list(runtime.context.operations.root.iterdir())))
            await _round()
        assert left == [5, 3, 1, 0]


async def _round() -> None:
    import trio

    await trio.sleep(operation_retention.FIRST + 0.1)


@pytest.fixture
def living() -> Iterator[int]:
    """A program that is alive."""
    with subprocess.Popen(["sleep", "60"]) as program:
        yield program.pid
        program.kill()


@pytest.mark.processes
async def test_a_living_program_keeps_its_files(
    few: None, tmp_path: Path, autojump_clock: MockClock, living: int
) -> None:
    """The files of an ended operation are kept while one of its programs is alive."""
    process = find_process(living)
    assert process is not None
    identity = f'{{"pid": {living}, "started": {process.started}}}'
    async with run_one_controller(tmp_path, ScriptedReconciler()) as runtime:
        place = directory(runtime, "0" * 26)
        (place / "child").write_text(
            f'{{"boot_id": "{boot_id()}", "attempt": 1, "action": "apply", "critical": true,'
            f' "deadline": null, "program": {identity}, "parent": {identity}}}'
        )
        then = time.time() - OLD
        os.utime(place, (then, then))
        assert await OperationRetention(runtime.context).remove_superfluous() == 0
        os.kill(living, 9)
        os.waitid(os.P_PID, living, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it is killed
        assert await OperationRetention(runtime.context).remove_superfluous() == 1
