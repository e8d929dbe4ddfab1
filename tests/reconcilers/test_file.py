"""Rules of the file reconciler, with real files and programs and a request without a daemon."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from reconciled.api import Outcome, Request, Result
from reconciled.reconcilers.file.diff import describe_change
from reconciled.reconcilers.file.reconciler import File, FileOptions, FileReconciler
from reconciled.reconcilers.file.write_record import WriteRecord

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeRequest


class World:
    """A root for the declared file, a manifest directory, and state kept between runs."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.base = directory / "manifests"
        self.state = directory / "state"
        self.file = self.root / "motd"
        self.root.mkdir(exist_ok=True)
        self.base.mkdir(exist_ok=True)
        self.reconciler = FileReconciler(FileOptions(root=str(self.root)))
        self.last: FakeRequest[File] | None = None

    def ask(self, **fields: Any) -> Request[File]:
        """A request for a spec with *fields*; by default with some content."""
        if "source" not in fields:
            fields.setdefault("content", "hello\n")
        spec = File(path=fields.pop("path", str(self.file)), **fields)
        self.last = fake = FakeRequest(spec, base=self.base, state=self.state)
        return cast("Request[File]", fake)

    async def run(self, **fields: Any) -> Result:
        """Reconcile once."""
        return await self.reconciler.reconcile(self.ask(**fields))

    async def remove(self, **fields: Any) -> Result:
        """Remove once."""
        return await self.reconciler.remove(self.ask(**fields))

    @property
    def steps(self) -> list[str]:
        """The steps of the last request, in order."""
        assert self.last is not None
        return [step for operation in self.last.operations for step in operation.steps]

    @property
    def warnings(self) -> list[str]:
        """The events that the last request logged."""
        assert self.last is not None
        return [event for event, _ in self.last.log.lines]

    def script(self, name: str, text: str) -> list[str]:
        """Write a program ./NAME in the manifest's directory."""
        file = self.base / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return [f"./{name}"]

    def lines(self, name: str) -> list[str]:
        """The lines of a file in the manifest's directory."""
        file = self.base / name
        return file.read_text().splitlines() if file.exists() else []

    def names(self) -> list[str]:
        """The names in the root."""
        return sorted(entry.name for entry in self.root.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A new World."""
    return World(tmp_path)


async def test_missing_file_is_written_and_present_one_only_read(world: World) -> None:
    """The first run writes in a critical operation; the second run only reads."""
    result = await world.run(mode="0640")
    assert (result.outcome, result.reason) == (Outcome.DONE, "created")
    assert world.file.read_text() == "hello\n"
    assert world.file.stat().st_mode & 0o7777 == 0o640
    assert world.last is not None
    assert [(o.name, o.ended, o.budgets) for o in world.last.operations] == [
        ("write", "done", [60.0])
    ]
    before = {file: file.lstat().st_ctime_ns for file in world.state.parent.rglob("*")}
    result = await world.run(mode="0640")
    assert (result.outcome, result.reason) == (Outcome.DONE, "")
    assert world.last.operations == []
    assert {file: file.lstat().st_ctime_ns for file in world.state.parent.rglob("*")} == before


async def test_the_budget_fits_the_hard_limit(world: World) -> None:
    """The budget is at most the configured limit of critical operations."""
    request = world.ask()
    assert world.last is not None
    world.last.critical_limit = 7.0
    await world.reconciler.reconcile(request)
    assert world.last.operations[0].budgets == [7.0]


async def test_drift_is_corrected(world: World) -> None:
    """Changed content and mode are as declared after the next run."""
    await world.run(mode="0640")
    world.file.write_text("mine\n")
    world.file.chmod(0o666)
    result = await world.run(mode="0640")
    assert result.reason == "content, mode"
    assert world.file.read_text() == "hello\n"
    assert world.file.stat().st_mode & 0o7777 == 0o640


async def test_source_is_read_beneath_the_manifest(world: World) -> None:
    """A source is relative to the manifest and must be beneath its directory."""
    (world.base / "..data").mkdir()
    (world.base / "..data" / "motd").write_text("from source\n")
    (world.base / "motd").symlink_to("..data/motd")
    (world.base.parent / "secret").write_text("secret")
    await world.run(source="motd")
    assert world.file.read_text() == "from source\n"
    for bad in ("../secret", str(world.base.parent / "secret")):
        result = await world.run(source=bad)
        assert result.outcome is Outcome.TERMINAL
    assert world.file.read_text() == "from source\n"
    result = await world.run(source="missing")
    assert result.outcome is Outcome.RETRY
    assert "missing" in result.reason


@pytest.mark.parametrize("path", ["../out", "/etc/out", "link/out"])
async def test_path_out_of_the_root_is_terminal(world: World, path: str) -> None:
    """A path or symlink out of options.root is terminal, and nothing is written."""
    outside = world.root.parent / "outside"
    outside.mkdir()
    (world.root / "link").symlink_to(outside)
    result = await world.run(path=path)
    assert result.outcome is Outcome.TERMINAL
    assert list(outside.iterdir()) == []
    assert world.last is not None
    assert world.last.operations == []


async def test_missing_directory_is_retried_and_named(world: World) -> None:
    """A missing directory is a retry that names it."""
    result = await world.run(path=str(world.root / "no" / "motd"))
    assert result.outcome is Outcome.RETRY
    assert f"directory {world.root}/no does not exist" in result.reason


async def test_an_owner_that_cannot_be_set_is_terminal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that the kernel refuses is terminal, and the old file and its owner are kept."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    world.file.write_text("old")
    monkeypatch.setattr(os, "fchown", refuse)
    result = await world.run(owner="4242")
    assert result.outcome is Outcome.TERMINAL
    assert "4242" in result.reason
    assert world.file.read_text() == "old"
    assert world.names() == ["motd"]


@pytest.mark.processes
async def test_validate_decides_before_the_rename(world: World) -> None:
    """``validate`` gets the new file as last argument; if it fails, the old file is kept."""
    world.file.write_text("old\n")
    check = world.script("check", 'cat "$2" >> seen; cat ../root/motd >> seen; test "$1" = -x')
    result = await world.run(validate=[*check, "-y"])
    assert result.outcome is Outcome.RETRY
    assert "./check ended with exit code 1" in result.reason
    assert world.file.read_text() == "old\n"
    assert world.names() == ["motd"]
    assert world.last is not None
    assert world.last.operations[0].ended == "failed"
    assert world.lines("seen") == ["hello", "old"]
    result = await world.run(validate=[*check, "-x"])
    assert result.outcome is Outcome.DONE
    assert world.file.read_text() == "hello\n"


@pytest.mark.processes
async def test_after_runs_once_for_each_change(world: World) -> None:
    """``after`` runs once after each replacement, with the new file in place."""
    after = world.script("after", "cat ../root/motd >> ran")
    await world.run(after=after)
    await world.run(after=after)
    assert world.lines("ran") == ["hello"]
    await world.run(after=after, content="two\n")
    assert world.lines("ran") == ["hello", "two"]
    assert world.steps == ["replace", "after"]


@pytest.mark.processes
async def test_failed_after_is_repeated_until_it_succeeds(world: World) -> None:
    """A failed after runs again in the next run, even if the file is as desired."""
    after = world.script("after", "echo once >> ran; test -e may")
    result = await world.run(after=after)
    assert result.outcome is Outcome.RETRY
    assert world.file.read_text() == "hello\n"
    result = await world.run(after=after)
    assert result.outcome is Outcome.RETRY
    assert world.steps == []
    (world.base / "may").write_text("")
    result = await world.run(after=after)
    assert (result.outcome, result.reason) == (Outcome.DONE, "ran after")
    assert world.steps == ["after"]
    assert (await world.run(after=after)).reason == ""
    assert world.lines("ran") == ["once"] * 3


async def test_removal_deletes_written_content(world: World) -> None:
    """A file with recorded content is removed together with its record."""
    await world.run()
    request = world.ask()
    assert (await world.reconciler.remove(request)).outcome is Outcome.DONE
    assert world.names() == []
    assert list(request.memory.iterdir()) == []
    assert (await world.remove()).outcome is Outcome.DONE


async def test_removal_keeps_unmanaged_content(world: World) -> None:
    """A file that was changed since, or never written here, is kept with a warning."""
    await world.run()
    world.file.write_text("mine\n")
    result = await world.remove()
    assert result.outcome is Outcome.DONE
    assert world.file.read_text() == "mine\n"
    assert world.warnings == ["file.not_removed"]
    world.file.write_text("hello\n")  # adopted: as desired before the first run
    await world.run()
    await world.remove()
    assert world.file.read_text() == "hello\n"
    assert world.warnings == ["file.not_removed"]


async def test_removal_knows_content_of_a_deleted_source(world: World) -> None:
    """Content from a source is recognised after the source was deleted."""
    (world.base / "motd").write_text("from source\n")
    await world.run(source="motd")
    (world.base / "motd").unlink()
    await world.remove(source="motd")
    assert world.names() == []


async def test_file_at_a_former_path_is_removed(world: World) -> None:
    """If the spec names another path, the old file is removed after the new one was written."""
    await world.run()
    other = str(world.root / "other")
    await world.run(path=other)
    assert world.names() == ["other"]
    assert world.steps == ["replace", f"remove {world.file}"]
    assert (await world.run(path=other)).reason == ""


async def test_temporary_of_a_killed_replacement_is_removed(world: World) -> None:
    """The next run removes the recorded temporary file of a killed run, and no other."""
    await world.run()
    request = world.ask()
    left, other = ".motd.reconciled-aaaaaaaa", ".motd.reconciled-bbbbbbbb"
    for name in (left, other):
        (world.root / name).write_text("half")
    record = await WriteRecord.read(request.memory)
    await record.begin(str(world.file), "0", left, after_pending=False).save(request.memory)
    assert (await world.reconciler.reconcile(request)).reason == "finished an interrupted write"
    assert world.names() == [other, "motd"]
    assert (await world.run()).reason == ""


async def test_damaged_record_keeps_files(world: World) -> None:
    """An unreadable record causes neither a removal nor an error."""
    await world.run()
    request = world.ask()
    (request.memory / ".written").write_text('{"files": 3')
    assert (await world.run()).outcome is Outcome.DONE
    await world.remove()
    assert world.names() == ["motd"]


async def test_cancelled_run_writes_all_or_nothing(world: World) -> None:
    """A run that is cancelled at its start writes nothing."""
    with trio.CancelScope() as scope:
        scope.cancel(reason="test")
        await world.run()
    assert scope.cancelled_caught
    assert world.names() == []


async def test_plan_lists_changes_without_effects(world: World) -> None:
    """A plan lists creation, change with diff, after, and removal at a former path."""
    (change,) = await world.reconciler.plan(world.ask())
    assert (change.action, change.what) == ("create", str(world.file))
    assert "+hello" in change.detail
    assert world.names() == []
    await world.run()
    assert await world.reconciler.plan(world.ask()) == []
    change, action = await world.reconciler.plan(
        world.ask(content="bye\n", mode="0604", after=["true", "-x"])
    )
    assert (change.action, change.detail.splitlines()[0]) == ("change", "mode")
    assert "-hello\n+bye" in change.detail
    assert (action.action, action.what) == ("run", "true -x")
    changes = await world.reconciler.plan(world.ask(path=str(world.root / "b")))
    assert [(c.action, c.what) for c in changes] == [
        ("create", str(world.root / "b")),
        ("remove", str(world.file)),
    ]
    assert world.file.read_text() == "hello\n"


async def test_plan_hides_private_content(world: World) -> None:
    """A plan shows no content of a file that group and others cannot read before or after."""
    (change,) = await world.reconciler.plan(world.ask(content="hunter2", mode="0600"))
    assert "hunter2" not in change.detail
    assert "7 bytes" in change.detail
    world.file.write_text("hunter3")
    world.file.chmod(0o600)
    for fields in ({"mode": "0644"}, {}):
        (change,) = await world.reconciler.plan(world.ask(content="public", **fields))
        assert "hunter3" not in change.detail


def test_diff_is_bounded_and_printable() -> None:
    """A long diff is cut with a count, binary content is hashed, control codes are replaced."""
    long = "".join(f"{n}\n" for n in range(1000)).encode()
    lines = describe_change("/x", b"", long, private=False).splitlines()
    assert len(lines) == 201
    assert lines[-1] == "… 803 more lines"
    assert "sha256" in describe_change("/x", b"", b"\0", private=False)
    assert "sha256" in describe_change("/x", b"", b"a\n" * 40_000, private=False)
    assert "\x1b" not in describe_change("/x", b"", b"\x1b[2J\n", private=False)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "either content or source"),
        ({"content": "x", "source": "y"}, "either content or source"),
        ({"content": "x", "mode": "0x44"}, "quoted octal"),
        ({"content": "x", "mode": "0999"}, "quoted octal"),
        ({"content": "x", "after": [""]}, "after has an empty program"),
    ],
)
def test_invalid_spec_is_refused(fields: dict[str, Any], why: str) -> None:
    """Each error in a spec is a ValueError with its remedy."""
    with pytest.raises(ValueError, match=why):
        File(path="/etc/motd", **fields)


CHILD = """
import sys, trio
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_file import World
world = World(Path(sys.argv[2]))
async def main():
    await world.run(content="new\\n", after=["./after"])
trio.run(main)
"""


@pytest.mark.processes
async def test_after_runs_again_if_killed_during_it(world: World) -> None:
    """If the daemon is killed between the rename and the end of after, the next run repeats it."""
    after = world.script(
        "after", "test -e second && echo ran >> ran || kill -9 $(ps -o ppid= -p $PPID)"
    )
    child = await trio.run_process(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(world.root.parent)],
        check=False,
    )
    assert child.returncode == -9
    assert world.file.read_text() == "new\n"
    assert world.lines("ran") == []
    (world.base / "second").write_text("")
    result = await world.run(content="new\n", after=after)
    assert result.reason == "ran after"
    assert world.lines("ran") == ["ran"]
    assert world.names() == ["motd"]
