"""Rules of ``reconciled reap``, with real programs whose daemon was killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
from operations import ID, end_all_of, start_host, wait_for

from reconciled.cli import reap as cli
from reconciled.cli.main import main
from reconciled.journal.state_lock import StateLock
from reconciled.programs import survivor_reaper
from reconciled.programs.cgroup import members_of
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import ChildRecord, read_child, read_end
from reconciled.programs.survivor_reaper import SurvivorReaper
from reconciled.runtime.daemon.startup import end_leftovers
from reconciled.service.notify import Notifier

RECONCILED = Path(sys.executable).with_name("reconciled")
pytestmark = pytest.mark.processes

ENDS_ON_WORD = "touch ready; while [ ! -e go ]; do sleep 0.01; done; exit 6"
STUBBORN = "trap '' TERM; touch ready; while :; do sleep 0.05; done"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory; what a failed test left running for it is ended."""
    tmp_path.chmod(0o700)
    yield tmp_path
    for directory in (tmp_path / "operations").glob("*"):
        end_all_of(directory)


def left_behind(state: Path, script: str, *, budget: float = 0, name: str = ID) -> Path:
    """The operation whose program runs *script* and has lost its daemon."""
    directory = state / "operations" / name
    (state / "ready").unlink(missing_ok=True)
    host = start_host(directory, script, where=state, budget=budget)
    wait_for((state / "ready").exists)
    host.kill()
    host.wait()
    return directory


def child_of(directory: Path) -> ChildRecord:
    record = read_child(directory)
    assert record is not None
    return record


def alive(pid: int) -> bool:
    process = find_process(pid)
    return process is not None and process.alive


def reap(state: Path, *options: str) -> int:
    return main(["reap", "--state", str(state), *options])


def test_nothing_left(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing was left it says nothing; no state directory at all is no fault either."""
    assert reap(state) == 0
    assert reap(state / "never made") == 0
    assert capsys.readouterr().err == ""


def test_living_daemon(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a daemon holds the state directory nothing is touched: 75."""
    directory = left_behind(state, ENDS_ON_WORD)
    lock = StateLock.acquire(state)
    try:
        assert reap(state) == 75
    finally:
        lock.release()
    assert alive(child_of(directory).program.pid)
    assert "is held by process" in capsys.readouterr().err


def test_ordinary_program_is_ended_at_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An ordinary program gets SIGTERM at once; that it ends by it is no force: 0, and recorded."""
    directory = left_behind(state, ENDS_ON_WORD)
    began = time.monotonic()
    assert reap(state) == 0
    assert time.monotonic() - began < 20
    end = read_end(directory)
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGTERM)
    assert not alive(child_of(directory).parent.pid)
    assert capsys.readouterr().err == (f"reconciled reap: apply of operation {ID} gets SIGTERM\n")


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", ""])
def test_nobody_has_to_read_what_it_says(state: Path, where: str) -> None:
    """With standard error closed, full or without a reader it does its work all the same."""
    directory = left_behind(state, ENDS_ON_WORD)
    read, write = os.pipe()
    os.close(read)
    command = ["sh", "-c", f'exec "$0" reap --state "$1" {where}', RECONCILED, state]
    assert subprocess.run(command, check=False, stderr=write, timeout=30).returncode == 0
    os.close(write)
    assert not alive(child_of(directory).program.pid)


def test_stubborn_program_is_killed(state: Path) -> None:
    """One that ignores SIGTERM gets SIGKILL after --term, and the exit code says so: 3."""
    directory = left_behind(state, STUBBORN)
    assert reap(state, "--term", "300ms") == 3
    end = read_end(directory)
    assert end is not None
    assert end.signal == signal.SIGKILL


def test_critical_program_is_waited_for(state: Path) -> None:
    """A critical program goes on within its budget, and its own end is recorded: 0."""
    directory = left_behind(state, f"({ENDS_ON_WORD})", budget=30)
    started = subprocess.Popen(["sh", "-c", f"sleep 0.5; touch {state}/go"])
    assert reap(state) == 0
    started.wait()
    end = read_end(directory)
    assert end is not None
    assert (end.code, end.signal) == (6, None)


@pytest.mark.parametrize(("budget", "wait"), [(1.5, "10m"), (60, "500ms")])
def test_critical_program_past_its_time(state: Path, budget: float, wait: str) -> None:
    """A critical program gets what is left of its budget and --wait at most; then 3: it was cut."""
    directory = left_behind(state, ENDS_ON_WORD, budget=budget)
    began = time.monotonic()
    assert reap(state, "--wait", wait) == 3
    assert time.monotonic() - began < 20
    end = read_end(directory)
    assert end is not None
    assert end.signal == signal.SIGTERM


def test_all_at_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several programs have their time side by side: all get SIGTERM before one gets SIGKILL."""
    for letter in "ABC":
        left_behind(state, STUBBORN, name=ID + letter)
    assert reap(state, "--term", "1s") == 3
    lines = capsys.readouterr().err.splitlines()
    signals = [line.rpartition(" ")[2] for line in lines if " gets " in line]
    assert signals == ["SIGTERM"] * 3 + ["SIGKILL"] * 3


def test_end_is_noted_for_a_dead_parent(state: Path) -> None:
    """Where the small parent was killed too, what was ended here is recorded here."""
    directory = left_behind(state, ENDS_ON_WORD)
    os.kill(child_of(directory).parent.pid, signal.SIGKILL)
    assert reap(state) == 0
    end = read_end(directory)
    assert end is not None
    assert (end.signal, end.by) == (signal.SIGTERM, "reap")


def test_damaged_record(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is signalled on a guess: an operation with a damaged record is named, and left."""
    directory = left_behind(state, ENDS_ON_WORD)
    pid = child_of(directory).program.pid
    (directory / "child").write_text("{")
    assert reap(state) == 0
    assert alive(pid)
    assert f"operation {ID} is left alone: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config", "/none", "reap"], "no state directory: write --state DIRECTORY"),
        (["reap", "--state", "/", "--wait", "10"], "'10' is not a duration"),
    ],
)
def test_usage(
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong usage is 2, with what to write instead."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_state_of_the_service_manager(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --state it takes $STATE_DIRECTORY, and needs no configuration."""
    directory = left_behind(state, ENDS_ON_WORD)
    monkeypatch.setenv("STATE_DIRECTORY", f"{state}:/elsewhere")
    monkeypatch.setenv("RECONCILED_CONFIG", "/no/such/file")
    assert main(["reap"]) == 0
    assert read_end(directory) is not None


def test_state_of_the_configuration(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It looks where the daemon has looked: a configured directory, be the rest of it invalid."""
    directory = left_behind(state, ENDS_ON_WORD)
    config = state / "r.yaml"
    config.write_text(f"state: {state}\nnonsense: [\n")
    monkeypatch.setenv("STATE_DIRECTORY", "/elsewhere")
    assert main(["--config", str(config), "reap"]) == 0
    assert read_end(directory) is not None
    assert capsys.readouterr().err == f"reconciled reap: apply of operation {ID} gets SIGTERM\n"


def test_the_manager_is_told(state: Path) -> None:
    """While it waits it says for whom and how long, and asks for that time and a little more."""
    left_behind(state, ENDS_ON_WORD, budget=12)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(state / "notify"))
        manager.settimeout(10)
        reaping = subprocess.Popen(
            [RECONCILED, "reap", "--state", str(state)],
            env={**os.environ, "NOTIFY_SOCKET": str(state / "notify")},
        )
        status, extension = (manager.recv(4096).decode() for _ in range(2))
        (state / "go").touch()
        assert reaping.wait(20) == 0
    assert re.fullmatch(rf"STATUS=waits for apply of operation {ID}, (8|9|1[012])s left\n", status)
    number = int(extension.removeprefix("EXTEND_TIMEOUT_USEC="))
    assert 12_000_000 < number < 17_100_000


def test_an_extension_is_bounded(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for more than 30 s at once: a reaper that hangs is not waited for as long."""
    left_behind(state, ENDS_ON_WORD, budget=500)
    asked: list[float] = []
    monkeypatch.setattr(Notifier, "extend_timeout", lambda _, seconds: asked.append(seconds))
    assert reap(state, "--wait", "400ms") == 3
    (state / "go").unlink(missing_ok=True)
    left_behind(state, ENDS_ON_WORD, budget=500)
    monkeypatch.setattr(Notifier, "set_status", lambda *_: (state / "go").touch())
    assert reap(state) == 0
    assert (asked[0] < 6, asked[-1]) == (True, 30)


def test_no_trio(state: Path) -> None:
    """It imports no trio: it has to work where hardly anything does, and after every stop."""
    script = (
        "import sys; from reconciled.cli import main;"
        f" code = main(['reap', '--state', {str(state)!r}]); print(code, 'trio' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "False"]


def test_it_says_at_once_whom_it_waits_for_now(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says of whom it waits for is true as soon as somebody has gone, not seconds later."""
    monkeypatch.setattr(survivor_reaper, "REPORT_INTERVAL", 600)
    left_behind(state, ENDS_ON_WORD, budget=10, name=ID + "A")
    left_behind(state, ENDS_ON_WORD, name=ID + "B")
    heard: list[str] = []

    def hear(text: str, _seconds: float) -> None:
        heard.append(text.rpartition(",")[0])
        if "more" not in text:
            (state / "go").touch()

    said: list[str] = []
    # So long that the first report would hold beyond the budget.
    assert not SurvivorReaper(600, 600, said.append, report=hear).reap(state / "operations")
    assert heard == [
        f"ends apply of operation {ID}B, and 1 more",
        f"waits for apply of operation {ID}A",
    ]


# -- the unit's control group --------------------------------------------------


def a_group(state: Path, pids: list[int]) -> Path:
    """What the kernel shows of a control group with *pids* in a leaf of it."""
    leaf = state / "group" / "main"
    leaf.mkdir(parents=True)
    (state / "group" / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (leaf / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return state / "group"


def test_alone_in_the_group_of_its_unit_it_is_done(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs after every stop: where nobody is left, it takes no lock and reads no record."""
    lock = StateLock.acquire(state)
    try:
        group = a_group(state, [])
        monkeypatch.setattr(cli, "cgroup_of_control_process", lambda _: group)
        assert reap(state) == 0
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n{os.getppid()}\n")
        assert reap(state) == 75
    finally:
        lock.release()


def test_strays_are_ended(state: Path) -> None:
    """What else is in the unit's group is ended at once, and killed after --term."""
    stray = subprocess.Popen(["sleep", "60"], start_new_session=True)
    group = a_group(state, [stray.pid, os.getppid()])
    said: list[str] = []
    assert [process.pid for process in members_of(group)] == [stray.pid]
    assert not SurvivorReaper(600, 30, said.append, group).reap(state / "operations")
    assert stray.wait() == -signal.SIGTERM
    assert said == [f"sleep (pid {stray.pid}) gets SIGTERM"]


def test_a_critical_program_has_no_strays(state: Path) -> None:
    """Parent, program and what a critical program started are no strays while it lives."""
    script = f"setsid sleep 60 & echo $! > member; {ENDS_ON_WORD}"
    directory = left_behind(state, script, budget=1.5)
    member = int((state / "member").read_text())
    record = child_of(directory)
    group = a_group(state, [member, record.program.pid, record.parent.pid])
    said: list[str] = []
    assert SurvivorReaper(600, 30, said.append, group).reap(state / "operations")
    assert [line.rpartition(" gets ")[::2] for line in said[1:]] == [
        (f"apply of operation {ID}", "SIGTERM"),
        (f"sleep (pid {member})", "SIGTERM"),
    ]
    assert not alive(member)


def test_a_helper_that_went_its_own_way_is_no_stray(state: Path) -> None:
    """What has left a critical program's group and descent, but is of its operation, stays."""
    helper = "sh -c 'setsid sleep 60 & echo $! > helper' &"
    directory = left_behind(
        state, f"{helper} until [ -s helper ]; do :; done; {ENDS_ON_WORD}", budget=60
    )
    helping = int((state / "helper").read_text())
    process = find_process(helping)
    assert process is not None
    record = child_of(directory)
    assert {process.parent, process.group}.isdisjoint({record.program.pid, record.parent.pid})
    said: list[str] = []

    def hear(_text: str, _seconds: float) -> None:
        # Once more when the program has ended: then it is the helper's turn, which may be gone.
        assert alive(helping) or (state / "go").exists()
        (state / "go").touch()

    group = a_group(state, [helping, record.program.pid, record.parent.pid])
    assert not SurvivorReaper(600, 30, said.append, group, hear).reap(state / "operations")
    assert said[-1] == f"sleep (pid {helping}) gets SIGTERM"


# -- the start of the next daemon ------------------------------------------------


def test_the_start_leaves_critical_programs_to_their_adoption(state: Path) -> None:
    """At a start whatever is left is ended, but critical programs of operations that are open."""
    adopted = left_behind(state, ENDS_ON_WORD, budget=60, name=ID + "A")
    closed = left_behind(state, ENDS_ON_WORD, budget=60, name=ID + "B")
    ordinary = left_behind(state, ENDS_ON_WORD, name=ID + "C")
    stray = subprocess.Popen(["sleep", "60"], start_new_session=True)
    records = [child_of(each) for each in (adopted, closed, ordinary)]
    pids = [pid for each in records for pid in (each.program.pid, each.parent.pid)]
    log = Lines()
    group = a_group(state, [*pids, stray.pid])
    found = [SimpleNamespace(id=adopted.name), SimpleNamespace(id=ordinary.name)]
    end_leftovers(group, state / "operations", found, log)  # type: ignore[arg-type]
    assert [alive(each.program.pid) for each in records] == [True, False, False]
    assert stray.wait() == -signal.SIGTERM
    assert read_end(adopted) is None
    for directory in (closed, ordinary):
        end = read_end(directory)
        assert end is not None
        assert end.signal == signal.SIGTERM
    assert sorted(log.reasons) == [
        f"apply of operation {ID}B gets SIGTERM",
        f"apply of operation {ID}C gets SIGTERM",
        f"sleep (pid {stray.pid}) gets SIGTERM",
    ]


def test_the_start_alone_in_its_group_looks_no_further(state: Path) -> None:
    """Where nobody is left, no record is read: most starts have nothing to wait for."""
    log = Lines()
    (state / "operations" / ID).mkdir(parents=True)
    (state / "operations" / ID / "child").write_text("{")
    end_leftovers(a_group(state, []), state / "operations", [], log)  # type: ignore[arg-type]
    assert log.reasons == []


class Lines:
    """A log that keeps the reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def warning(self, event: str, *, reason: str) -> None:
        assert event == "program.left_over"
        self.reasons.append(reason)
