"""Full disks, failing devices, kills: what is refused, what waits, and how it recovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from reconciled.core.errors import NotJournaled
from reconciled.core.resources import Key
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite import writer
from reconciled.journal.sqlite.disk_reserve import Reserve
from reconciled.journal.sqlite.store import Store

WORKER = Path(__file__).parents[1] / "worker.py"
pytestmark = pytest.mark.processes


def worker(state: Path, mode: str, *strace: str) -> tuple[list[list[str]], int]:
    """The words of each line of the worker, and its exit code (from strace: 128 + signal)."""
    ended = subprocess.run(
        [*strace, sys.executable, str(WORKER), str(state), mode],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return [line.split(" ", 2) for line in ended.stdout.splitlines()], ended.returncode


def injecting(what: str, state: Path) -> list[str]:
    """An strace command that injects *what* into calls on FILES of *state*; skips without it."""
    strace = shutil.which("strace")
    trial = strace and subprocess.run(
        [strace, "-o", "/dev/null", "true"], check=False, capture_output=True
    )
    if not trial or trial.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail("strace is missing or not permitted to trace: it is needed under CI")
        pytest.skip("strace is missing or not permitted to trace")
    files = [f"--trace-path={state}/{name}" for name in FILES]
    return [str(strace), "-f", "-qq", "-o", "/dev/null", *files, f"--inject={what}"]


FILES = (
    "store/store.sqlite",
    "store/store.sqlite-wal",
    "store/opening",
    "store",
    "store.new/store.sqlite",
    "store.new",
)


def test_c02_a_recovery_that_kills_is_counted_before_it_runs(tmp_path: Path) -> None:
    """Each start after a kill right after count_recovery() finds one more recovery."""
    assert worker(tmp_path, "poison") == ([], -signal.SIGKILL)
    for start in range(1, 6):
        said, code = worker(tmp_path, "poison")
        assert (said, code) == ([["counted", str(start + 1), str(start)]], -signal.SIGKILL)
    store = Store.open(tmp_path)
    assert [record.recoveries for record in store.open_operations()] == [5]
    store.close()


def check(state: Path, said: list[list[str]]) -> None:
    """Whatever was reported as durable is durable, and the store is not damaged."""
    store = Store.open(state)
    assert not store.integrity.damage, store.integrity
    assert not store.degraded
    found = {record.id: record for record in store.open_operations()}
    rows = store.writer.connection.execute("SELECT id FROM past").fetchall()
    over = {operation for (operation,) in rows}
    events: dict[str, set[str]] = {"begun": set(), "started": set(), "done": set(), "ended": set()}
    for event, *rest in said:
        if event in events:
            events[event].add(rest[0])
    assert events["begun"] <= found.keys() | over
    assert events["ended"] <= over
    for operation in events["started"] - over:
        assert found[operation].started_once_step == "s"
    for operation in events["done"] - over:
        assert found[operation].last_step == "s"
    store.close()


def states(said: list[list[str]]) -> list[list[str]]:
    """The reports that the journal is unwritable."""
    return [words for words in said if words[0] == "state" and words[1] != "writable"]


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A used and closed store: its opening makes few calls, so most injections hit later work."""
    state = tmp_path_factory.mktemp("used")
    assert worker(state, "1")[1] == 0
    return state


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
@pytest.mark.parametrize(
    ("call", "when"),
    [
        *(("fdatasync", when) for when in ("1", "2", "3", "4", "5", "9", "12..15")),
        *(("pwrite64", when) for when in ("1", "2", "3", "4", "5", "9", "12", "13", "20..24")),
        *((call, when) for call in ("fsync", "rename", "write") for when in ("1", "2")),
        *(("pread64", when) for when in ("1", "3", "5", "7", "9")),
        *(("openat", when) for when in ("1", "2", "3", "5", "6")),
    ],
)
def test_an_error_at_the_nth_call_is_recovered_from(
    used: Path, tmp_path: Path, error: str, call: str, when: str
) -> None:
    """Intents are refused with the reason, other writes wait until they are durable.

    strace counts the calls of each thread separately: of the opening, and of the writer.
    """
    state = tmp_path / "state"
    shutil.copytree(used, state)
    file = state / "store" / "store.sqlite"
    before = file.stat().st_ino
    said, code = worker(state, "6", *injecting(f"{call}:error={error}:when={when}", state))
    if said and said[0][0] == "unusable":  # the opening failed: nothing was begun
        assert code == 1
        said, code = worker(state, "6")
    elif call == "fdatasync" or (call == "pwrite64" and when != "20..24"):
        assert "state" in [words[0] for words in said]
        # After a failed sync the content of the disk is unknown: the store is in a new file.
        assert (file.stat().st_ino != before) == ("I/O error" in " ".join(*states(said)))
    assert code == 0
    assert said[-1] == ["pending", "0"]
    assert said[-2][0] == "all"
    check(state, said)


def test_a_store_that_fails_permanently_reports_nothing_wrong(tmp_path: Path) -> None:
    """When every sync fails from some point on, nothing is reported durable that is not."""
    strace = injecting("fdatasync:error=EIO:when=12+", tmp_path)
    said: list[list[str]] = []
    with subprocess.Popen(
        [*strace, sys.executable, str(WORKER), str(tmp_path), "20"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip("\n").split(" ", 2))
            if said[-1][:1] == ["state"]:
                os.killpg(process.pid, signal.SIGKILL)
    assert "state" in [words[0] for words in said]
    check(tmp_path, said)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB; only root can mount it."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def filled_up(place: Path) -> Path:
    """Fill the file system of *place*; returns the file that takes the space."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        while stream.write(b"x" * 4096):
            pass
    return filler


async def test_a_full_disk_refuses_intents_and_closes_open_operations(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reserve gives space for outcomes; intents are accepted again once there is space."""
    monkeypatch.setattr(writer, "MAX_BACKOFF", 0.1)
    states: list[str] = []
    store = Store.open(small)
    writable = trio.Event()

    def on_change(reason: str) -> None:
        states.append(reason)
        if not reason:
            writable.set()

    store.writer.on_writable_change = on_change
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        records = [await operations.begin(Key(f"a/{n}"), "apply", {}) for n in range(50)]
        filler = filled_up(small)
        refused = ""
        for number in range(1000):
            try:
                await operations.begin(Key(f"b/{number}"), "apply", {"x": "y" * 5000})
            except NotJournaled as error:
                refused = str(error)
                break
        assert "full" in refused
        with trio.fail_after(20):
            for record in records:
                await operations.record_step_started(record.id, "s", "once")
                await operations.end(record.id, Ending.DONE)
        assert not (small / "reserve").exists()
        with pytest.raises(NotJournaled, match="full"):
            await operations.begin(Key("c/d"), "apply", {})
        assert states == [store.unwritable_reason]
        filler.unlink()
        with trio.fail_after(20):
            await writable.wait()
        await operations.begin(Key("c/d"), "apply", {})
        assert (small / "reserve").stat().st_size == Reserve(small).size
        assert states == [states[0], ""]
        nursery.cancel_scope.cancel(reason="test")
    again = Store.open(small)
    found = {record.key for record in again.open_operations()}
    assert Key("c/d") in found
    assert not {record.key for record in records} & found
    again.close()


async def test_a_start_on_a_full_disk_uses_the_reserve(small: Path) -> None:
    """The store opens, refuses intents with the reason, and accepts them once there is space."""
    store = Store.open(small)
    store.close()
    filler = filled_up(small)
    store = Store.open(small)
    assert store.unwritable_reason
    writable = trio.Event()
    store.writer.on_writable_change = lambda reason: None if reason else writable.set()
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        with pytest.raises(NotJournaled, match="no disk space can be reserved"):
            await operations.begin(Key("a/b"), "apply", {})
        filler.unlink()
        with trio.fail_after(20):
            await writable.wait()
        await operations.begin(Key("a/b"), "apply", {})
        nursery.cancel_scope.cancel(reason="test")


async def test_a_store_that_becomes_read_only_refuses_intents_and_recovers(small: Path) -> None:
    """While the store is read-only, intents are refused and outcomes wait."""
    store = Store.open(small)
    writable = trio.Event()
    store.writer.on_writable_change = lambda reason: None if reason else writable.set()
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        record = await operations.begin(Key("a/b"), "apply", {})
        store.writer.connection.execute("PRAGMA query_only=ON").close()
        with pytest.raises(NotJournaled, match="readonly"):
            await operations.begin(Key("a/c"), "apply", {})
        with trio.move_on_after(0.3) as waited:
            await operations.end(record.id, Ending.DONE)
        assert waited.cancelled_caught
        assert operations.pending
        store.writer.connection.execute("PRAGMA query_only=OFF").close()
        with trio.fail_after(20):
            await writable.wait()
        assert operations.list_open() == []
        nursery.cancel_scope.cancel(reason="test")


def test_what_is_reported_durable_was_synced_before(tmp_path: Path) -> None:
    """A system call trace shows no report of success before the write to the store is synced.

    This includes names: a directory is synced after a file in it is made, removed or replaced.
    """
    injecting("fsync:error=EIO:when=9999", tmp_path)  # skips if nothing can be traced
    trace = tmp_path / "trace"
    calls = "write,pwrite64,fsync,fdatasync,rename,mkdir,openat,ftruncate,unlink"
    strace = ["strace", "-f", "-qq", "-y", "-s", "400", "-o", str(trace), "-e", f"trace={calls}"]
    state = tmp_path / "state"
    state.mkdir()
    said, code = worker(state, "4", *strace)
    assert code == 0
    assert [words[0] for words in said].count("ended") == 4
    unsynced, words = set(), 0
    for line in trace.read_text().splitlines():
        call, _, rest = line.partition(" ")[2].lstrip().partition("(")
        handle = rest[rest.find("<") + 1 : rest.find(">")]
        if call == "write" and rest.startswith("1<"):
            words += 1
            assert not unsynced, (line, unsynced)
        elif call in ("write", "pwrite64", "ftruncate") and "/store" in handle:
            if handle.endswith("store.sqlite"):
                continue  # the log keeps its frames until SQLite has synced it
            unsynced.add(handle)
        elif call in ("fsync", "fdatasync"):
            unsynced.discard(handle)
        elif call == "unlink":
            unsynced.discard(rest.split('"')[1])
        elif call in ("rename", "mkdir") or (call == "openat" and "O_CREAT" in rest):
            named = rest.split('"')[3 if call == "rename" else 1]
            if (
                "-shm" not in named
                and named.startswith(str(state / "store"))
                and " = -1" not in rest
            ):
                unsynced.add(str(Path(named).parent))
    assert words > 15
