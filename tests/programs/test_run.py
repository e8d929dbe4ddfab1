"""Rules of run_program(), with real processes."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from reconciled.core.stages import StopLimits
from reconciled.programs import Ended, ProgramFailed, program_environment
from reconciled.programs import run_program as run_alone
from reconciled.programs.children import current_children
from reconciled.programs.processes import all_processes, find_process
from reconciled.stop import Overrun, Stop, Work

sys.path.insert(0, str(Path(__file__).parent))
from operations import low_score, make_operation

pytestmark = pytest.mark.processes

run_program: Any = run_alone


@pytest.fixture(autouse=True, params=["alone", "of an operation"])
def run_as(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Run each test with a direct child and with a program under a small parent."""
    if request.param == "alone":
        return
    places = (tmp_path_factory.mktemp("operations") / str(n) for n in itertools.count())

    async def of_an_operation(argv: Sequence[str], **options: Any) -> Ended:
        return await run_alone(argv, operation=make_operation(next(places)), **options)

    request.getfixturevalue("monkeypatch").setitem(globals(), "run_program", of_an_operation)


# Ignores SIGTERM; the file ``ready`` shows that it does.
STUBBORN = "trap '' TERM; touch ready; while :; do sleep 0.05; done"


async def until(condition: Callable[[], object]) -> None:
    """Poll until another process has made *condition* true."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110 no event comes from another process
            await trio.sleep(0.005)


async def appears(path: Path) -> None:
    await until(path.exists)


def no_children() -> bool:
    """Whether this process has no children, running or zombies."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 names are all we need


def living(group: int) -> list[str]:
    return [p.name for p in all_processes() if p.group == group and p.alive]


async def group_of(program: str) -> int:
    await until(current_children().owned)
    [child] = current_children().owned()
    assert child.program == program
    return child.pid


# -- how programs end ------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1, 7, 255])
async def test_exit_code(tmp_path: Path, code: int) -> None:
    """The exit code of a program is returned unchanged."""
    ended = await run_program(["sh", "-c", f"exit {code}"], output=tmp_path)
    assert (ended.code, ended.signal) == (code, None)


async def test_signal(tmp_path: Path) -> None:
    """A program ended by a signal has no exit code, and check() names the signal."""
    ended = await run_program(["sh", "-c", "echo so far; kill -9 $$"], output=tmp_path)
    assert (ended.code, ended.signal) == (None, signal.SIGKILL)
    with pytest.raises(ProgramFailed, match=r"^sh was ended by SIGKILL: so far$"):
        ended.check()


async def test_check_quotes_last_lines(tmp_path: Path) -> None:
    """A failure is one line that quotes the last three lines of either output."""
    script = "seq 1 9; echo to stderr >&2; exit 3"
    ended = await run_program(["sh", "-c", script], output=tmp_path)
    with pytest.raises(ProgramFailed) as caught:
        ended.check()
    assert str(caught.value) == "sh ended with exit code 3: 8 | 9 | to stderr"
    assert caught.value.ended is ended


async def test_no_descriptor_or_child_remains(tmp_path: Path) -> None:
    """A call leaves no descriptor, no zombie and no registered child."""
    await run_program(["true"], output=tmp_path)
    before = open_descriptors()
    for _ in range(5):
        await run_program(["sh", "-c", "sleep 99 & cat"], stdin=b"x", output=tmp_path)
    assert open_descriptors() == before
    assert current_children().owned() == []
    assert no_children()


# -- programs that do not start --------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["no-such-program"], "cannot start no-such-program: it was not found in PATH"),
        (["./absent"], "cannot start ./absent: .*/absent does not exist"),
        (
            ["./plain"],
            r"cannot start ./plain: permission denied for .*: make it executable \(chmod \+x\)",
        ),
        (["./garbage"], "cannot start ./garbage: it has no executable format: begin a script with"),
        (["./lost"], "cannot start ./lost: the interpreter in its #! line does not"),
        (["sh", "a\0b"], "cannot start sh: embedded null byte"),
        ([], r"\[\] is not a program: write a list"),
        ("ls -l", "'ls -l' is not a program: write a list"),
    ],
)
async def test_not_started(tmp_path: Path, argv: list[str], message: str) -> None:
    """A program that cannot be started is an error of one line with the reason."""
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    for name, text in (("garbage", "\1\2\3"), ("lost", "#!/no/such/interpreter\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ProgramFailed, match=message) as caught:
        await run_program(argv, output=tmp_path / "out", directory=tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.ended is None
    assert current_children().owned() == []


async def test_no_directory(tmp_path: Path) -> None:
    """A missing working directory is named as such, not as a missing program."""
    with pytest.raises(
        ProgramFailed, match=r"cannot start sh: its working directory .*/missing does not"
    ):
        await run_program(["sh", "-c", ":"], output=tmp_path, directory=tmp_path / "missing")


async def test_output_not_possible(tmp_path: Path) -> None:
    """An output file that cannot be opened is an error before any start."""
    (tmp_path / "file").touch()
    with pytest.raises(
        ProgramFailed, match=r"cannot start touch: its output file .*/touch\.log: Not a"
    ):
        await run_program(["touch", str(tmp_path / "ran")], output=tmp_path / "file" / "below")
    assert not (tmp_path / "ran").exists()


# -- what a program finds --------------------------------------------------


async def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program gets the daemon's environment without its private variables, and the additions."""
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LISTEN_FDNAMES", "api")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/x")
    monkeypatch.setenv("KEPT", "kept")
    monkeypatch.setenv("REPLACED", "old")
    await run_program(["env"], output=tmp_path, environment={"REPLACED": "new"})
    found = dict(line.split("=", 1) for line in (tmp_path / "env.log").read_text().splitlines())
    assert found["KEPT"] == "kept"
    assert found["REPLACED"] == "new"
    prefixes = ("NOTIFY", "WATCHDOG", "LISTEN", "CREDENTIALS")
    assert [name for name in found if name.startswith(prefixes)] == []


@pytest.mark.optional
async def test_memory_runs_out_for_programs_first(tmp_path: Path) -> None:
    """A program does not inherit the negative out-of-memory score of its daemon."""
    script = "until read score </proc/$$/oom_score_adj && [ $score = 0 ]; do sleep 0.01; done"
    with low_score(), trio.fail_after(10):
        await run_program(["sh", "-c", script], output=tmp_path)


def test_path_ends_with_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """PATH ends with the directory of reconciled, even if the spec sets PATH."""
    monkeypatch.setattr(sys, "argv", ["/opt/here/bin/reconciled", "run"])
    assert program_environment({"PATH": "/a:/b"})["PATH"] == "/a:/b:/opt/here/bin"
    monkeypatch.setattr(sys, "argv", ["/src/reconciled/__main__.py"])
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.delenv("PATH")
    assert program_environment({})["PATH"].endswith(":/venv/bin")


async def test_standard_input(tmp_path: Path) -> None:
    """Standard input is a file: input larger than a pipe's buffer needs no reader."""
    data = b"line\n" * 100_000
    await run_program(["wc", "-c"], stdin=data, output=tmp_path)
    assert (tmp_path / "wc.log").read_text().strip() == str(len(data))
    ended = await run_program(["true"], stdin=data, output=tmp_path)
    assert ended.code == 0


async def test_directory_and_group(tmp_path: Path) -> None:
    """A program runs in its directory, which argument 0 is relative to, and leads a new group."""
    (tmp_path / "here").write_text("#!/bin/sh\npwd\necho $$ $(cut -d' ' -f5 /proc/$$/stat)\n")
    (tmp_path / "here").chmod(0o755)
    ended = await run_program(["./here"], output=tmp_path / "out", directory=tmp_path)
    assert ended.tail[0] == str(tmp_path)
    pid, group = ended.tail[1].split()
    assert pid == group != str(os.getpgrp())


# -- the group -------------------------------------------------------------


async def test_c07b_cancelled_pipeline(tmp_path: Path) -> None:
    """C07 (b): a cancelled shell ends together with its pipeline, within the deadline."""
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_run_pipeline, tmp_path)
        group = await group_of("sh")
        await until(lambda: len(living(group)) == 3)
        nursery.cancel_scope.cancel(reason="the test")
    assert living(group) == []
    assert trio.current_time() - began < 10
    assert current_children().owned() == []


async def _run_pipeline(output: Path) -> None:
    # The trailing colon keeps the shell from replacing itself by the pipeline.
    await run_program(["sh", "-c", "sleep 999 | cat; :"], output=output)


async def test_sigkill_at_end_of_cleanup(tmp_path: Path) -> None:
    """An ordinary program that ignores SIGTERM is killed at the end of the cleanup allowance."""
    stop = Stop("test", StopLimits(cleanup=0.4))
    stop.install()
    with Work("w", stop) as work:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_run_stubborn, tmp_path)
            await appears(tmp_path / "ready")
            group = await group_of("sh")
            began = trio.current_time()
            work.scope.cancel(reason="the test")
    assert 0.35 <= trio.current_time() - began < 5
    assert living(group) == []


async def _run_stubborn(directory: Path) -> None:
    await run_program(["sh", "-c", STUBBORN], output=directory, directory=directory)


async def test_member_outlives_leader(tmp_path: Path) -> None:
    """A member that outlives its leader is ended, and delays neither the call nor its result."""
    script = "sleep 999 & echo $!; exit 5"
    began = trio.current_time()
    ended = await run_program(["sh", "-c", script], output=tmp_path)
    assert ended.code == 5
    assert trio.current_time() - began < 10
    assert not _alive(int(ended.tail[0]))


async def test_stubborn_member_outlives_leader(tmp_path: Path) -> None:
    """A member that ignores SIGTERM is killed after the allowance, before its leader is reaped."""
    stop = Stop("test", StopLimits(cleanup=0.4))
    stop.install()
    script = f"( {STUBBORN} ) & while [ ! -e ready ]; do sleep 0.01; done; exit 5"
    with Work("w", stop):
        ended = await run_program(["sh", "-c", script], output=tmp_path, directory=tmp_path)
    assert ended.code == 5
    assert 0.35 <= ended.duration < 5


async def test_small_parent_lives_while_a_member_lives(tmp_path: Path) -> None:
    """The small parent, which leads the session, outlives the program and every member."""
    script = f"( {STUBBORN} ) & while [ ! -e ready ]; do sleep 0.01; done; exit 0"
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            await run_program(["sh", "-c", script], output=tmp_path, directory=tmp_path)

        nursery.start_soon(run)
        group = await group_of("sh")
        await appears(tmp_path / "ready")
        [child] = current_children().owned()
        await until(lambda: child.ended)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert living(group)
        parent = find_process(child.handle.supervisor)
        assert parent is not None
        assert {each.session for each in child.members()} == {parent.pid} == {parent.session}
        nursery.cancel_scope.cancel(reason="the test")
        current_children().end_all()


def _alive(pid: int) -> bool:
    return any(p.pid == pid and p.alive for p in all_processes())


# -- critical sections -----------------------------------------------------


async def test_shielded_from_cancellation(tmp_path: Path) -> None:
    """Inside a critical section a stop leaves the program alone (C07 a)."""
    stop = Stop("test", StopLimits(drain=0, critical=30))
    stop.install()
    script = "trap 'echo hit; exit 9' TERM; touch ready; sleep 0.5; touch done"
    codes = []
    with stop.scope, Work("w", stop) as work:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                async with work.critical("c", budget=20):
                    ended = await run_program(
                        ["sh", "-c", script], output=tmp_path, directory=tmp_path
                    )
                    codes.append(ended.code)

            nursery.start_soon(run)
            await appears(tmp_path / "ready")
            stop.begin("the test")
    assert codes == [0]
    assert (tmp_path / "done").exists()


async def test_term_ahead_of_deadline(tmp_path: Path) -> None:
    """SIGTERM comes a quarter of the budget before the deadline, for an orderly exit."""
    stop = Stop("test", StopLimits())
    stop.install()
    script = "trap 'echo warned; exit 0' TERM; while :; do sleep 0.02; done"
    began = trio.current_time()
    with Work("w", stop) as work, pytest.raises(Overrun, match=r"ended by SIGTERM: .*warned"):
        async with work.critical("c", budget=2.0):
            await run_program(["sh", "-c", script], output=tmp_path)
    assert trio.current_time() - began >= 1.4


async def test_sigkill_at_deadline(tmp_path: Path) -> None:
    """A program that ignores SIGTERM is killed at the deadline, and the section is cut."""
    stop = Stop("test", StopLimits())
    stop.install()
    began = trio.current_time()
    with Work("w", stop) as work, pytest.raises(Overrun):
        async with work.critical("c", budget=1.2):
            await run_program(["sh", "-c", STUBBORN], output=tmp_path, directory=tmp_path)
    assert 1.15 <= trio.current_time() - began < 12
    assert current_children().owned() == []


async def test_term_that_ends_it_is_a_cut(tmp_path: Path) -> None:
    """A program that the daemon's SIGTERM ended did not fail: its section is cut at once."""
    stop = Stop("test", StopLimits())
    stop.install()
    began = trio.current_time()
    with (
        Work("w", stop) as work,
        pytest.raises(
            Overrun, match="by the SIGTERM before its deadline: sleep was ended by SIGTERM"
        ),
    ):
        async with work.critical("c", budget=4.0):
            await run_program(["sleep", "99"], output=tmp_path)
    assert 2.9 <= trio.current_time() - began < 4.0


async def test_timeout_inside_a_section(tmp_path: Path) -> None:
    """A timeout inside a section ends the program earlier, never after the deadline."""
    stop = Stop("test", StopLimits())
    stop.install()
    began = trio.current_time()
    with Work("w", stop) as work, pytest.raises(Overrun):
        async with work.critical("c", budget=1.2):
            await _time_out(tmp_path)
    assert 1.15 <= trio.current_time() - began < 12


async def _time_out(directory: Path) -> None:
    with trio.move_on_after(0.3):
        await _run_stubborn(directory)
    await trio.sleep_forever()


async def test_lowered_deadline(tmp_path: Path) -> None:
    """A stop that lowers the deadline moves SIGTERM with it."""
    stop = Stop("test", StopLimits(drain=0, critical=1.2))
    stop.install()
    script = "trap 'exit 0' TERM; touch ready; while :; do sleep 0.02; done"
    began = trio.current_time()
    with stop.scope, Work("w", stop) as work:
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                with pytest.raises(Overrun, match="SIGTERM"):
                    async with work.critical("c", budget=40.0):
                        await run_program(["sh", "-c", script], output=tmp_path, directory=tmp_path)

            nursery.start_soon(run)
            await appears(tmp_path / "ready")
            stop.begin("the test")
    assert trio.current_time() - began < 12


# -- races and output ------------------------------------------------------


async def test_cancelled_while_starting(tmp_path: Path) -> None:
    """A cancellation at any instant of a start leaves no child, running or zombie."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(150):
        with trio.move_on_after(dice.uniform(0, 0.004)):
            await run_program(["sleep", "99"], output=tmp_path)
        assert current_children().owned() == []
        assert no_children()


async def test_output_limit(tmp_path: Path) -> None:
    """Output is near its limit during a run and below it afterwards; the newest part is kept."""
    log = tmp_path / "yes.log"
    script = "yes | head -c 200000000; sleep 0.6; stat -c %b yes.log; echo last"
    ended = await run_program(
        ["sh", "-c", script], output=tmp_path, name="yes", directory=tmp_path, output_limit=100_000
    )
    assert ended.code == 0
    assert ended.tail[-1] == "last"
    assert int(ended.tail[-2]) * 512 < 200_000
    assert log.stat().st_size <= 100_000
    assert log.read_bytes().strip(b"yn\n0123456789last") == b""


async def test_tail_is_of_this_run(tmp_path: Path) -> None:
    """Output of earlier runs is kept in the file and not quoted in the tail."""
    for word in ("first", "second"):
        ended = await run_program(["echo", word], output=tmp_path)
    assert ended.tail == ("second",)
    assert (tmp_path / "echo.log").read_text() == "first\nsecond\n"
    ended = await run_program(["sh", "-c", "seq 30 | head -c 40"], output=tmp_path, output_limit=8)
    assert "second" not in ended.tail


async def test_private_modes(tmp_path: Path) -> None:
    """Output files and their new directories are accessible to the owner alone."""
    output = tmp_path / "a" / "b"
    await run_program(["true"], output=output)
    for path, mode in ((output.parent, 0o700), (output, 0o700), (output / "true.log", 0o600)):
        assert path.stat().st_mode & 0o777 == mode


async def test_binary_tail(tmp_path: Path) -> None:
    """A tail has no control codes, whatever bytes were written."""
    script = r"printf '\033[31mred\033[0m\tx\000\377\007\n\302\205\303\244\n'"
    ended = await run_program(["sh", "-c", script], output=tmp_path)
    assert all(line.isprintable() for line in ended.tail)
    assert ended.tail[0].startswith("red ")
    assert ended.tail[-1] == "ä"


def test_quote_is_bounded() -> None:
    """A failure's message is bounded, however long the quoted lines are."""
    ended = Ended("./apply", 2, None, 0.0, ("x" * 300, "y" * 300, "z" * 300))
    assert len(str(ended)) < 500
    assert str(ended).endswith("z")
    lost = Ended("p", None, None, 0.0, ())
    assert str(lost) == "p ended, but its exit status was lost, without output"


_IGNORING = """
import signal, sys, trio
from pathlib import Path
from reconciled.programs.orphan_reaper import become_subreaper
from reconciled.programs import run_program
assert signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
become_subreaper()
async def main():
    ended = await run_program(["sh", "-c", "exit 7"], output=Path(sys.argv[1]))
    argv = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]
    status = await run_program(argv, output=Path(sys.argv[1]))
    print(ended.code, *(int(line.split()[1], 16) for line in status.tail))
trio.run(main)
"""


def test_signals_ignored_at_start(tmp_path: Path) -> None:
    """Signals that the daemon's parent ignores or blocks affect neither exit codes nor programs."""
    done = subprocess.run(
        [sys.executable, "-c", _IGNORING, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        preexec_fn=_ignore_and_block,
    )
    code, blocked, ignored = map(int, done.stdout.split())
    assert (code, blocked, ignored & ~_INTERNAL) == (7, 0, 0)


# Signals 32 and 33 belong to the C library: processes that it spawns, as make does, have them
# ignored, and no program can change that.
_INTERNAL = 0b11 << 31


def _ignore_and_block() -> None:
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
