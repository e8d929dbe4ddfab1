"""Rules of the file reconciler, with real files and programs and a request without a host."""

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
    """A root with a file to be, a manifest directory, and the state that outlives runs."""

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
        """A request for a spec of *fields*; a content is the default."""
        if "source" not in fields:
            fields.setdefault("content", "hello\n")
        spec = File(path=fields.pop("path", str(self.file)), **fields)
        self.last = fake = FakeRequest(spec, base=self.base, state=self.state)
        return cast("Request[File]", fake)

    async def run(self, **fields: Any) -> Result:
        """One reconcile."""
        return await self.reconciler.reconcile(self.ask(**fields))

    async def remove(self, **fields: Any) -> Result:
        """One removal."""
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
        """A program ./NAME beside the manifest."""
        file = self.base / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return [f"./{name}"]

    def lines(self, name: str) -> list[str]:
        """The lines of a file beside the manifest."""
        file = self.base / name
        return file.read_text().splitlines() if file.exists() else []

    def names(self) -> list[str]:
        """What stands in the root."""
        return sorted(entry.name for entry in self.root.iterdir())


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A fresh world."""
    return World(tmp_path)


async def test_a_missing_file_is_written_and_a_present_one_only_read(world: World) -> None:
    """The first run writes inside a critical operation; the second writes nothing."""
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
    """Where the configured limit of critical operations is lower, it is the budget."""
    request = world.ask()
    assert world.last is not None
    world.last.critical_limit = 7.0
    await world.reconciler.reconcile(request)
    assert world.last.operations[0].budgets == [7.0]


async def test_drift_is_put_right(world: World) -> None:
    """Content and mode that somebody changed are as declared after the next run."""
    await world.run(mode="0640")
    world.file.write_text("mine\n")
    world.file.chmod(0o666)
    result = await world.run(mode="0640")
    assert result.reason == "content, mode"
    assert world.file.read_text() == "hello\n"
    assert world.file.stat().st_mode & 0o7777 == 0o640


async def test_source_is_read_beneath_the_manifest(world: World) -> None:
    """A source is relative to the manifest and never outside its directory."""
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
async def test_what_leads_out_of_the_root_is_terminal(world: World, path: str) -> None:
    """A path or symlink out of options.root is a terminal error and writes nothing."""
    outside = world.root.parent / "outside"
    outside.mkdir()
    (world.root / "link").symlink_to(outside)
    result = await world.run(path=path)
    assert result.outcome is Outcome.TERMINAL
    assert list(outside.iterdir()) == []
    assert world.last is not None
    assert world.last.operations == []


async def test_a_missing_directory_is_retried_and_named(world: World) -> None:
    """A directory that may yet be made is no reason to give up."""
    result = await world.run(path=str(world.root / "no" / "motd"))
    assert result.outcome is Outcome.RETRY
    assert f"directory {world.root}/no does not exist" in result.reason


async def test_an_owner_that_cannot_be_set_is_terminal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that the kernel refuses is terminal, and the old file stays with its owner."""

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
    """The validator gets the new file as last argument; if it fails the old file stays."""
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
    """The action runs after a replacement, sees the new file, and not without a change."""
    after = world.script("after", "cat ../root/motd >> ran")
    await world.run(after=after)
    await world.run(after=after)
    assert world.lines("ran") == ["hello"]
    await world.run(after=after, content="two\n")
    assert world.lines("ran") == ["hello", "two"]
    assert world.steps == ["replace", "after"]


@pytest.mark.processes
async def test_a_failed_after_is_owed_until_it_succeeds(world: World) -> None:
    """After a failed action the next run runs it again, though the file is as desired."""
    after = world.script("after", "echo once >> ran; test -e may")
    result = await world.run(after=after)
    assert result.outcome is Outcome.RETRY
    assert world.file.read_text() == "hello\n"
    result = await world.run(after=after)
    assert result.outcome is Outcome.RETRY
    assert world.steps == []
    (world.base / "may").write_text("")
    result = await world.run(after=after)
    assert (result.outcome, result.reason) == (Outcome.DONE, "after was run")
    assert world.steps == ["after"]
    assert (await world.run(after=after)).reason == ""
    assert world.lines("ran") == ["once"] * 3


async def test_removal_takes_what_was_written(world: World) -> None:
    """A file with content of ours goes, and so does the note about it."""
    await world.run()
    request = world.ask()
    assert (await world.reconciler.remove(request)).outcome is Outcome.DONE
    assert world.names() == []
    assert list(request.memory.iterdir()) == []
    assert (await world.remove()).outcome is Outcome.DONE


async def test_removal_leaves_what_others_wrote(world: World) -> None:
    """A file that was changed since, or that was never written from here, stays with a warning."""
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


async def test_removal_knows_content_whose_source_is_gone(world: World) -> None:
    """What came from a source is recognised when manifest and source went together."""
    (world.base / "motd").write_text("from source\n")
    await world.run(source="motd")
    (world.base / "motd").unlink()
    await world.remove(source="motd")
    assert world.names() == []


async def test_a_file_at_a_former_path_is_removed(world: World) -> None:
    """When the spec names another path, the file at the old one goes after the new one stands."""
    await world.run()
    other = str(world.root / "other")
    await world.run(path=other)
    assert world.names() == ["other"]
    assert world.steps == ["replace", f"remove {world.file}"]
    assert (await world.run(path=other)).reason == ""


async def test_what_a_killed_replacement_left_is_removed_by_its_name(world: World) -> None:
    """The new file of a run that died goes with the next run; others like it stay."""
    await world.run()
    request = world.ask()
    left, foreign = ".motd.reconciled-aaaaaaaa", ".motd.reconciled-bbbbbbbb"
    for name in (left, foreign):
        (world.root / name).write_text("half")
    note = await WriteRecord.read(request.memory)
    await note.begin(str(world.file), "0", left, after_pending=False).save(request.memory)
    assert (await world.reconciler.reconcile(request)).reason == "cleared"
    assert world.names() == [foreign, "motd"]
    assert (await world.run()).reason == ""


async def test_a_damaged_note_means_nothing_is_ours(world: World) -> None:
    """An unreadable note never makes a removal or an error."""
    await world.run()
    request = world.ask()
    (request.memory / ".written").write_text('{"files": 3')
    assert (await world.run()).outcome is Outcome.DONE
    await world.remove()
    assert world.names() == ["motd"]


async def test_a_cancellation_leaves_the_replacement_whole(world: World) -> None:
    """Cancelled from its start on, the run either writes the whole file or nothing."""
    with trio.CancelScope() as scope:
        scope.cancel(reason="test")
        await world.run()
    assert scope.cancelled_caught
    assert world.names() == []


async def test_plan_shows_what_would_be_done_and_does_nothing(world: World) -> None:
    """Creation, change with its diff, the action and the removal at a former path are planned."""
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


async def test_plan_keeps_secrets(world: World) -> None:
    """Of a file that group and others may not read, before or after, no content is shown."""
    (change,) = await world.reconciler.plan(world.ask(content="hunter2", mode="0600"))
    assert "hunter2" not in change.detail
    assert "7 bytes" in change.detail
    world.file.write_text("hunter3")
    world.file.chmod(0o600)
    for fields in ({"mode": "0644"}, {}):
        (change,) = await world.reconciler.plan(world.ask(content="public", **fields))
        assert "hunter3" not in change.detail


def test_a_diff_is_bounded_and_harmless() -> None:
    """A long diff is cut with a count, binary is summed up, and control codes are not passed on."""
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
def test_a_wrong_spec_says_what_to_write(fields: dict[str, Any], why: str) -> None:
    """Each fault of a spec is a ValueError with its remedy."""
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
async def test_killed_in_the_action_it_is_run_again(world: World) -> None:
    """Renamed but the action not ended: the next start runs the action."""
    after = world.script("after", 'test -e second && echo ran >> ran || kill -9 "$PPID"')
    child = await trio.run_process(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(world.root.parent)],
        check=False,
    )
    assert child.returncode == -9
    assert world.file.read_text() == "new\n"
    assert world.lines("ran") == []
    (world.base / "second").write_text("")
    result = await world.run(content="new\n", after=after)
    assert result.reason == "after was run"
    assert world.lines("ran") == ["ran"]
    assert world.names() == ["motd"]
