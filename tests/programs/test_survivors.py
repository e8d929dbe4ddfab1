"""Rules of finding programs that outlived their daemon, with real kills and forged records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))
from operations import ID, end_all_of, start_daemon, wait_for

from reconciled.core.errors import RecordDamaged
from reconciled.programs import survivors
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import boot_id, read_child, read_end
from reconciled.programs.survivors import Survivor, find_survivor

pytestmark = pytest.mark.processes

ENDS_ON_GO = "touch ready; while [ ! -e go ]; do sleep 0.01; done; exit 6"


@pytest.fixture
def op_dir(tmp_path: Path) -> Iterator[Path]:
    """The operation's directory; processes that a failed test left are killed."""
    directory = tmp_path / "operations" / ID
    yield directory
    end_all_of(directory)


def left_behind(op_dir: Path, script: str, *, budget: float = 0) -> Survivor:
    """Kill a daemon while its program runs *script*, which makes the file ``ready``."""
    where = op_dir.parents[1]
    daemon = start_daemon(op_dir, script, where=where, budget=budget)
    wait_for((where / "ready").exists)
    daemon.kill()
    daemon.wait()
    survivor = find_survivor(op_dir)
    assert survivor is not None
    return survivor


def forge(op_dir: Path, **program: Any) -> None:
    """Change the recorded program or boot."""
    data = json.loads((op_dir / "child").read_bytes())
    boot = program.pop("boot_id", None)
    if boot is not None:
        data["boot_id"] = boot
    data["program"].update(program)
    data["parent"].update(program)
    (op_dir / "child").write_text(json.dumps(data))


def alive(pid: int) -> bool:
    process = find_process(pid)
    return process is not None and process.alive


# -- finding survivors ------------------------------------------------------------


def test_hidden_process_does_not_count_as_ended(
    op_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that the sandbox hides is an error that names the remedy."""
    left_behind(op_dir, ENDS_ON_GO).close()
    monkeypatch.setattr(survivors, "is_hidden", lambda _: True)
    with pytest.raises(
        RecordDamaged, match=r"the sandbox hides its process .*: remove PrivateUsers="
    ):
        find_survivor(op_dir)


def test_never_ran(tmp_path: Path) -> None:
    """An operation without a program has no survivor."""
    assert find_survivor(tmp_path) is None


async def test_outcome_is_adopted(tmp_path: Path, op_dir: Path) -> None:
    """A surviving program is waited for, and its small parent records how it ends."""
    survivor = left_behind(op_dir, ENDS_ON_GO, budget=30)
    assert survivor.alive
    assert repr(survivor).startswith("<Survivor critical apply pid ")
    assert survivor.assignment.attempt == 1
    assert 20 < survivor.remaining() <= 30
    assert survivor.end is None
    (tmp_path / "go").touch()
    with trio.fail_after(10):
        end = await survivor.wait()
    assert end is not None
    assert (end.code, end.signal) == (6, None)
    assert not survivor.alive
    survivor.close()
    again = find_survivor(op_dir)
    assert again is not None
    assert again.end == end
    assert not again.alive


async def test_cancelled_wait_does_not_end_the_program(op_dir: Path) -> None:
    """A cancellation of wait() does not affect the program."""
    survivor = left_behind(op_dir, ENDS_ON_GO)
    with trio.move_on_after(0.2):
        await survivor.wait()
    assert alive(survivor.record.program.pid)
    survivor.close()


async def test_parent_killed(tmp_path: Path, op_dir: Path) -> None:
    """A program whose small parent was killed is waited for and has no outcome."""
    survivor = left_behind(op_dir, ENDS_ON_GO)
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    with trio.fail_after(10):
        assert await survivor.wait() is None
    assert not survivor.alive
    survivor.close()


async def test_program_killed(op_dir: Path) -> None:
    """A program that is killed has that signal as its recorded outcome."""
    survivor = left_behind(op_dir, ENDS_ON_GO)
    os.kill(survivor.record.program.pid, signal.SIGKILL)
    with trio.fail_after(10):
        end = await survivor.wait()
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGKILL)
    survivor.close()


async def test_both_killed(op_dir: Path) -> None:
    """With program and small parent killed nothing is alive, and there is no outcome."""
    survivor = left_behind(op_dir, ENDS_ON_GO)
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    os.kill(survivor.record.program.pid, signal.SIGKILL)
    with trio.fail_after(10):
        assert await survivor.wait() is None
    assert not survivor.alive
    assert read_end(op_dir) is None
    survivor.close()


async def test_members_without_parent_are_ended(tmp_path: Path, op_dir: Path) -> None:
    """wait() ends members that outlive program and small parent: one actor per key."""
    script = f"sleep 999 & echo $! > member; {ENDS_ON_GO}"
    survivor = left_behind(op_dir, script)
    member = int((tmp_path / "member").read_text())
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    os.kill(survivor.record.program.pid, signal.SIGKILL)
    # Both: until the small parent has ended, it is the one that ends the members.
    wait_for(lambda: not alive(survivor.record.program.pid))
    wait_for(lambda: not alive(survivor.record.parent.pid))
    survivor.close()
    again = find_survivor(op_dir)
    assert again is not None
    assert again.alive
    assert member in [process.pid for process in again.remaining_members()]
    with trio.fail_after(10):
        assert await again.wait() is None
    assert not alive(member)
    again.close()


# -- identity ----------------------------------------------------------------


def test_record_of_another_boot_matches_no_process(op_dir: Path) -> None:
    """A record of another boot matches no process, even if pid and start time agree."""
    real = left_behind(op_dir, ENDS_ON_GO)
    forge(op_dir, boot_id="00000000-0000-0000-0000-000000000000")
    survivor = find_survivor(op_dir)
    assert survivor is not None
    assert not survivor.alive
    assert not survivor.signal(signal.SIGKILL)
    assert alive(real.record.program.pid)
    real.close()


@pytest.mark.parametrize("what", ["program", "parent", "both"])
async def test_reused_number(op_dir: Path, what: str) -> None:
    """A process that has got a reused pid of the program or its parent is never signalled."""
    ended = left_behind(op_dir, "touch ready; exit 0")
    await ended.wait()
    ended.close()
    unrelated = subprocess.Popen(["sleep", "60"], process_group=0)  # noqa: ASYNC220 it blocks for 1 ms
    try:
        data = json.loads((op_dir / "child").read_bytes())
        for name in ("program", "parent") if what == "both" else (what,):
            data[name]["pid"] = unrelated.pid
        (op_dir / "child").write_text(json.dumps(data))
        (op_dir / "end").unlink(missing_ok=True)
        survivor = find_survivor(op_dir)
        assert survivor is not None
        assert not survivor.alive
        assert not survivor.signal(signal.SIGKILL)
        with trio.fail_after(5):
            assert await survivor.terminate(term=0.1) is None
        survivor.kill_parent()
        assert unrelated.poll() is None
    finally:
        unrelated.kill()
        unrelated.wait()


@pytest.mark.parametrize("name", ["child", "end"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"program": 3}', "\xff"])
def test_damaged_record(op_dir: Path, name: str, text: str) -> None:
    """A record that cannot be read is an error; it never means that no program runs."""
    left_behind(op_dir, "touch ready; exit 0").close()
    wait_for((op_dir / "end").exists)
    (op_dir / name).write_text(text, "latin-1")
    with pytest.raises(RecordDamaged, match=f"{name} is damaged: not a"):
        read_child(op_dir) if name == "child" else read_end(op_dir)


def test_boot_id() -> None:
    """The id of this boot is not empty and does not change."""
    assert boot_id() == boot_id() != ""


def test_older_end_is_not_adopted(op_dir: Path) -> None:
    """The end of an earlier program of the operation is not the outcome of this one."""
    survivor = left_behind(op_dir, "touch ready; exit 0")
    wait_for(lambda: not survivor.alive)
    assert survivor.end is not None
    data = json.loads((op_dir / "end").read_bytes())
    data["program"]["started"] -= 1
    (op_dir / "end").write_text(json.dumps(data))
    assert survivor.end is None
    survivor.close()


# -- ending survivors ---------------------------------------------------------------


async def test_ended_at_once(tmp_path: Path, op_dir: Path) -> None:
    """An ordinary survivor and its group get SIGTERM at once, and its end is recorded."""
    survivor = left_behind(op_dir, f"sleep 999 & echo $! > member; {ENDS_ON_GO}")
    assert survivor.remaining() == 0
    began = time.monotonic()
    with trio.fail_after(10):
        end = await survivor.terminate()
    assert time.monotonic() - began < 10
    assert end is not None
    assert end.signal == signal.SIGTERM
    assert not alive(int((tmp_path / "member").read_text()))
    survivor.close()


async def test_stubborn_survivor(op_dir: Path) -> None:
    """A survivor that ignores SIGTERM gets SIGKILL after *term* seconds."""
    survivor = left_behind(op_dir, "trap '' TERM; touch ready; while :; do sleep 0.05; done")
    with trio.fail_after(10):
        end = await survivor.terminate(term=0.3)
    assert end is not None
    assert end.signal == signal.SIGKILL
    assert not survivor.alive
    survivor.close()


async def test_reaper_records_an_unrecorded_end(op_dir: Path) -> None:
    """The end of a program whose small parent was killed can be recorded once by the reaper."""
    survivor = left_behind(op_dir, ENDS_ON_GO)
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    await survivor.terminate(term=0.3)
    survivor.record_end(signal.SIGTERM)
    end = survivor.end
    assert end is not None
    assert (end.code, end.signal, end.by) == (None, signal.SIGTERM, "reap")
    survivor.record_end(signal.SIGKILL)
    assert survivor.end == end
    survivor.close()
