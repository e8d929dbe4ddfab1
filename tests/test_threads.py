"""Work in threads while the system starts none: it is retried, runs once, and fails at last."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from reconciled import threads
from reconciled.core.errors import NoThread, NotJournaled
from reconciled.core.resources import Key
from reconciled.core.sources import Report, Unavailable
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.store import Store
from reconciled.threads import in_thread
from reconciled.watchers.directory import DirectoryWatcher

PACKAGE = Path(threads.__file__).parent


class Limit:
    """A stand-in for the process limit: while it is reached no thread starts."""

    def __init__(self) -> None:
        self.reached = False
        self.refused = 0
        self.run_sync = trio.to_thread.run_sync

    async def __call__(self, function: Callable[[], Any], **options: Any) -> Any:
        if self.reached:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        return await self.run_sync(function, **options)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    made = Limit()
    monkeypatch.setattr(trio.to_thread, "run_sync", made)
    return made


async def test_starting_a_thread_is_retried(limit: Limit, autojump_clock: MockClock) -> None:
    """The function runs once, as soon as a thread starts, and its result is returned."""
    ran = []
    limit.reached = True

    async def lift_limit() -> None:
        await trio.sleep(threads.START_TIMEOUT / 2)
        limit.reached = False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lift_limit)
        assert await in_thread(lambda: ran.append(1) or 7) == 7  # type: ignore[func-returns-value]
    assert ran == [1]
    assert limit.refused > 1


async def test_no_thread_within_the_timeout_is_an_os_error(
    limit: Limit, autojump_clock: MockClock
) -> None:
    """After START_TIMEOUT it raises NoThread, an OSError, with a remedy in its text."""
    limit.reached = True
    with pytest.raises(NoThread, match="raise TasksMax= of the unit"):
        await in_thread(lambda: None)
    assert trio.current_time() == pytest.approx(threads.START_TIMEOUT, abs=1)
    assert issubclass(NoThread, OSError)


async def test_an_exception_of_the_function_is_not_retried(autojump_clock: MockClock) -> None:
    """A function that itself raises the same RuntimeError is not run again."""
    ran = []

    def fail() -> None:
        ran.append(1)
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match="can't start"):
        await in_thread(fail)
    assert ran == [1]


def test_all_threads_are_started_by_in_thread() -> None:
    """Only threads.py uses trio.to_thread, so every thread start is retried."""
    users = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "to_thread"
    ]
    assert users == ["threads.py"]


async def test_the_journal_works_again_once_threads_start(
    tmp_path: Path, limit: Limit, autojump_clock: MockClock
) -> None:
    """Without a thread intents are refused and outcomes wait; both work again once one starts."""
    store, writable = Store.open(tmp_path), trio.Event()
    store.writer.on_writable_change = lambda reason: None if reason else writable.set()
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        record = await operations.begin(Key("a/b"), "apply", {})
        limit.reached = True
        with pytest.raises(NotJournaled, match="no thread can be started"):
            await operations.begin(Key("c/d"), "apply", {})
        async with trio.open_nursery() as ending:
            ending.start_soon(operations.end, record.id, Ending.DONE)
            await trio.sleep(60)
            assert store.unwritable_reason
            limit.reached = False
        await writable.wait()
        await operations.begin(Key("e/f"), "apply", {})
        assert not store.unwritable_reason
        nursery.cancel_scope.cancel(reason="the test is over")


async def test_a_source_without_a_thread_is_unavailable(
    tmp_path: Path, limit: Limit, autojump_clock: MockClock
) -> None:
    """A directory that cannot be listed for want of a thread is Unavailable, and never empty."""
    limit.reached = True
    reports: list[Report] = []
    reported = trio.Event()

    def report(outcome: Report) -> None:
        reports.append(outcome)
        reported.set()

    async with trio.open_nursery() as nursery:
        watcher = DirectoryWatcher(tmp_path, lambda *_: ([], []))
        nursery.start_soon(watcher.watch, report)
        await reported.wait()
        nursery.cancel_scope.cancel(reason="the test is over")
    (outcome,) = reports
    assert isinstance(outcome, Unavailable)
    assert "no thread can be started" in outcome.reason
