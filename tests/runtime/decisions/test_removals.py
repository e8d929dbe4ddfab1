"""How held removals are reported, and how the daemon receives their approvals."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from one_controller import Line, key, lines_of, logs_to
from trio.testing import MockClock

from reconciled.core.removal_guard import HeldRemovals
from reconciled.core.resources import Key
from reconciled.journal import removal_approvals
from reconciled.journal.removal_approvals import (
    PendingApproval,
    approval_files,
    read_pending,
    write_approval,
)
from reconciled.runtime.decisions.approvals import FLUSH_TIMEOUT, RemovalApprovals
from reconciled.runtime.decisions.inbox import SCAN_INTERVAL

HELD = HeldRemovals((key("1"), key("2")), 3, 0.0)
Given = list[tuple[str, frozenset[Key]]]


@asynccontextmanager
async def serving(tmp_path: Path, given: Given) -> AsyncIterator[RemovalApprovals]:
    """The service as the daemon runs it; *given* collects what it approves."""
    logs = logs_to(tmp_path / "log")
    made = RemovalApprovals(tmp_path, logs.log, lambda *call: given.append(call))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.serve)  # noqa: ASYNC113 - waited for below
        nursery.start_soon(made.serve_reports)
        await trio.testing.wait_all_tasks_blocked()
        yield made
        nursery.cancel_scope.cancel(reason="seen")


def events(tmp_path: Path) -> list[str]:
    return [line["event"] for line in lines_of(tmp_path / "log")]


def lines(tmp_path: Path, event: str) -> list[Line]:
    return [line for line in lines_of(tmp_path / "log") if line["event"] == event]


def approve(tmp_path: Path, controller: str, *names: str) -> None:
    write_approval(tmp_path, PendingApproval(controller, tuple(map(key, names)), 9))


# -- approvals -------------------------------------------------------------------------------


async def test_approvals_are_found_as_they_come(tmp_path: Path, autojump_clock: MockClock) -> None:
    """An approval that is there at the start, and one that comes later, both take effect."""
    given: Given = []
    approve(tmp_path, "a", "1")
    async with serving(tmp_path, given):
        assert given == [("a", {key("1")})]
        approve(tmp_path, "b", "2")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert given[1:] == [("b", {key("2")})]
        assert list((tmp_path / "removals").iterdir()) == []


async def test_approvals_are_found_without_inotify(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel's inotify limit is used up, approvals are polled for."""

    def refused(**_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncinotify.Inotify", refused)
    given: Given = []
    async with serving(tmp_path, given):
        assert events(tmp_path) == ["removals.polling"]
        approve(tmp_path, "b", "2")
        await trio.sleep(SCAN_INTERVAL + 0.1)
        assert given == [("b", {key("2")})]


async def test_an_approval_is_removed_before_it_takes_effect(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An approval is used once: its file is removed, durably, before any removal is approved."""
    seen: list[list[Path]] = []
    approve(tmp_path, "a", "1")
    made = RemovalApprovals(
        tmp_path,
        logs_to(tmp_path / "log").log,
        lambda *_: seen.append(list((tmp_path / "removals").iterdir())),
    )
    assert await made.inbox.scan() is False
    assert seen == [[]]


async def test_an_approval_that_cannot_be_removed_does_not_take_effect(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its file cannot be removed, an approval waits, since it could be used twice."""
    given: Given = []
    full = [True]
    real = type(approval_files(tmp_path)).finish

    def finish(self: Any, file: Path) -> None:
        if full:
            raise OSError(28, "No space left on device")
        real(self, file)

    monkeypatch.setattr(type(approval_files(tmp_path)), "finish", finish)
    approve(tmp_path, "a", "1")
    async with serving(tmp_path, given):
        assert given == []
        (line,) = lines(tmp_path, "removals.deferred")
        assert line["controller"] == "a"
        full.clear()
        await trio.sleep(SCAN_INTERVAL + 0.1)
        assert given == [("a", {key("1")})]


async def test_a_claim_of_an_earlier_daemon_takes_effect(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An approval that a killed daemon claimed has had no effect yet, and takes effect now."""
    given: Given = []
    approve(tmp_path, "a", "1")
    approval_files(tmp_path).claim()
    async with serving(tmp_path, given):
        assert given == [("a", {key("1")})]


# -- reports ---------------------------------------------------------------------------------


async def test_a_report_is_written_in_order(tmp_path: Path, autojump_clock: MockClock) -> None:
    """The last report counts, and each change is logged once, after its file is written."""
    async with serving(tmp_path, []) as made:
        for held in (HELD, HELD):
            made.report_held("a", held)
        assert read_pending(tmp_path, "a") is None
        await trio.testing.wait_all_tasks_blocked()
        assert read_pending(tmp_path, "a") == PendingApproval("a", HELD.keys, 3)
        made.report_held("a", None)
        made.report_held("a", HELD)
        made.report_held("a", None)
        await trio.testing.wait_all_tasks_blocked()
        assert read_pending(tmp_path, "a") is None
        assert events(tmp_path) == ["removals.held", "removals.released"]


async def test_a_report_that_cannot_be_written_is_tried_again(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is named, and a report is written once there is space: allow reads the file."""
    real, full = removal_approvals.write_held, [True]

    def write(*given: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        real(*given)

    monkeypatch.setattr(removal_approvals, "write_held", write)
    async with serving(tmp_path, []) as made:
        made.report_held("a", HELD)
        await trio.testing.wait_all_tasks_blocked()
        assert events(tmp_path) == ["removals.unwritable", "removals.held"]
        full.clear()
        await trio.sleep(SCAN_INTERVAL + 0.1)
        assert read_pending(tmp_path, "a") == PendingApproval("a", HELD.keys, 3)
        assert len(lines(tmp_path, "removals.held")) == 1


async def test_a_newer_report_replaces_one_that_could_not_be_written(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removals that are not held any more are not reported later, when the disk has space."""
    real, full = removal_approvals.write_held, [True]

    def write(*given: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        real(*given)

    monkeypatch.setattr(removal_approvals, "write_held", write)
    async with serving(tmp_path, []) as made:
        made.report_held("a", HELD)
        await trio.testing.wait_all_tasks_blocked()
        made.report_held("a", None)
        full.clear()
        await trio.sleep(2 * SCAN_INTERVAL)
        assert read_pending(tmp_path, "a") is None


async def test_a_deleted_directory_is_made_again(tmp_path: Path, autojump_clock: MockClock) -> None:
    """After its deletion, reports are written and approvals are found as before."""
    given: Given = []
    async with serving(tmp_path, given) as made:
        shutil.rmtree(tmp_path / "removals")
        await trio.testing.wait_all_tasks_blocked(0.01)
        made.report_held("a", HELD)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert read_pending(tmp_path, "a") == PendingApproval("a", HELD.keys, 3)
        approve(tmp_path, "b", "2")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert given == [("b", {key("2")})]


async def test_a_stop_waits_for_the_last_report(tmp_path: Path, autojump_clock: MockClock) -> None:
    """flush() writes what is reported, so that ``allow`` reads it after the daemon's end."""
    made = RemovalApprovals(tmp_path, logs_to(tmp_path / "log").log, lambda *_: None)
    made.report_held("a", HELD)
    await made.flush()
    assert read_pending(tmp_path, "a") is not None


@pytest.fixture
def real_threads(monkeypatch: pytest.MonkeyPatch, inline_threads: None) -> None:
    """Threads are threads again."""
    monkeypatch.undo()


async def test_a_stop_does_not_wait_long_for_a_report(
    tmp_path: Path, real_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer delays a stop by FLUSH_TIMEOUT only."""
    released = threading.Event()

    def hang(*_: object) -> None:
        released.wait()

    made = RemovalApprovals(tmp_path, logs_to(tmp_path / "log").log, lambda *_: None)
    monkeypatch.setattr(removal_approvals, "write_held", hang)
    made.report_held("a", HELD)
    began = trio.current_time()
    try:
        await made.flush()
        assert FLUSH_TIMEOUT - 0.1 < trio.current_time() - began < FLUSH_TIMEOUT + 5
    finally:
        released.set()
