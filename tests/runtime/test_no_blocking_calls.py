"""The running daemon does no blocking disk work in its event loop: a slow disk would stop it."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from whole_daemon import WholeDaemon

from reconciled.core.resources import Key
from reconciled.journal import removal_approvals, resolutions
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Hold, Resolution
from reconciled.journal.resolutions import ResolutionRequest
from reconciled.journal.sqlite.store import Store
from reconciled.runtime.controllers import factory

REAL_WATCHERS = factory.build_watchers
PROGRAM = """
kind: Exec
metadata: {name: p}
spec: {check: [test, -e, flag], apply: [touch, flag]}
"""
THING = "kind: Thing\nmetadata: {name: x}\nspec: {value: 1}\n"
EXEC = "e: {reconciler: exec}"
NAMES = [f"k{number}" for number in range(8)]
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Calls without an audit event. (os.mkdir is left out: nothing waits for the disk there.)
UNAUDITED = ("fsync", "fdatasync")
AUDITED = {"os.rename", "os.remove", "os.truncate", "sqlite3.connect"}
SQLITE = ("execute", "executemany", "executescript", "commit", "rollback", "close", "backup")
# Functions of the daemon that may block the loop, each with its reason.
ALLOWED = {
    "output.open": "opens the output file of a program that is about to start; nothing is synced",
}


@attrs.define(eq=False)
class Guard:
    """Makes blocking calls fail in one thread while it is on; found: where they came from."""

    thread: int = attrs.field(factory=threading.get_ident)
    on: bool = False
    found: list[str] = attrs.field(factory=list)

    def check(self, call: str) -> None:
        if not self.on or threading.get_ident() != self.thread:
            return
        stack = [frame for frame in traceback.extract_stack() if "/reconciled/" in frame.filename]
        if any(f"{Path(frame.filename).stem}.{frame.name}" in ALLOWED for frame in stack):
            return
        where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in stack]
        self.found.append(f"{call} in {' < '.join(where[::-1][:4])}")
        raise RuntimeError(f"{call} blocks the event loop")

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """The block is the test's own, and may block."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


class Guards:
    """The guard of the running test: an audit hook cannot be removed."""

    current: Guard | None = None
    hooked = False

    @classmethod
    def hear(cls, event: str, arguments: tuple[Any, ...]) -> None:
        guard = cls.current
        if guard is None:
            return
        if event in AUDITED or (event == "open" and arguments[2] & WRITING):
            guard.check(event)


def checked(guard: Guard, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        guard.check(name)
        return real(*arguments, **named)

    return call


@pytest.fixture(autouse=True)
def inline_threads() -> None:
    """In place of the one of this directory: threads are threads here."""


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """A guard of this thread, which is off."""
    made = Guard()
    for name in UNAUDITED:
        monkeypatch.setattr(os, name, checked(made, f"os.{name}", getattr(os, name)))
    methods = {
        name: checked(made, f"sqlite3 {name}", getattr(sqlite3.Connection, name)) for name in SQLITE
    }
    connection = type("Connection", (sqlite3.Connection,), methods)
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=connection))
    if not Guards.hooked:
        sys.addaudithook(Guards.hear)
        Guards.hooked = True
    Guards.current = made
    yield made
    Guards.current = None


async def until(condition: Callable[[], object]) -> None:
    """Wait for what threads and the kernel bring about, at most 20 s."""
    give_up = trio.current_time() + 20
    while not condition():
        assert Guards.current is not None
        assert Guards.current.found == []
        assert trio.current_time() < give_up
        await trio.sleep(0.01)


def declare_files(whole_daemon: WholeDaemon, *names: str) -> None:
    """Exactly these files are declared, in one manifest, which is replaced whole."""
    documents = [
        f"kind: File\nmetadata: {{name: {name}}}\n"
        f"spec: {{path: {whole_daemon.root / 'files' / name}, content: '{name}'}}\n"
        for name in names
    ]
    temporary = whole_daemon.root / "f" / "new"
    temporary.write_text("---\n".join(documents))
    temporary.rename(whole_daemon.root / "f" / "all.yaml")


async def leave_held(whole_daemon: WholeDaemon) -> str:
    """An operation of a/x that an earlier daemon left held; its id."""
    store = Store.open(whole_daemon.state)
    journal = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        record = await journal.begin(Key("a/x"), "write", {"kind": "Thing"})
        await journal.hold(record.id, Hold("unclear", "decision", "", 1.0))
        nursery.cancel_scope.cancel(reason="left")
    return record.id


def sync(path: Path) -> None:
    """Open and sync *path*."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "call",
    [
        sync,
        lambda path: path.write_text("x"),
        lambda path: path.rename(path.with_name("b")),
        lambda path: path.replace(path.with_name("b")),
        Path.unlink,
        lambda path: os.close(os.open(path, os.O_WRONLY)),
        lambda path: sqlite3.connect(path.with_name("c")).close(),
    ],
)
def test_the_guard_finds_a_blocking_call(
    tmp_path: Path, guard: Guard, call: Callable[[Path], object]
) -> None:
    """Each kind of call fails in the guarded thread, and works in any other."""
    file = tmp_path / "a"
    file.touch()
    guard.on = True
    with pytest.raises(RuntimeError, match="blocks the event loop"):
        call(file)
    other = threading.Thread(target=call, args=(file,))
    other.start()
    other.join()
    assert len(guard.found) == 1


def test_the_guard_finds_a_query(tmp_path: Path, guard: Guard) -> None:
    """A query fails in the guarded thread, also on a connection that was opened before."""
    connection = sqlite3.connect(tmp_path / "c")
    guard.on = True
    with pytest.raises(RuntimeError, match="blocks the event loop"):
        connection.execute("SELECT 1")
    with guard.off():
        connection.close()


async def test_the_loop_does_no_disk_work(
    whole_daemon: WholeDaemon, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, programs, held removals, resolved operations and a reload do not block the loop."""
    monkeypatch.setattr(factory, "build_watchers", REAL_WATCHERS)
    for name in ("f", "a", "b", "e", "files"):
        (whole_daemon.root / name).mkdir(mode=0o755)
    declare_files(whole_daemon, *NAMES[:2])
    (whole_daemon.root / "a" / "x.yaml").write_text(
        "kind: Thing\nmetadata: {name: x}\nspec: {value: 1}\n"
    )
    whole_daemon.configure("f: {reconciler: file}", EXEC, "a")
    operation = await leave_held(whole_daemon)
    async with whole_daemon.running():
        await until(lambda: whole_daemon.log_lines("daemon.ready"))
        guard.on = True
        with guard.off():
            declare_files(whole_daemon, *NAMES)
            (whole_daemon.root / "e" / "new").write_text(PROGRAM)
            (whole_daemon.root / "e" / "new").rename(whole_daemon.root / "e" / "p.yaml")
        await until(lambda: len(whole_daemon.log_lines("reconcile.done")) == len(NAMES) + 1)
        assert whole_daemon.log_lines("reconcile.done", key="e/p")

        with guard.off():
            declare_files(whole_daemon, "k0")
        await until(lambda: whole_daemon.log_lines("removals.held"))
        with guard.off():
            held = removal_approvals.read_pending(whole_daemon.state, "f")
            assert held is not None
            removal_approvals.write_approval(whole_daemon.state, held)
        await until(lambda: whole_daemon.log_lines("removals.released"))
        await until(lambda: len(whole_daemon.log_lines("reconcile.removed")) == len(NAMES) - 1)

        with guard.off():
            request = ResolutionRequest(operation, Resolution.ABANDON, "eve (uid 7)", "seen", 2.0)
            resolutions.submit(whole_daemon.state, request)
        await until(lambda: whole_daemon.ran == ["a/x"])

        with guard.off():
            whole_daemon.configure(
                "f: {reconciler: file, timeout: 1m}", "e: {reconciler: exec}", "b"
            )
        await whole_daemon.reload()
        await until(lambda: whole_daemon.log_lines("reload.done"))
        assert whole_daemon.log_lines("reload.done")[0]["started"] == ["b", "f"]
        await until(whole_daemon.daemon.controllers["f"].synced.is_set)
        guard.on = False
    assert guard.found == []
    assert whole_daemon.exit_code == 0
    assert sorted(file.name for file in (whole_daemon.root / "files").iterdir()) == ["k0"]
