"""Rules of the session of a program: who is a member, who is detached, with real processes."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))
from operations import ID, end_all_of, make_operation, start_daemon, wait_for

from reconciled.cli.main import main
from reconciled.core.stages import StopLimits
from reconciled.programs import run_program, small_parent
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import read_child, read_end
from reconciled.programs.survivors import find_survivor
from reconciled.stop import Stop, Work

pytestmark = pytest.mark.processes

LOOP = "while :; do sleep 0.05; done"
# Each leaves its pid in the file ``helper``.
HELPER = "sh -c 'echo $$ > helper.new; mv helper.new helper; exec sleep 60'"


@pytest.fixture
def op_dir(tmp_path: Path) -> Iterator[Path]:
    """The operation's directory; processes that a failed test left are killed."""
    tmp_path.chmod(0o700)
    directory = tmp_path / "operations" / ID
    yield directory
    end_all_of(directory)


def alive(pid: int) -> bool:
    process = find_process(pid)
    return process is not None and process.alive


def helper_of(directory: Path) -> int:
    wait_for((directory / "helper").exists)
    return int((directory / "helper").read_text())


MEMBERS = {
    "timeout": f"timeout 60 {HELPER}; :",
    "setpgid": 'python3 -c \'import os; os.setpgid(0, 0); os.execvp("sh", ["sh", "-c",'
    ' "echo $$ > helper.new; mv helper.new helper; exec sleep 60"])\'; :',
    "background": f"{HELPER} & wait",
    "nohup": f"nohup {HELPER} & wait",
    "nohup, orphaned": f"(nohup {HELPER} &) ; {LOOP}",
    "double fork": f"({HELPER} &) ; {LOOP}",
    "setsid helper": f"setsid -w {HELPER}; :",
    "setsid helper, background": f"setsid {HELPER} & wait",
    "script -c": f'script -qc "{HELPER}" /dev/null; :',
    "job control": f"set -m; {HELPER} & wait",
}
DETACHED = {
    "setsid -f": f"setsid -f {HELPER}; {LOOP}",
    "setsid, double fork": f"(setsid {HELPER} &) ; {LOOP}",
}


def _skip_without(what: str) -> None:
    program = what.split(maxsplit=1)[0].strip(",")
    if program in ("script", "timeout", "nohup") and shutil.which(program) is None:
        pytest.skip(f"no {program} here")


@pytest.mark.parametrize("what", MEMBERS)
async def test_members_end_with_a_cancelled_program(
    tmp_path: Path, op_dir: Path, what: str
) -> None:
    """Whatever its process group or session, a process below the program ends with it."""
    _skip_without(what)
    async with trio.open_nursery() as nursery:
        _run(nursery, tmp_path, op_dir, MEMBERS[what])
        helper = await trio.to_thread.run_sync(helper_of, tmp_path)
        nursery.cancel_scope.cancel(reason="the test")
    assert not alive(helper)


@pytest.mark.parametrize("what", DETACHED)
async def test_detached_processes_are_left_alone(tmp_path: Path, op_dir: Path, what: str) -> None:
    """An orphan with a session of its own is neither signalled nor waited for."""
    async with trio.open_nursery() as nursery:
        _run(nursery, tmp_path, op_dir, DETACHED[what])
        helper = await trio.to_thread.run_sync(helper_of, tmp_path)
        await _until_orphaned(helper, op_dir)
        nursery.cancel_scope.cancel(reason="the test")
    assert alive(helper)
    os.kill(helper, signal.SIGKILL)


def _run(nursery: trio.Nursery, where: Path, op_dir: Path, script: str) -> None:
    operation = make_operation(op_dir)

    async def run() -> None:
        await run_program(["sh", "-c", script], operation=operation, directory=where)

    nursery.start_soon(run)


async def _until_orphaned(pid: int, op_dir: Path) -> None:
    record = read_child(op_dir)
    assert record is not None
    with trio.fail_after(10):
        while (found := find_process(pid)) is None or found.parent != record.parent.pid:  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_what_a_signal_of_ours_orphans_is_a_member(tmp_path: Path, op_dir: Path) -> None:
    """A helper in a session of its own whose parent our SIGTERM ended gets SIGKILL."""
    stubborn = (
        f"setsid sh -c 'trap \"\" TERM; echo $$ > helper.new; mv helper.new helper; {LOOP}' & wait"
    )
    stop = Stop("test", StopLimits(cleanup=0.5))
    stop.install()
    with Work("w", stop) as work:
        async with trio.open_nursery() as nursery:
            _run(nursery, tmp_path, op_dir, stubborn)
            helper = await trio.to_thread.run_sync(helper_of, tmp_path)
            work.scope.cancel(reason="the test")
    assert not alive(helper)


async def test_daemon_that_a_program_starts_outlives_it(tmp_path: Path, op_dir: Path) -> None:
    """A program that ends well after it started a daemon is done, and the daemon lives."""
    script = f"setsid -f {HELPER}; until [ -e helper ]; do :; done; exit 0"
    ended = await run_program(
        ["sh", "-c", script], operation=make_operation(op_dir), directory=tmp_path
    )
    helper = helper_of(tmp_path)
    assert (ended.code, alive(helper)) == (0, True)
    os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize("what", ["timeout", "setpgid", "setsid helper", "script -c"])
def test_reap_ends_members_outside_the_group(tmp_path: Path, op_dir: Path, what: str) -> None:
    """``reap`` ends every member after the daemon was killed, and tells the truth."""
    _skip_without(what)
    daemon = start_daemon(op_dir, MEMBERS[what], where=tmp_path)
    helper = helper_of(tmp_path)
    daemon.kill()
    daemon.wait()
    assert main(["reap", "--state", str(tmp_path)]) == 0
    assert not alive(helper)


@pytest.mark.parametrize("what", ["timeout", "setpgid", "nohup, orphaned"])
def test_members_are_found_without_the_small_parent(
    tmp_path: Path, op_dir: Path, what: str
) -> None:
    """After the small parent and the program were killed, members count and are ended."""
    daemon = start_daemon(op_dir, MEMBERS[what], where=tmp_path)
    helper = helper_of(tmp_path)
    daemon.kill()
    daemon.wait()
    record = read_child(op_dir)
    assert record is not None
    for identity in (record.parent, record.program):
        os.kill(identity.pid, signal.SIGKILL)
        wait_for(lambda pid=identity.pid: not alive(pid))
    survivor = find_survivor(op_dir)
    assert survivor is not None
    assert survivor.alive
    survivor.close()
    assert main(["reap", "--state", str(tmp_path)]) == 0
    assert not alive(helper)


def test_no_controlling_terminal_can_stop_a_program(tmp_path: Path, op_dir: Path) -> None:
    """``read x < /dev/tty`` fails at once: the session has no controlling terminal."""
    make_operation(op_dir)
    script = "read x < /dev/tty; echo $? > code.new; mv code.new code"
    child, terminal = pty.fork()
    if child == 0:  # its session has a terminal
        try:
            start_daemon(op_dir, script, where=tmp_path).wait()
        finally:
            os._exit(0)
    try:
        wait_for((tmp_path / "code").exists)
        assert (tmp_path / "code").read_text().strip() != "0"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


# -- an end after a signal of ours -------------------------------------------------


def test_exit_0_after_the_signal_of_reap_is_an_interruption(tmp_path: Path, op_dir: Path) -> None:
    """A program that answers SIGTERM of ``reap`` with exit 0 was interrupted, not done."""
    daemon = start_daemon(op_dir, f"trap 'exit 0' TERM; touch ready; {LOOP}", where=tmp_path)
    wait_for((tmp_path / "ready").exists)
    daemon.kill()
    daemon.wait()
    assert main(["reap", "--state", str(tmp_path)]) == 0
    end = read_end(op_dir)
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGTERM)


def test_exit_0_after_the_signal_of_an_ended_daemon(tmp_path: Path, op_dir: Path) -> None:
    """The record of the signal outlives its sender, which may be killed before the program ends."""
    script = f"trap 'until [ -e go ]; do sleep 0.01; done; exit 0' TERM; touch ready; {LOOP}"
    daemon = start_daemon(op_dir, script, where=tmp_path, budget=2)
    wait_for((op_dir / small_parent.SIGNALLED).exists)
    daemon.kill()
    daemon.wait()
    (tmp_path / "go").touch()
    wait_for((op_dir / "end").exists)
    end = read_end(op_dir)
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGTERM)


def test_exit_0_after_a_signal_on_a_full_disk(tmp_path: Path, op_dir: Path) -> None:
    """An empty record of a signal counts as one."""
    script = "touch ready; until [ -e go ]; do sleep 0.01; done; exit 0"
    daemon = start_daemon(op_dir, script, where=tmp_path)
    wait_for((tmp_path / "ready").exists)
    (op_dir / small_parent.SIGNALLED).touch()
    (tmp_path / "go").touch()
    daemon.wait()
    end = read_end(op_dir)
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGTERM)


def test_signal_to_members_after_the_end_changes_no_outcome(tmp_path: Path, op_dir: Path) -> None:
    """A program that ended before the signal to its members keeps its exit code."""
    script = "sleep 60 & touch ready; until [ -e go ]; do sleep 0.01; done; exit 6"
    daemon = start_daemon(op_dir, script, where=tmp_path)
    wait_for((tmp_path / "ready").exists)
    (tmp_path / "go").touch()
    daemon.wait()
    wait_for((op_dir / small_parent.GONE).exists)
    end = read_end(op_dir)
    assert end is not None
    assert (end.code, end.signal) == (6, None)
    assert (op_dir / small_parent.SIGNALLED).read_text().startswith("15 1 ")


def test_umask_is_the_usual_one(tmp_path: Path, op_dir: Path) -> None:
    """Programs run with umask 022 whatever the daemon's own."""
    before = os.umask(0o077)
    try:
        daemon = start_daemon(op_dir, "umask > mask", where=tmp_path)
    finally:
        os.umask(before)
    daemon.wait()
    assert (tmp_path / "mask").read_text().strip() in ("0022", "022")


def test_program_outside_operations_ends_with_its_daemon(tmp_path: Path) -> None:
    """A program without an operation is ended when its daemon is killed."""
    script = (
        "import sys, trio; from pathlib import Path; from reconciled.programs import run_program;"
        " where = Path(sys.argv[1]);"
        " trio.run(lambda: run_program(['sh', '-c', sys.argv[2]], output=where, directory=where))"
    )
    daemon = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), MEMBERS["background"]])
    helper = helper_of(tmp_path)
    began = time.monotonic()
    daemon.kill()
    daemon.wait()
    wait_for(lambda: not alive(helper), 60)
    assert time.monotonic() - began < 60
