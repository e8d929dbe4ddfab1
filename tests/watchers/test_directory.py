"""The watcher of a directory, with real files and real inotify."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest, Origin, fingerprint_of
from reconciled.core.sources import Report, Snapshot, Unavailable
from reconciled.watchers import change_hints
from reconciled.watchers import directory as directory_module
from reconciled.watchers.change_hints import Hints
from reconciled.watchers.directory import DirectoryWatcher
from reconciled.watchers.listing import MAX_FILE_BYTES, read_listing

SOON = 5.0  # seconds for an effect that takes milliseconds; far below a full listing's 60


@attrs.define(eq=False)
class Lines:
    """A parser of lines ``name value``; an exclamation mark is a fault. Counts its calls."""

    calls: Counter[str] = attrs.field(factory=Counter)
    before: Callable[[str], object] = lambda _name: None

    def __call__(self, data: bytes, file: str) -> tuple[list[Manifest], list[Problem]]:
        self.before(file)
        self.calls[Path(file).name] += 1
        manifests, problems = [], []
        for number, line in enumerate(data.decode().splitlines(), start=1):
            if line == "!":
                problems.append(Problem(Origin(file, number, 1), "is wrong"))
            elif line == "boom":
                raise RecursionError("too deep")
            elif line:
                name, _, value = line.partition(" ")
                spec = {"value": value}
                manifests.append(
                    Manifest("Exec", name, spec, Origin(file, number), fingerprint_of(spec))
                )
        return manifests, problems


@attrs.define(eq=False)
class Reports:
    """What a watcher reported, in order."""

    all: list[Report] = attrs.field(factory=list)
    _came: trio.Event = attrs.field(factory=trio.Event)

    def __call__(self, report: Report) -> None:
        self.all.append(report)
        self._came.set()
        self._came = trio.Event()

    async def until(self, wanted: Callable[[Report], bool]) -> Report:
        """The latest report, once it is as *wanted*."""
        with trio.fail_after(SOON):
            while not (self.all and wanted(self.all[-1])):
                await self._came.wait()
        return self.all[-1]

    async def declare(self, **values: str) -> Snapshot:
        """The latest report, once it is complete and declares exactly *values*."""
        report = await self.until(
            lambda report: (
                isinstance(report, Snapshot) and report.complete and held(report) == values
            )
        )
        assert isinstance(report, Snapshot)
        return report

    async def incomplete(self, message: str) -> Snapshot:
        """The latest report, once it is incomplete and its problems contain *message*."""
        report = await self.until(
            lambda report: (
                isinstance(report, Snapshot)
                and not report.complete
                and message in "\n".join(map(str, report.problems))
            )
        )
        assert isinstance(report, Snapshot)
        return report

    async def unavailable(self, message: str) -> Unavailable:
        """The latest report, once it is Unavailable with *message* in its reason."""
        report = await self.until(
            lambda report: isinstance(report, Unavailable) and message in report.reason
        )
        assert isinstance(report, Unavailable)
        return report


def held(report: Report) -> dict[str, Any]:
    assert isinstance(report, Snapshot)
    return {manifest.name: manifest.spec["value"] for manifest in report.manifests}


@asynccontextmanager
async def watching(
    path: Path, parse: Lines | None = None, remembered: str = ""
) -> AsyncIterator[Reports]:
    reports = Reports()
    watcher = DirectoryWatcher(path, parse or Lines(), remembered)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.watch, reports, name=watcher.name)
        yield reports
        nursery.cancel_scope.cancel(reason="test is over")


def put(path: Path, text: str) -> None:
    """Write *path* as an editor does: a new file, renamed over it."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.rename(path)


def queue_limit() -> int:
    return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())


def move(path: Path, target: Path) -> None:
    path.rename(target)


def remake(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another device."""
    path = Path("/dev/shm") / f"reconciled-{os.getpid()}"
    if not path.parent.is_dir() or path.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs two file systems")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def manifests(tmp_path: Path) -> Path:
    path = tmp_path / "manifests"
    path.mkdir()
    return path


async def test_files_are_created_changed_and_removed(manifests: Path) -> None:
    """New, rewritten, renamed and deleted files are each seen at once."""
    (manifests / "a.yaml").write_text("a 1")
    async with watching(manifests) as reports:
        await reports.declare(a="1")
        (manifests / "b.yml").write_text("b 1")
        await reports.declare(a="1", b="1")
        put(manifests / "a.yaml", "a 2")
        await reports.declare(a="2", b="1")
        (manifests / "b.yml").write_text("b 22")
        await reports.declare(a="2", b="22")
        (manifests / "b.yml").rename(manifests / "c.yaml")
        moved = await reports.until(lambda report: "c.yaml" in str(report))
        assert held(moved) == {"a": "2", "b": "22"}
        (manifests / "a.yaml").unlink()
        await reports.declare(b="22")


async def test_only_manifests_are_read(manifests: Path) -> None:
    """Hidden files, backups of editors and subdirectories are not read."""
    for name in (".a.yaml", "4913", ".a.yaml.swp", "a.yaml~", "#a.yaml#", "a.yaml.bak", "a.json"):
        (manifests / name).write_text("x 1")
    (manifests / "below").mkdir()
    (manifests / "below" / "b.yaml").write_text("x 1")
    (manifests / "a.yaml").write_text("a 1")
    parse = Lines()
    async with watching(manifests, parse) as reports:
        await reports.declare(a="1")
    assert set(parse.calls) == {"a.yaml"}


async def test_a_change_during_the_listing_is_not_lost(manifests: Path) -> None:
    """After a change between listing and report, the directory is listed again (C08 case 1)."""
    (manifests / "a.yaml").write_text("a 1")
    written: list[bool] = []

    def write_more(_name: str) -> None:
        if not written:
            written.append(True)
            (manifests / "b.yaml").write_text("b 1")
            (manifests / "a.yaml").rename(manifests / "c.yaml")

    async with watching(manifests, Lines(before=write_more)) as reports:
        await reports.declare(a="1", b="1")
    assert len(reports.all) == 1


async def test_a_directory_under_steady_changes_is_not_complete(manifests: Path) -> None:
    """Under steady changes, the present documents are reported, and none as removed."""
    (manifests / "a.yaml").write_text("a 1")
    resting = threading.Event()

    def churn(_name: str) -> None:
        if not resting.is_set():
            put(manifests / "busy.yaml", f"busy {time.monotonic_ns()}")

    async with watching(manifests, Lines(before=churn)) as reports:
        report = await reports.until(lambda _report: True)
        assert isinstance(report, Snapshot)
        assert not report.complete
        assert held(report)["a"] == "1"
        resting.set()
        await reports.until(lambda report: isinstance(report, Snapshot) and report.complete)


async def test_a_burst_is_one_report(manifests: Path) -> None:
    """A hundred files written in one go are listed once or twice, not a hundred times."""
    async with watching(manifests) as reports:
        await reports.declare()
        for number in range(100):
            put(manifests / f"f{number}.yaml", f"k{number} 1")
        await reports.declare(**{f"k{number}": "1" for number in range(100)})
        assert len(reports.all) <= 3


async def test_a_file_is_read_after_its_writer_has_finished(
    manifests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is created and filled within a burst is read when it is filled."""
    monkeypatch.setattr(change_hints, "DEBOUNCE", 1.0)
    monkeypatch.setattr(change_hints, "MAX_DEBOUNCE", 4.0)
    parse = Lines()
    async with watching(manifests, parse) as reports:
        await reports.declare()
        write(manifests / "a.yaml", "")
        await trio.sleep(0.05)  # the watcher gets the hint now
        write(manifests / "a.yaml", "a 1")
        await reports.declare(a="1")
    assert parse.calls == {"a.yaml": 1}


async def test_an_unchanged_directory_is_reported_once(
    manifests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often an unchanged directory is listed, it is reported once."""
    monkeypatch.setattr(directory_module, "RELIST", 0.01)
    (manifests / "a.yaml").write_text("a 1")
    often, count = trio.Event(), 0

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            trio.from_thread.run_sync(often.set)
        return read_listing(*arguments)

    monkeypatch.setattr(directory_module, "read_listing", counted)
    async with watching(manifests) as reports:
        with trio.fail_after(SOON):
            await often.wait()
        assert len(reports.all) == 1


async def test_the_queue_may_overflow(manifests: Path) -> None:
    """After more events than the kernel queues, the report is a fresh listing (C08)."""
    (manifests / "a.yaml").write_text("a 1")
    events = queue_limit()
    async with watching(manifests) as reports:
        await reports.declare(a="1")
        # The event loop does not run meanwhile, so the queue is not read. The last file's own
        # event is the one that is lost.
        for _ in range(events // 4 + 1):
            (manifests / "a.yaml").rename(manifests / "b.yaml")
            (manifests / "b.yaml").rename(manifests / "a.yaml")
        (manifests / "last.yaml").write_text("last 1")
        await reports.declare(a="1", last="1")


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_after_any_history_the_report_is_a_fresh_listing(manifests: Path, seed: int) -> None:
    """After random writes, renames, deletions and swaps the report is a fresh listing (C08)."""
    chance = random.Random(seed)
    async with watching(manifests) as reports:
        for turn in range(400):
            disturb(manifests, chance, turn)
            if chance.random() < 0.2:
                await trio.sleep(chance.random() / 50)
        (manifests / "end.yaml").write_text("end 1")
        fresh = read_listing(manifests, {}, Lines())
        await reports.declare(
            **{m.name: m.spec["value"] for file in fresh.files.values() for m in file.manifests}
        )


def disturb(directory: Path, chance: random.Random, turn: int) -> None:
    """Do one random change to *directory*; each key remains in one file."""
    name = chance.choice("abcdef")
    file, parked = directory / f"{name}.yaml", directory / f"{name}.parked"
    text = f"{name} {turn % 3}\n{name}{name} {turn % 2}"
    action = chance.choice(["put", "write", "write", "delete", "park", "unpark", "swap"])
    if action == "put":
        put(file, text)
    elif action == "write":
        file.write_text(text)
    elif action == "delete":
        file.unlink(missing_ok=True)
    elif action == "park" and file.exists():
        file.rename(parked)
    elif action == "unpark" and parked.exists():
        parked.rename(file)
    elif action == "swap" and chance.random() < 0.1:
        old = directory.with_name("old")
        directory.rename(old)
        shutil.copytree(old, directory)
        shutil.rmtree(old)


async def test_unchanged_files_are_not_parsed_again(manifests: Path) -> None:
    """Only a file that changed is parsed, and an unchanged directory is not reported."""
    for name in "abc":
        (manifests / f"{name}.yaml").write_text(f"{name} 1")
    parse = Lines()
    async with watching(manifests, parse) as reports:
        await reports.declare(a="1", b="1", c="1")
        put(manifests / "b.yaml", "b 2")
        await reports.declare(a="1", b="2", c="1")
        (manifests / "c.yaml").touch()
        put(manifests / "d.yaml", "")
        put(manifests / "a.yaml", "a 9")
        await reports.declare(a="9", b="2", c="1")
    assert parse.calls == {"a.yaml": 2, "b.yaml": 2, "c.yaml": 1, "d.yaml": 1}
    assert len(reports.all) == len(set(map(str, reports.all)))


async def test_an_invalid_file_keeps_its_last_good_documents(manifests: Path) -> None:
    """A file with a fault keeps its last good documents, and the directory is incomplete."""
    (manifests / "a.yaml").write_text("a 1\nb 1")
    (manifests / "z.yaml").write_text("z 1")
    async with watching(manifests) as reports:
        await reports.declare(a="1", b="1", z="1")
        (manifests / "z.yaml").unlink()
        put(manifests / "a.yaml", "a 2\n!")
        report = await reports.incomplete(f"{manifests}/a.yaml:2:1: is wrong")
        assert held(report) == {"a": "2", "b": "1"}
        put(manifests / "a.yaml", "a 3")
        await reports.declare(a="3")


async def test_a_new_invalid_file_makes_the_directory_incomplete(manifests: Path) -> None:
    """A fault in a new file counts like one in an old file (C10 case 3)."""
    (manifests / "a.yaml").write_text("!")
    (manifests / "b.yaml").write_text("b 1")
    async with watching(manifests) as reports:
        assert held(await reports.incomplete("is wrong")) == {"b": "1"}
        (manifests / "a.yaml").unlink()
        await reports.declare(b="1")


async def test_files_that_cannot_be_read_are_named(manifests: Path) -> None:
    """A FIFO, a folder, a dangling link, a huge and a crashing file: one problem each, no hang."""
    os.mkfifo(manifests / "fifo.yaml")
    (manifests / "folder.yaml").mkdir()
    (manifests / "dangling.yaml").symlink_to("nowhere")
    (manifests / "device.yaml").symlink_to("/dev/zero")
    (manifests / "huge.yaml").write_bytes(b"x" * (MAX_FILE_BYTES + 1))
    (manifests / "boom.yaml").write_text("boom")
    (manifests / "fine.yaml").write_text("fine 1")
    async with watching(manifests) as reports:
        report = await reports.incomplete("fifo.yaml")
    assert held(report) == {"fine": "1"}
    told = [(Path(p.origin.file).name, p.message) for p in report.problems]
    assert told == [
        ("boom.yaml", "cannot be parsed: RecursionError: too deep"),
        (
            "dangling.yaml",
            "cannot be read: its symbolic link has no target (No such file or directory)",
        ),
        ("device.yaml", "is not a regular file: move it elsewhere or rename it"),
        ("fifo.yaml", "is not a regular file: move it elsewhere or rename it"),
        ("folder.yaml", "is not a regular file: move it elsewhere or rename it"),
        ("huge.yaml", "is larger than 1 MiB: split it into several files"),
    ]


async def test_a_file_name_that_is_not_utf8_is_shown_as_text(manifests: Path) -> None:
    """A file name that is not UTF-8 can be put into a log line."""
    name = os.fsdecode(b"caf\xe9.yaml")
    (manifests / name).write_text("!")
    async with watching(manifests) as reports:
        report = await reports.incomplete("is wrong")
    assert report.problems[0].origin.file.encode("utf-8").endswith(b"caf\\xe9.yaml")


async def test_two_documents_with_one_key_are_both_named(manifests: Path) -> None:
    """The last good one is kept until one of the two is removed."""
    (manifests / "a.yaml").write_text("a 1")
    async with watching(manifests) as reports:
        await reports.declare(a="1")
        put(manifests / "b.yaml", "b 1\na 2")
        report = await reports.incomplete("is declared at")
        assert held(report) == {"a": "1", "b": "1"}
        places = [str(problem.origin) for problem in report.problems]
        assert places == [f"{manifests}/a.yaml:1:1", f"{manifests}/b.yaml:2:1"]
        (manifests / "a.yaml").unlink()
        await reports.declare(a="2", b="1")


async def test_two_documents_with_one_key_at_the_start(manifests: Path) -> None:
    """Without a last good one neither counts, also if both are in one file."""
    (manifests / "a.yaml").write_text("a 1\nc 1\nc 2")
    (manifests / "b.yaml").write_text("a 2\nb 1")
    async with watching(manifests) as reports:
        report = await reports.incomplete("is declared at")
        assert held(report) == {"b": "1"}
        assert len(report.problems) == 4


async def test_a_half_written_file_removes_nothing(manifests: Path) -> None:
    """A file that lost documents counts only after STABLE_AFTER seconds without a write."""
    (manifests / "a.yaml").write_text("a 1\nb 1\nc 1")
    async with watching(manifests) as reports:
        await reports.declare(a="1", b="1", c="1")
        file = (manifests / "a.yaml").open("w")
        with file:
            file.write("a 1\n")
            file.flush()
            # Something else happens in the directory, so that it is listed.
            put(manifests / "z.yaml", "z 1")
            for _ in range(20):
                await trio.sleep(0.05)  # a slow writer, whom the watcher outwaits in vain
                file.write("\n")
                file.flush()
            file.write("b 1\nc 1")
        await reports.declare(a="1", b="1", c="1", z="1")
        # Documents that stay out are gone in the end.
        (manifests / "a.yaml").write_text("a 1")
        await reports.declare(a="1", z="1")
    for report in reports.all[1:-1]:
        assert isinstance(report, Snapshot)
        assert {"a", "b", "c"} <= held(report).keys()


async def test_a_mounted_configmap_is_swapped_as_a_whole(manifests: Path) -> None:
    """A new target of the ..data link is listed at once."""
    for version in ("1", "2"):
        (manifests / f"..{version}").mkdir()
        (manifests / f"..{version}" / "a.yaml").write_text(f"a {version}")
        (manifests / f"..{version}" / "b.yaml").write_text(f"b {version}")
    (manifests / "..data").symlink_to("..1")
    for name in ("a.yaml", "b.yaml"):
        (manifests / name).symlink_to(f"..data/{name}")
    async with watching(manifests) as reports:
        await reports.declare(a="1", b="1")
        (manifests / "..data_tmp").symlink_to("..2")
        (manifests / "..data_tmp").rename(manifests / "..data")
        shutil.rmtree(manifests / "..1")
        await reports.declare(a="2", b="2")
    assert len(reports.all) == 2


async def test_a_linked_directory_is_swapped(tmp_path: Path) -> None:
    """A path that is a link is followed when the link is swapped, and then watched there."""
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(f"a {version}")
    (tmp_path / "current").symlink_to("1")
    async with watching(tmp_path / "current") as reports:
        await reports.declare(a="1")
        (tmp_path / "next").symlink_to("2")
        (tmp_path / "next").rename(tmp_path / "current")
        await reports.declare(a="2")
        (tmp_path / "2" / "b.yaml").write_text("b 2")
        await reports.declare(a="2", b="2")


async def test_missing_is_not_empty(manifests: Path) -> None:
    """A removed directory is Unavailable, and is read again when it returns (C10 case 5)."""
    (manifests / "a.yaml").write_text("a 1")
    async with watching(manifests) as reports:
        await reports.declare(a="1")
        move(manifests, manifests.with_name("away"))
        await reports.unavailable("does not exist")
        move(manifests.with_name("away"), manifests)
        await reports.declare(a="1")
        (manifests / "b.yaml").write_text("b 1")
        await reports.declare(a="1", b="1")
        shutil.rmtree(manifests)
        await reports.unavailable("does not exist")
        write(manifests, "a file")
        await reports.unavailable("is not a directory")
    assert not [r for r in reports.all if isinstance(r, Snapshot) and not r.manifests]


async def test_a_directory_missing_with_its_parents_is_awaited(tmp_path: Path) -> None:
    """A directory that is missing at the start is awaited, with its parents."""
    path = tmp_path / "x" / "y"
    async with watching(path) as reports:
        await reports.unavailable("does not exist")
        path.mkdir(parents=True)
        (path / "a.yaml").write_text("a 1")
        await reports.declare(a="1")


async def test_empty_in_place_of_another_is_not_empty(manifests: Path) -> None:
    """An empty directory in place of another is Unavailable; a file with a comment confirms it."""
    (manifests / "a.yaml").write_text("a 1")
    async with watching(manifests) as reports:
        before = await reports.declare(a="1")
        remake(manifests)
        await reports.unavailable("is empty and is not the directory it was")
        (manifests / "none.yaml").write_text("\n")
        after = await reports.declare()
        assert after.identity != before.identity


async def test_an_emptied_directory_is_empty(manifests: Path) -> None:
    """Removing the last file of the same directory gives a complete empty report (C10 case 2)."""
    (manifests / "a.yaml").write_text("a 1")
    async with watching(manifests) as reports:
        identity = (await reports.declare(a="1")).identity
        (manifests / "a.yaml").unlink()
        assert (await reports.declare()).identity == identity


async def test_the_identity_of_an_earlier_process_counts(manifests: Path) -> None:
    """At the start, too, only the stored directory may be empty (C10 case 5)."""
    async with watching(manifests) as reports:
        identity = (await reports.declare()).identity
    async with watching(manifests, remembered=identity) as reports:
        await reports.declare()
    async with watching(manifests, remembered="1:2") as reports:
        await reports.unavailable("is empty and is not the directory it was")
    (manifests / "a.yaml").write_text("a 1")
    async with watching(manifests, remembered="1:2") as reports:
        assert (await reports.declare(a="1")).identity == identity


async def test_another_device_is_not_the_directory(
    manifests: Path, tmp_path: Path, elsewhere: Path
) -> None:
    """Files on another device than the last good listing's are not its files (C10 case 5)."""
    (manifests / "a.yaml").write_text("a 1")
    (elsewhere / "b.yaml").write_text("b 1")
    link, following = tmp_path / "link", tmp_path / "following"
    link.symlink_to(manifests)
    parse = Lines()
    async with watching(link, parse) as reports:
        await reports.declare(a="1")
        following.symlink_to(elsewhere)
        following.rename(link)
        await reports.unavailable("is on another device")
    assert parse.calls == {"a.yaml": 1}


async def test_a_stalled_file_system_blocks_nothing(
    manifests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that hangs is reported while it runs, and a cancellation takes effect at once."""
    monkeypatch.setattr(directory_module, "SLOW", 0.05)
    (manifests / "a.yaml").write_text("a 1")
    stalled = threading.Event()
    try:
        async with watching(manifests, Lines(before=lambda _name: stalled.wait())) as reports:
            report = await reports.unavailable("and is not finished")
            assert report.reason == f"listing {manifests} has taken 50ms and is not finished"
            stalled.set()
            await reports.declare(a="1")
            stalled.clear()
            put(manifests / "a.yaml", "a 2")
            await reports.unavailable("and is not finished")
            cancelled = time.monotonic()
        assert time.monotonic() - cancelled < 5
    finally:
        stalled.set()


async def test_without_inotify_the_full_listing_remains(
    manifests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inotify there is a problem that says so, and changes are found by listing."""

    def refused(**_options: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(change_hints, "Inotify", refused)
    monkeypatch.setattr(directory_module, "RELIST", 0.1)
    async with watching(manifests) as reports:
        report = await reports.declare()
        assert "changes are noticed at full listings only" in str(report.problems[0])
        (manifests / "a.yaml").write_text("a 1")
        await reports.declare(a="1")


async def test_a_change_without_a_hint_is_found_by_the_full_listing(
    manifests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of a link's target in another directory is found by the next full listing."""
    monkeypatch.setattr(directory_module, "RELIST", 0.1)
    (tmp_path / "target").write_text("a 1")
    (manifests / "a.yaml").symlink_to(tmp_path / "target")
    async with watching(manifests) as reports:
        await reports.declare(a="1")
        (tmp_path / "target").write_text("a 2")
        await reports.declare(a="2")


async def test_listing_and_reading_give_no_hints(manifests: Path) -> None:
    """The watcher's own listing and reading give no hints, so it does not wake itself (C11)."""
    (manifests / "a.yaml").write_text("a 1")
    parse = Lines()
    with Hints(manifests) as hints:
        hints.subscribe()
        async with watching(manifests, parse) as reports:
            await reports.declare(a="1")
        assert not await hints.take_pending()


async def test_changes_of_other_files_give_no_hints(manifests: Path) -> None:
    """Writing another file, in the directory or beside it, does not wake the watcher."""
    log = manifests / "daemon.log"
    log.write_text("1")
    with Hints(manifests) as hints:
        hints.subscribe()
        log.write_text("2")
        (manifests.parent / "beside.yaml").write_text("3")
        assert not await hints.take_pending()
        (manifests / "a.yaml").write_text("4")
        assert await hints.wait(SOON)


def test_its_name_is_stable() -> None:
    """The name consists of the configured path, and the repr shows counts."""
    watcher = DirectoryWatcher(Path("/etc/x"), Lines())
    assert watcher.name == "directory /etc/x"
    assert watcher.declares
    assert repr(watcher) == "<DirectoryWatcher /etc/x: 0 files>"
