"""Rules of programs.children and programs.orphan_reaper, with real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from reconciled.programs import run_program, small_parent
from reconciled.programs.children import current_children
from reconciled.programs.processes import descendants_of, find_process

pytestmark = pytest.mark.processes


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 no event comes from another process
            await trio.sleep(0.005)


# -- the registry ----------------------------------------------------------


async def test_child_has_identity_and_owner(tmp_path: Path) -> None:
    """A child has its identity, program and owner's name, but not its arguments."""
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            await run_program(["sleep", "98765"], output=tmp_path)

        nursery.start_soon(run, name="reconcile site/x")
        await until(current_children().owned)
        [child] = current_children().owned()
        process = find_process(child.pid)
        assert process is not None
        assert (child.started, process.name) == (process.started, "sleep")
        assert repr(child) == f"<Child sleep (pid {child.pid}) of reconcile site/x>"
        nursery.cancel_scope.cancel(reason="the test")
    assert current_children().owned() == []


async def test_end_all_spares_critical(tmp_path: Path) -> None:
    """end_all() ends ordinary groups from any thread, and critical ones only on request."""
    ended = []
    async with trio.open_nursery() as nursery:

        async def run(name: str) -> None:
            ended.append((name, (await run_program(["sleep", "99"], output=tmp_path)).signal))

        nursery.start_soon(run, "critical")
        await until(current_children().owned)
        current_children().owned()[0].critical = True
        nursery.start_soon(run, "ordinary")
        await until(lambda: len(current_children().owned()) == 2)
        children = current_children()
        _in_thread(children.end_all)
        await until(lambda: ended)
        assert ended == [("ordinary", signal.SIGKILL)]
        _in_thread(lambda: children.end_all(signal.SIGTERM, critical=True))
    assert ended[1:] == [("critical", signal.SIGTERM)]


def _in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


async def test_reaped_child_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaped process is never signalled: its pid may be reused."""
    seen = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            await run_program(["sleep", "0.2"], output=tmp_path)

        nursery.start_soon(run)
        await until(current_children().owned)
        seen += current_children().owned()
    sent: list[object] = []
    monkeypatch.setattr(small_parent, "send_signal", lambda *call: sent.append(call))
    assert not seen[0].signal(signal.SIGKILL)
    assert sent == []
    assert seen[0].ended


async def test_remaining_names_detached_processes(tmp_path: Path) -> None:
    """remaining() lists members with their owner, whatever their session, and the detached."""
    # No other program: before its exec a third child would be one more "sh" in the list.
    script = "setsid -f sleep 97; setsid sleep 98 & wait"
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            await run_program(["sh", "-c", script], output=tmp_path)

        nursery.start_soon(run, name="reconcile site/x")
        await until(lambda: sum(p.name == "sleep" for p in descendants_of(os.getpid())) == 2)
        left = current_children().remaining()
        escaped = [one for one in left if one.child is None]
        assert [one.detached for one in escaped] == [True]
        assert [str(one) for one in escaped] == [f"sleep (pid {escaped[0].process.pid}), no owner"]
        owned = sorted(str(one).split(" (")[0] for one in left if one.child is not None)
        assert owned == ["sh", "sleep"]
        os.kill(escaped[0].process.pid, signal.SIGKILL)
        nursery.cancel_scope.cancel(reason="the test")


# -- orphans, each in a process of its own ---------------------------------

_PREAMBLE = """
import os, signal, subprocess, sys, time, trio
from pathlib import Path
from reconciled.programs.children import current_children
from reconciled.programs.orphan_reaper import OrphanReaper, become_subreaper
from reconciled.programs.processes import children_of
from reconciled.programs import run_program, small_parent

class Log:
    def __init__(self): self.lines = []
    def info(self, event, **fields): self.lines.append((event, fields))

log = Log()
output = Path(sys.argv[1])
become_subreaper()
zombies = lambda: [p for p in children_of(os.getpid()) if p.state == "Z"]

async def main():
    async with trio.open_nursery() as nursery:
        orphans = OrphanReaper(current_children(), log)
        token = trio.lowlevel.current_trio_token()
        signal.signal(signal.SIGCHLD, lambda *_: token.run_sync_soon(orphans.request_scan))
        nursery.start_soon(orphans.reap)
        await body()
        nursery.cancel_scope.cancel(reason="over")
"""

_FIFTY = """
async def body():
    # Each orphan's parent ends at once; the orphan runs 0.1 s longer, in its own group.
    script = "for i in $(seq 50); do (setsid sleep 0.1 &) ; done; exit 3"
    codes = []
    async with trio.open_nursery() as nursery:
        async def run(code):
            ended = await run_program(["sh", "-c", f"sleep 0.3; exit {code}"], output=output)
            codes.append(ended.code == code)
        for code in range(1, 21):
            nursery.start_soon(run, code)
        ended = await run_program(["sh", "-c", script], output=output)
    most = len(zombies())
    await trio.sleep(1.3)
    print(ended.code, all(codes), len(codes), most > 0, len(zombies()), os.getpid() == 1)
trio.run(main)
"""

_CLAIMED = """
async def body():
    mine = subprocess.Popen(["sh", "-c", "exit 5"])
    async with trio.open_nursery() as nursery:
        process = await nursery.start(trio.run_process, ["sh", "-c", "exit 0"])
    pid = os.fork()
    if pid == 0:
        os._exit(6)
    await trio.sleep(1.5)
    print(mine.wait(), process.returncode, [p.pid for p in zombies()])
trio.run(main)
"""

_ESCAPED = """
async def body():
    mine = subprocess.Popen(["sleep", "96"], start_new_session=True)
    # The helper leaves the group of its program before that ends.
    script = "setsid sh -c 'touch left; exec sleep 95' & while [ ! -e left ]; do sleep 0.01; done"
    await run_program(["sh", "-c", script], output=output, directory=output)
    while not log.lines:
        await trio.sleep(0.01)
    await run_program(["true"], output=output)  # its end causes another scan
    await trio.sleep(1.2)
    orphan = [p for p in children_of(os.getpid()) if p.pid != mine.pid][0]
    [(event, fields)] = log.lines
    print(event, fields["pid"] == orphan.pid, fields["program"], orphan.alive)
    os.kill(orphan.pid, 9)
    mine.kill()
    mine.wait()
    while zombies():
        await trio.sleep(0.01)
    print(zombies(), len(log.lines))
trio.run(main)
"""


_OWNED = """
import reconciled.programs.orphan_reaper
reconciled.programs.orphan_reaper._claims = lambda pids: set()

async def body():
    # The program is a zombie for 1.5 s, until a member that ignores SIGTERM has ended.
    member = "(trap '' TERM; sleep 0.5; sleep 0.5; sleep 0.5)"
    ended = await run_program(["sh", "-c", f"{member} & sleep 0.2; exit 5"], output=output)
    print(ended.code, ended.duration > 1.2)
trio.run(main)
"""


def _run(script: str, tmp_path: Path, *wrapper: str) -> str:
    command = [*wrapper, sys.executable, "-c", _PREAMBLE + script, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _may_unshare() -> bool:
    unshare = shutil.which("unshare")
    if unshare is None:
        return False
    command = [unshare, "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def test_c07c_as_pid_1(tmp_path: Path) -> None:
    """C07 (c): as PID 1, orphans are reaped within a second, and no exit code is lost."""
    if not _may_unshare():
        pytest.skip("making a PID namespace is not permitted here")
    out = _run(_FIFTY, tmp_path, "unshare", "--pid", "--fork", "--mount-proc")
    assert out.split() == ["3", "True", "20", "True", "0", "True"]


def test_c07c_as_subreaper(tmp_path: Path) -> None:
    """C07 (c): as a subreaper, orphans are reaped within a second, and no exit code is lost."""
    assert _run(_FIFTY, tmp_path).split() == ["3", "True", "20", "True", "0", "False"]


def test_owned_zombie_is_not_reaped(tmp_path: Path) -> None:
    """The reaper leaves an ended program to its owner, however long the owner ends its group."""
    assert _run(_OWNED, tmp_path) == "5 True\n"


def test_claimed_status_is_not_taken(tmp_path: Path) -> None:
    """A child that a plugin's object waits for is not reaped; an unclaimed child is."""
    assert _run(_CLAIMED, tmp_path) == "5 0 []\n"


def test_escapee_is_reported_once_and_lives(tmp_path: Path) -> None:
    """An orphan in its own session is logged once and left alone; a plugin's is not logged."""
    assert _run(_ESCAPED, tmp_path) == "program.detached True sleep True\n[] 1\n"
