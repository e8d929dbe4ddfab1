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
from operations import ID, end_all_of, start_host, wait_for

from reconciled.core.errors import RecordDamaged
from reconciled.programs import survivors
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import boot_id, read_child, read_end
from reconciled.programs.survivors import Survivor, find_survivor

pytestmark = pytest.mark.processes

ENDS_ON_WORD = "touch ready; while [ ! -e go ]; do sleep 0.01; done; exit 6"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """The operation's directory; what a failed test left running there is ended."""
    directory = tmp_path / "operations" / ID
    yield directory
    end_all_of(directory)


def left_behind(place: Path, script: str, *, budget: float = 0) -> Survivor:
    """A daemon is killed while its program runs *script*, which makes ``ready``."""
    where = place.parents[1]
    host = start_host(place, script, where=where, budget=budget)
    wait_for((where / "ready").exists)
    host.kill()
    host.wait()
    survivor = find_survivor(place)
    assert survivor is not None
    return survivor


def forge(place: Path, **program: Any) -> None:
    """Change what is recorded of the program, or of the boot."""
    data = json.loads((place / "child").read_bytes())
    boot = program.pop("boot_id", None)
    if boot is not None:
        data["boot_id"] = boot
    data["program"].update(program)
    data["parent"].update(program)
    (place / "child").write_text(json.dumps(data))


def alive(pid: int) -> bool:
    process = find_process(pid)
    return process is not None and process.alive


# -- who is found ------------------------------------------------------------


def test_what_is_hidden_is_not_gone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sandbox hides the process, nothing may be concluded, and what to do is said."""
    left_behind(place, ENDS_ON_WORD).close()
    monkeypatch.setattr(survivors, "is_hidden", lambda _: True)
    with pytest.raises(RecordDamaged, match="cannot be seen from here: remove PrivateUsers= from"):
        find_survivor(place)


def test_never_ran(tmp_path: Path) -> None:
    """An operation without a program has no survivor."""
    assert find_survivor(tmp_path) is None


async def test_outcome_is_taken_over(tmp_path: Path, place: Path) -> None:
    """A program that lives on is waited for, and how it ends is told by its small parent."""
    survivor = left_behind(place, ENDS_ON_WORD, budget=30)
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
    again = find_survivor(place)
    assert again is not None
    assert again.end == end
    assert not again.alive


async def test_waiting_leaves_it_alone(place: Path) -> None:
    """Who is cancelled while waiting leaves the program as it is."""
    survivor = left_behind(place, ENDS_ON_WORD)
    with trio.move_on_after(0.2):
        await survivor.wait()
    assert alive(survivor.record.program.pid)
    survivor.close()


async def test_parent_killed(tmp_path: Path, place: Path) -> None:
    """With its small parent killed the program is waited for, and has no outcome."""
    survivor = left_behind(place, ENDS_ON_WORD)
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    (tmp_path / "go").touch()
    with trio.fail_after(10):
        assert await survivor.wait() is None
    assert not survivor.alive
    survivor.close()


async def test_program_killed(place: Path) -> None:
    """A program that somebody kills ends with that signal, as its small parent saw."""
    survivor = left_behind(place, ENDS_ON_WORD)
    os.kill(survivor.record.program.pid, signal.SIGKILL)
    with trio.fail_after(10):
        end = await survivor.wait()
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGKILL)
    survivor.close()


async def test_both_killed(place: Path) -> None:
    """With both killed nobody is left, and nothing is known of how it ended."""
    survivor = left_behind(place, ENDS_ON_WORD)
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    os.kill(survivor.record.program.pid, signal.SIGKILL)
    with trio.fail_after(10):
        assert await survivor.wait() is None
    assert not survivor.alive
    assert read_end(place) is None
    survivor.close()


async def test_members_without_parent_are_ended(tmp_path: Path, place: Path) -> None:
    """Members that outlive program and small parent are ended by whoever waits: one actor a key."""
    script = f"sleep 999 & echo $! > member; {ENDS_ON_WORD}"
    survivor = left_behind(place, script)
    member = int((tmp_path / "member").read_text())
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    os.kill(survivor.record.program.pid, signal.SIGKILL)
    # Both: while the small parent dies, ending the members is still its business.
    wait_for(lambda: not alive(survivor.record.program.pid))
    wait_for(lambda: not alive(survivor.record.parent.pid))
    survivor.close()
    again = find_survivor(place)
    assert again is not None
    assert again.alive
    assert member in [process.pid for process in again.remaining_members()]
    with trio.fail_after(10):
        assert await again.wait() is None
    assert not alive(member)
    again.close()


# -- identity ----------------------------------------------------------------


def test_after_a_reboot_nothing_lives(place: Path) -> None:
    """A record of another boot names nobody of this one, though number and start time agree."""
    real = left_behind(place, ENDS_ON_WORD)
    forge(place, boot_id="00000000-0000-0000-0000-000000000000")
    survivor = find_survivor(place)
    assert survivor is not None
    assert not survivor.alive
    assert not survivor.signal(signal.SIGKILL)
    assert alive(real.record.program.pid)
    real.close()


@pytest.mark.parametrize("what", ["program", "parent", "both"])
async def test_reused_number(place: Path, what: str) -> None:
    """A stranger that has got the number of the program or its parent is never touched."""
    gone = left_behind(place, "touch ready; exit 0")
    await gone.wait()
    gone.close()
    stranger = subprocess.Popen(["sleep", "60"], process_group=0)  # noqa: ASYNC220 1 ms is no harm
    try:
        data = json.loads((place / "child").read_bytes())
        for name in ("program", "parent") if what == "both" else (what,):
            data[name]["pid"] = stranger.pid
        (place / "child").write_text(json.dumps(data))
        (place / "end").unlink(missing_ok=True)
        survivor = find_survivor(place)
        assert survivor is not None
        assert not survivor.alive
        assert not survivor.signal(signal.SIGKILL)
        with trio.fail_after(5):
            assert await survivor.terminate(term=0.1) is None
        survivor.kill_parent()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("name", ["child", "end"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"program": 3}', "\xff"])
def test_damaged_record(place: Path, name: str, text: str) -> None:
    """A record that cannot be read is damage, and never taken for nobody."""
    left_behind(place, "touch ready; exit 0").close()
    wait_for((place / "end").exists)
    (place / name).write_text(text, "latin-1")
    with pytest.raises(RecordDamaged, match=f"{name} is no record"):
        read_child(place) if name == "child" else read_end(place)


def test_boot_id() -> None:
    """This boot has a name, and keeps it."""
    assert boot_id() == boot_id() != ""


def test_an_older_end_is_not_taken_over(place: Path) -> None:
    """An end that belongs to an earlier program of the operation says nothing of this one."""
    survivor = left_behind(place, "touch ready; exit 0")
    wait_for(lambda: not survivor.alive)
    assert survivor.end is not None
    data = json.loads((place / "end").read_bytes())
    data["program"]["started"] -= 1
    (place / "end").write_text(json.dumps(data))
    assert survivor.end is None
    survivor.close()


# -- ending it ---------------------------------------------------------------


async def test_ended_at_once(tmp_path: Path, place: Path) -> None:
    """An ordinary survivor gets SIGTERM at once, with its group, and its end is recorded."""
    survivor = left_behind(place, f"sleep 999 & echo $! > member; {ENDS_ON_WORD}")
    assert survivor.remaining() == 0
    began = time.monotonic()
    with trio.fail_after(10):
        end = await survivor.terminate()
    assert time.monotonic() - began < 10
    assert end is not None
    assert end.signal == signal.SIGTERM
    assert not alive(int((tmp_path / "member").read_text()))
    survivor.close()


async def test_stubborn_survivor(place: Path) -> None:
    """One that ignores SIGTERM gets SIGKILL when its time is over."""
    survivor = left_behind(place, "trap '' TERM; touch ready; while :; do sleep 0.05; done")
    with trio.fail_after(10):
        end = await survivor.terminate(term=0.3)
    assert end is not None
    assert end.signal == signal.SIGKILL
    assert not survivor.alive
    survivor.close()


async def test_reaper_takes_note_where_nobody_did(place: Path) -> None:
    """The end of a program whose small parent was killed can be noted in its place, once."""
    survivor = left_behind(place, ENDS_ON_WORD)
    os.kill(survivor.record.parent.pid, signal.SIGKILL)
    await survivor.terminate(term=0.3)
    survivor.record_end(signal.SIGTERM)
    end = survivor.end
    assert end is not None
    assert (end.code, end.signal, end.by) == (None, signal.SIGTERM, "reap")
    survivor.record_end(signal.SIGKILL)
    assert survivor.end == end
    survivor.close()
