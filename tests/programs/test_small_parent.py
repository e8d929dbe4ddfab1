"""Rules of the small parent of an operation's program, with real kills."""

from __future__ import annotations

import functools
import os
import posix
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))
from operations import ID, end_all_of, low_score, make_operation, start_daemon, wait_for

from reconciled.core.stages import StopLimits
from reconciled.programs import ProgramFailed, run_program, small_parent, supervision
from reconciled.programs.children import current_children
from reconciled.programs.launch import Launch
from reconciled.programs.processes import all_processes, find_process
from reconciled.programs.program_records import (
    Assignment,
    ChildRecord,
    boot_id,
    read_child,
    read_end,
)
from reconciled.programs.supervision import Supervision
from reconciled.stop import Stop, Work

pytestmark = pytest.mark.processes


@pytest.fixture
def op_dir(tmp_path: Path) -> Iterator[Path]:
    """The operation's directory; processes that a failed test left are killed."""
    directory = tmp_path / "operations" / ID
    yield directory
    end_all_of(directory)


def child_of(directory: Path) -> ChildRecord:
    record = read_child(directory)
    assert record is not None
    return record


def alive(pid: int) -> bool:
    process = find_process(pid)
    return process is not None and process.alive


def living(group: int) -> list[str]:
    return [p.name for p in all_processes() if p.group == group and p.alive]


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# -- what is durable, and when ----------------------------------------------


async def test_identity_is_recorded_before_the_program_runs(tmp_path: Path, op_dir: Path) -> None:
    """At its first instruction a program is recorded in ``child``: pid, start time and boot."""
    script = f"cp {op_dir}/child seen; cut -d' ' -f1,5,22 /proc/self/stat > self; echo $$ $PPID"
    ended = await run_program(
        ["sh", "-c", script],
        operation=make_operation(op_dir, 3),
        name="apply",
        directory=tmp_path,
    )
    record = child_of(op_dir)
    assert (tmp_path / "seen").read_bytes() == (op_dir / "child").read_bytes()
    assert ended.tail == (f"{record.program.pid} {record.parent.pid}",)
    assert record.assignment.boot_id == boot_id() != ""
    assert (record.assignment.attempt, record.assignment.action) == (3, "apply")
    assert (record.assignment.critical, record.assignment.deadline) == (False, None)
    assert int((tmp_path / "self").read_text().split()[1]) == record.program.pid


async def test_deadline_of_a_critical_program(op_dir: Path) -> None:
    """A critical program's deadline is recorded, in monotonic seconds of this boot."""
    stop = Stop("test", StopLimits())
    stop.install()
    with Work("w", stop) as work:
        async with work.critical("c", budget=30):
            await run_program(["true"], operation=make_operation(op_dir))
    assignment = child_of(op_dir).assignment
    assert assignment.critical
    assert assignment.deadline is not None
    assert 0 < assignment.deadline - time.monotonic() < 30


@pytest.mark.parametrize(
    ("script", "code", "number"),
    [("exit 0", 0, None), ("exit 7", 7, None), ("kill -9 $$", None, 9)],
)
async def test_end_is_recorded(
    op_dir: Path, script: str, code: int | None, number: int | None
) -> None:
    """``end`` records how a program ended, with the program's identity."""
    await run_program(["sh", "-c", script], operation=make_operation(op_dir))
    end = read_end(op_dir)
    assert end is not None
    assert (end.code, end.signal) == (code, number)
    assert end.matches(child_of(op_dir))
    assert abs(end.at - time.time()) < 60


async def test_older_end_is_not_taken_for_a_new_one(op_dir: Path) -> None:
    """The recorded end of an earlier program is not taken for the end of the next one."""
    await run_program(["true"], operation=make_operation(op_dir))
    first = read_end(op_dir)
    await run_program(
        ["sh", "-c", f"cp {op_dir}/end {op_dir}/before"],
        operation=make_operation(op_dir),
    )
    assert first is not None
    assert (op_dir / "before").exists()
    assert not first.matches(child_of(op_dir))


async def test_program_without_durable_identity_is_not_executed(
    tmp_path: Path, op_dir: Path
) -> None:
    """A program whose identity cannot be made durable is not executed, and the call fails."""
    operation = make_operation(op_dir)
    (op_dir / "child").mkdir()
    with pytest.raises(ProgramFailed, match="cannot record the start durably in") as caught:
        await run_program(["touch", str(tmp_path / "ran")], operation=operation)
    assert caught.value.ended is None
    assert not (tmp_path / "ran").exists()
    assert current_children().supervisors == set()


async def test_end_that_cannot_be_written_is_reported(op_dir: Path) -> None:
    """An end that cannot be made durable is still reported to a running daemon."""
    operation = make_operation(op_dir)
    (op_dir / "end").mkdir()
    ended = await run_program(["sh", "-c", "exit 4"], operation=operation)
    assert ended.code == 4
    assert ended.duration < 20
    assert current_children().supervisors == set()


async def test_one_program_at_a_time(op_dir: Path) -> None:
    """A second program of an operation is refused while the first runs: there is one record."""
    operation = make_operation(op_dir)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: run_program(["sleep", "99"], operation=operation))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="already runs a program: wait"):
            await run_program(["true"], operation=operation)
        nursery.cancel_scope.cancel(reason="the test")
    await run_program(["true"], operation=operation)


async def test_environment_has_the_operation(op_dir: Path) -> None:
    """A program gets operation, attempt, epoch, last step and handle, whatever the spec sets."""
    operation = make_operation(op_dir, 2)
    operation.last_step = "half"
    await run_program(
        ["env"], operation=operation, environment={"RECONCILED_ATTEMPT": "9", "MINE": "yes"}
    )
    lines = (op_dir / "env.log").read_text().splitlines()
    found = dict(line.split("=", 1) for line in lines if line.startswith(("RECONCILED", "MINE")))
    assert found == {
        "MINE": "yes",
        "RECONCILED_OPERATION": ID,
        "RECONCILED_ATTEMPT": "2",
        "RECONCILED_EPOCH": "7",
        "RECONCILED_STEP": "half",
        "RECONCILED_HANDLE": f"2:{op_dir}",
    }


@pytest.mark.optional
async def test_small_parent_keeps_the_low_score(op_dir: Path) -> None:
    """When memory runs out, the kernel ends the program before its small parent."""
    script = "read mine </proc/self/oom_score_adj; read its </proc/$PPID/oom_score_adj"
    with low_score():
        ended = await run_program(
            ["sh", "-c", f"{script}; echo $mine $its"], operation=make_operation(op_dir)
        )
    assert ended.tail == ("0 -250",)


@pytest.mark.parametrize(
    ("before", "after"), [("-250\n", "0"), ("-1\n", "0"), ("0\n", "0\n"), ("300\n", "300\n")]
)
def test_only_a_low_score_is_raised(tmp_path: Path, before: str, after: str) -> None:
    """A positive score of the daemon is not lowered for its programs."""
    file = tmp_path / "score"
    file.write_text(before)
    small_parent.raise_oom_score(bytes(file))
    assert file.read_text() == after


def test_a_score_that_cannot_be_raised(tmp_path: Path) -> None:
    """An ended process or a refusal by the kernel is not an error."""
    small_parent.raise_oom_score(bytes(tmp_path / "missing"))
    small_parent.raise_oom_score(bytes(tmp_path))


async def test_small_parent_does_not_inherit_daemon_variables(
    op_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables meant for the daemon alone are in no environment of a process it starts."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "CREDENTIALS_DIRECTORY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "kept")
    await run_program(
        ["sh", "-c", f"cp /proc/$PPID/environ {op_dir}/found"],
        operation=make_operation(op_dir),
    )
    found = {line.partition(b"=")[0] for line in (op_dir / "found").read_bytes().split(b"\0")}
    assert b"KEPT" in found
    prefixes = (b"NOTIFY", b"WATCHDOG", b"LISTEN", b"CREDENTIALS")
    assert [name for name in found if name.startswith(prefixes)] == []


async def test_one_child(op_dir: Path) -> None:
    """Program and small parent count as one child, and neither as an unowned process."""
    children = current_children()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: run_program(["sleep", "99"], operation=make_operation(op_dir)))
        with trio.fail_after(10):
            while not children.owned():  # noqa: ASYNC110 no event comes from another process
                await trio.sleep(0.01)
        record = child_of(op_dir)
        [child] = children.owned()
        assert (child.program, child.pid) == ("sleep", record.program.pid)
        assert [(left.process.pid, left.child) for left in children.remaining()] == [
            (child.pid, child)
        ]
        assert children.owns(record.parent.pid)
        groups = {find_process(pid).group for pid in (record.program.pid, record.parent.pid)}  # type: ignore[union-attr]
        assert len(groups | {os.getpgrp()}) == 3
        nursery.cancel_scope.cancel(reason="the test")
    assert not children.owns(record.parent.pid)
    assert find_process(record.parent.pid) is None


def test_records_are_replaced_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C04: a record is synced before the rename, and its directory after it."""
    calls: list[str] = []
    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(posix, name, recorded(calls, getattr(posix, name)))
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        small_parent._write(directory, "end", b"{}", durable=True)
        assert calls == [
            "write .end.new",
            "fsync .end.new",
            "rename .end.new",
            f"fsync {tmp_path.name}",
        ]
        assert (tmp_path / "end").read_bytes() == b"{}"
        calls.clear()
        small_parent._sync_parent_directory(directory)
        assert calls == [f"fsync {tmp_path.parent.name}"]
    finally:
        os.close(directory)


def recorded(calls: list[str], real: Callable[..., Any]) -> Callable[..., Any]:
    """*real*, which also records its name and the file it is called for."""

    def call(file: int | str, *rest: Any, **named: Any) -> Any:
        target = Path(f"/proc/self/fd/{file}").readlink().name if isinstance(file, int) else file
        calls.append(f"{real.__name__} {target}")
        return real(file, *rest, **named)

    return call


# -- kills -------------------------------------------------------------------


def test_c03_program_survives_its_daemon(tmp_path: Path, op_dir: Path) -> None:
    """C03: after the daemon is killed the program continues, and its end is durable."""
    daemon = start_daemon(
        op_dir, "touch ready; while [ ! -e go ]; do sleep 0.01; done; exit 6", where=tmp_path
    )
    wait_for((tmp_path / "ready").exists)
    kill(daemon)
    record = child_of(op_dir)
    assert alive(record.program.pid)
    assert read_end(op_dir) is None
    (tmp_path / "go").touch()
    wait_for(lambda: not alive(record.parent.pid))
    end = read_end(op_dir)
    assert end is not None
    assert (end.code, end.signal, end.matches(record)) == (6, None, True)


def test_members_go_with_the_program_of_a_dead_daemon(tmp_path: Path, op_dir: Path) -> None:
    """Members that outlive their program get SIGTERM even if the daemon has ended."""
    polite = "trap 'touch asked; exit' TERM; touch ready; while :; do sleep 0.05; done"
    script = f"( {polite} ) & while [ ! -e go ]; do sleep 0.01; done"
    daemon = start_daemon(op_dir, script, where=tmp_path)
    wait_for((tmp_path / "ready").exists)
    kill(daemon)
    (tmp_path / "go").touch()
    wait_for(lambda: not alive(child_of(op_dir).parent.pid))
    assert (tmp_path / "asked").exists()
    group = child_of(op_dir).program.pid
    assert living(group) == []


def test_stubborn_members_are_killed_without_a_daemon(tmp_path: Path, op_dir: Path) -> None:
    """Without a daemon, a member that ignores SIGTERM is killed seconds after its program's end."""
    member = "sh -c \"trap '' TERM; touch ready; while :; do sleep 0.05; done\" & echo $! > member"
    daemon = start_daemon(
        op_dir, f"{member}; while [ ! -e go ]; do sleep 0.01; done", where=tmp_path
    )
    wait_for((tmp_path / "ready").exists)
    kill(daemon)
    (tmp_path / "go").touch()
    wait_for(lambda: not alive(child_of(op_dir).parent.pid))
    assert not alive(int((tmp_path / "member").read_text()))


def test_daemon_killed_before_its_approval(tmp_path: Path, op_dir: Path) -> None:
    """If the daemon dies between the identity and its approval, the program never runs."""
    make_operation(op_dir)
    launch = Launch(("touch", str(tmp_path / "ran")), None, dict(os.environ), b"")
    assignment = Assignment(boot_id(), 1, "apply", critical=False, deadline=None)
    request = supervision.encode_launch_request(
        Supervision(op_dir, assignment), launch.arguments, launch.environment, None
    )
    daemon_end, parent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source = os.memfd_create("request")
    os.write(source, request)
    os.lseek(source, 0, os.SEEK_SET)
    numbers = (source, parent_end.fileno())
    command = [sys.executable, "-I", "-S", "-E", small_parent.__file__, *map(str, numbers)]
    process = subprocess.Popen(command, pass_fds=numbers)
    parent_end.close()
    os.close(source)
    assert daemon_end.recv(64).startswith(b"P ")
    daemon_end.close()
    assert process.wait(10) == 1
    assert child_of(op_dir).assignment == assignment
    assert read_end(op_dir) is None
    assert not (tmp_path / "ran").exists()


async def test_parent_killed(tmp_path: Path, op_dir: Path) -> None:
    """A program whose small parent was killed runs to its end and counts as interrupted."""
    script = (
        f"until [ -e {op_dir}/child ]; do :; done; kill -9 $PPID; sleep 0.3; touch done; exit 0"
    )
    ended = await run_program(
        ["sh", "-c", script], operation=make_operation(op_dir), directory=tmp_path
    )
    assert (tmp_path / "done").exists()
    assert (ended.code, ended.signal) == (None, None)
    assert read_end(op_dir) is None
    assert current_children().supervisors == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
async def test_stopping_signals_do_not_end_the_parent(op_dir: Path, number: int) -> None:
    """Signals that a service manager sends to the whole unit do not end the small parent."""
    script = f"kill -{int(number)} $PPID; sleep 0.1; exit 5"
    ended = await run_program(["sh", "-c", script], operation=make_operation(op_dir))
    assert ended.code == 5


def test_daemon_killed_while_starting(tmp_path: Path, op_dir: Path) -> None:
    """A daemon killed at any instant leaves a recorded program, or one that never ran."""
    for turn in range(12):
        directory = op_dir.with_name(f"{ID}{turn}")
        daemon = start_daemon(directory, f"echo {turn} >> ran; sleep 0.2", where=tmp_path)
        wait_for((directory / "attempt").exists)
        time.sleep(turn * 0.004)  # each turn kills at another instant
        kill(daemon)
        wait_for(functools.partial(no_parent_of, directory))
        ran = (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []
        end = read_end(directory)
        assert (str(turn) in ran) == (end is not None and end.code == 0)


def no_parent_of(directory: Path) -> bool:
    """Whether no small parent runs for the operation in *directory*."""
    for process in all_processes():
        try:
            if str(directory).encode() in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                return False
            links = list(Path(f"/proc/{process.pid}/fd").iterdir())
            if any(link.readlink() == directory for link in links):
                return False
        except OSError:
            continue
    return True
