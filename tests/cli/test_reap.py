"""Rules of ``reconciled reap``, with real programs whose daemon was killed."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from operations import ID, end_all_of, start_daemon, wait_for

from reconciled.cli import reap as cli
from reconciled.cli.main import main
from reconciled.journal.state_lock import StateLock
from reconciled.programs import reap as reap_module
from reconciled.programs.cgroup import members_of
from reconciled.programs.processes import find_process
from reconciled.programs.program_records import ChildRecord, read_child, read_end
from reconciled.programs.reap import SurvivorReaper
from reconciled.programs.survivors import Survivor
from reconciled.runtime.daemon.startup import end_leftovers
from reconciled.service.notify import Notifier

RECONCILED = Path(sys.executable).with_name("reconciled")
pytestmark = pytest.mark.processes

ENDS_ON_GO = "touch ready; while [ ! -e go ]; do sleep 0.01; done; exit 6"
STUBBORN = "trap '' TERM; touch ready; while :; do sleep 0.05; done"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory; processes that a failed test left are killed."""
    tmp_path.chmod(0o700)
    yield tmp_path
    for directory in (tmp_path / "operations").glob("*"):
        end_all_of(directory)


def left_behind(state: Path, script: str, *, budget: float = 0, name: str = ID) -> Path:
    """The directory of an operation whose program runs *script* after its daemon was killed."""
    directory = state / "operations" / name
    (state / "ready").unlink(missing_ok=True)
    daemon = start_daemon(directory, script, where=state, budget=budget)
    wait_for((state / "ready").exists)
    daemon.kill()
    daemon.wait()
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


def test_without_survivors_it_does_nothing(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without survivors, or without a state directory, it prints nothing and exits with 0."""
    assert reap(state) == 0
    assert reap(state / "never made") == 0
    assert capsys.readouterr().err == ""


def test_running_daemon_is_refused(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While a daemon holds the state directory no process is signalled: 75."""
    directory = left_behind(state, ENDS_ON_GO)
    lock = StateLock.acquire(state)
    try:
        assert reap(state) == 75
    finally:
        lock.release()
    assert alive(child_of(directory).program.pid)
    text = f"a daemon (pid {os.getpid()}) is running on {state}: nothing was ended; stop it first"
    assert capsys.readouterr().err == f"reconciled reap: {text}\n"


def test_ordinary_program_is_ended_at_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An ordinary program gets SIGTERM at once; its end is recorded, and the exit code is 0."""
    directory = left_behind(state, ENDS_ON_GO)
    began = time.monotonic()
    assert reap(state) == 0
    assert time.monotonic() - began < 20
    end = read_end(directory)
    assert end is not None
    assert (end.code, end.signal) == (None, signal.SIGTERM)
    assert not alive(child_of(directory).parent.pid)
    assert capsys.readouterr().err == (
        f"reconciled reap: sent SIGTERM to apply of operation {ID}\n"
    )


def test_reap_on_a_copy_signals_no_program_of_the_original(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that a copied record names belongs to the original's daemon."""
    directory = left_behind(state, ENDS_ON_GO)
    copy = state.with_name("copy")
    shutil.copytree(state, copy, ignore=shutil.ignore_patterns("group"))
    assert reap(copy) == 0
    assert alive(child_of(directory).program.pid)
    text = "was left alone: it belongs to the directory that this one is a copy of"
    assert capsys.readouterr().err == f"reconciled reap: apply of operation {ID} {text}\n"
    assert read_end(copy / "operations" / ID) is None
    assert reap(state) == 0
    assert not alive(child_of(directory).program.pid)


def test_reap_on_a_renamed_directory_ends_its_programs(state: Path) -> None:
    """A rename keeps the inode: the programs are those of this directory."""
    directory = left_behind(state, ENDS_ON_GO)
    moved = state.rename(state.with_name("moved"))
    try:
        assert reap(moved) == 0
        assert not alive(child_of(moved / "operations" / directory.name).program.pid)
    finally:
        moved.rename(state)


def test_reap_on_another_device_signals_nothing(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot has the inode of its original: its programs are waited for, never signalled."""
    directory = left_behind(state, ENDS_ON_GO)
    file = directory / "child"
    data = json.loads(file.read_bytes())
    data["state"]["device"] += 1
    file.write_text(json.dumps(data))
    assert reap(state, "--term", "100ms") == 0
    assert alive(child_of(directory).program.pid)
    assert "is on another device than at its start" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", ""])
def test_unwritable_standard_error_is_ignored(state: Path, where: str) -> None:
    """It ends programs even if standard error is closed, full or without a reader."""
    directory = left_behind(state, ENDS_ON_GO)
    read, write = os.pipe()
    os.close(read)
    command = ["sh", "-c", f'exec "$0" reap --state "$1" {where}', RECONCILED, state]
    assert subprocess.run(command, check=False, stderr=write, timeout=30).returncode == 0
    os.close(write)
    assert not alive(child_of(directory).program.pid)


def test_stubborn_program_is_killed(state: Path) -> None:
    """A program that ignores SIGTERM gets SIGKILL after --term, and the exit code is 3."""
    directory = left_behind(state, STUBBORN)
    assert reap(state, "--term", "300ms") == 3
    end = read_end(directory)
    assert end is not None
    assert end.signal == signal.SIGKILL


def test_critical_program_is_waited_for(state: Path) -> None:
    """A critical program continues within its budget, and its own end is recorded: 0."""
    directory = left_behind(state, f"({ENDS_ON_GO})", budget=30)
    started = subprocess.Popen(["sh", "-c", f"sleep 0.5; touch {state}/go"])
    assert reap(state) == 0
    started.wait()
    end = read_end(directory)
    assert end is not None
    assert (end.code, end.signal) == (6, None)


@pytest.mark.parametrize(("budget", "wait"), [(1.5, "10m"), (60, "500ms")])
def test_critical_program_past_its_budget(state: Path, budget: float, wait: str) -> None:
    """A critical program is ended after the rest of its budget, at most --wait: 3."""
    directory = left_behind(state, ENDS_ON_GO, budget=budget)
    began = time.monotonic()
    assert reap(state, "--wait", wait) == 3
    assert time.monotonic() - began < 20
    end = read_end(directory)
    assert end is not None
    assert end.signal == signal.SIGTERM


def test_programs_are_ended_concurrently(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The times of several programs overlap: all get SIGTERM before one gets SIGKILL."""
    for letter in "ABC":
        left_behind(state, STUBBORN, name=ID + letter)
    assert reap(state, "--term", "1s") == 3
    lines = capsys.readouterr().err.splitlines()
    signals = [line.split()[3] for line in lines if ": sent " in line]
    assert signals == ["SIGTERM"] * 3 + ["SIGKILL"] * 3


def test_end_is_recorded_for_a_killed_parent(state: Path) -> None:
    """If the small parent was killed, the reaper records the end of the program it ended."""
    directory = left_behind(state, ENDS_ON_GO)
    os.kill(child_of(directory).parent.pid, signal.SIGKILL)
    assert reap(state) == 0
    end = read_end(directory)
    assert end is not None
    assert (end.signal, end.by) == (signal.SIGTERM, "reap")


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (True, "did not end after SIGKILL: check the device or file system that it uses"),
        (False, "could not be signalled: end it by hand"),
    ],
)
def test_program_that_cannot_be_ended_is_named(
    state: Path, monkeypatch: pytest.MonkeyPatch, *, sent: bool, why: str
) -> None:
    """A program that survives each measure is named with its pid and the reason."""
    directory = left_behind(state, ENDS_ON_GO)
    monkeypatch.setattr(reap_module, "KILL_TIMEOUT", 0.1)
    monkeypatch.setattr(Survivor, "signal", lambda *_: sent)
    monkeypatch.setattr(Survivor, "kill_parent", lambda _: None)
    lines: list[str] = []
    assert SurvivorReaper(600, 0.1, lines.append).reap(state / "operations")
    pid = child_of(directory).program.pid
    pattern = rf"apply of operation {ID} \(sh pid {pid}(, sleep pid \d+)?\) {re.escape(why)}"
    assert re.fullmatch(pattern, lines[-1])
    assert alive(pid)


def test_damaged_record(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operation with a damaged record is named, and no process is signalled for it."""
    directory = left_behind(state, ENDS_ON_GO)
    pid = child_of(directory).program.pid
    (directory / "child").write_text("{")
    assert reap(state) == 0
    assert alive(pid)
    error = capsys.readouterr().err
    assert f"cannot end the program of operation {ID}: {directory}/child is damaged" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "/none", "reap"], "no state directory is known: add --state DIRECTORY"),
        (["reap", "--state", "/", "--wait", "10"], "'10' is not a duration"),
    ],
)
def test_usage(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong usage exits with 2 and states the correct usage."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_state_of_the_service_manager(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --state it uses $STATE_DIRECTORY and needs no configuration."""
    directory = left_behind(state, ENDS_ON_GO)
    monkeypatch.setenv("STATE_DIRECTORY", f"{state}:/elsewhere")
    monkeypatch.setenv("RECONCILED_CONFIG", "/no/such/file")
    assert main(["reap"]) == 0
    assert read_end(directory) is not None


def test_state_of_the_configuration(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It uses the configured state directory, even if the rest of the configuration is invalid."""
    directory = left_behind(state, ENDS_ON_GO)
    config = state / "r.yaml"
    config.write_text(f"state: {state}\nnonsense: [\n")
    monkeypatch.setenv("STATE_DIRECTORY", "/elsewhere")
    assert main(["--config", str(config), "reap"]) == 0
    assert read_end(directory) is not None
    assert capsys.readouterr().err == f"reconciled reap: sent SIGTERM to apply of operation {ID}\n"


def test_manager_gets_status_and_extension(state: Path) -> None:
    """While it waits it reports the program and the time, and requests slightly more time."""
    left_behind(state, ENDS_ON_GO, budget=12)
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
    assert re.fullmatch(
        rf"STATUS=waiting for apply of operation {ID}, (8|9|1[012])s left\n", status
    )
    number = int(extension.removeprefix("EXTEND_TIMEOUT_USEC="))
    assert 12_000_000 < number < 17_100_000


def test_extension_is_bounded(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is for 30 s at most, so that the manager soon kills a reaper that hangs."""
    left_behind(state, ENDS_ON_GO, budget=500)
    requested: list[float] = []
    monkeypatch.setattr(Notifier, "extend_timeout", lambda _, seconds: requested.append(seconds))
    assert reap(state, "--wait", "400ms") == 3
    (state / "go").unlink(missing_ok=True)
    left_behind(state, ENDS_ON_GO, budget=500)
    monkeypatch.setattr(Notifier, "set_status", lambda *_: (state / "go").touch())
    assert reap(state) == 0
    assert (requested[0] < 6, requested[-1]) == (True, 30)


def test_trio_is_not_imported(state: Path) -> None:
    """It does not import trio: it runs after every stop and must not depend on much."""
    script = (
        "import sys; from reconciled.cli import main;"
        f" code = main(['reap', '--state', {str(state)!r}]); print(code, 'trio' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "False"]


def test_status_changes_at_once_when_a_program_has_ended(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is updated when a program has ended, not after the report interval."""
    monkeypatch.setattr(reap_module, "REPORT_INTERVAL", 600)
    left_behind(state, ENDS_ON_GO, budget=10, name=ID + "A")
    left_behind(state, ENDS_ON_GO, name=ID + "B")
    reports: list[str] = []

    def report(text: str, _seconds: float) -> None:
        reports.append(text.rpartition(",")[0])
        if "more" not in text:
            (state / "go").touch()

    lines: list[str] = []
    # With these times the first report would be valid beyond the budget.
    assert not SurvivorReaper(600, 600, lines.append, report=report).reap(state / "operations")
    assert reports == [
        f"ending apply of operation {ID}B, and 1 more",
        f"waiting for apply of operation {ID}A",
    ]


# -- the unit's control group --------------------------------------------------


def a_group(state: Path, pids: list[int]) -> Path:
    """Files of a control group with *pids* in a leaf of it."""
    leaf = state / "group" / "main"
    leaf.mkdir(parents=True)
    (state / "group" / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (leaf / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return state / "group"


def test_empty_group_of_the_unit_needs_no_lock(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the unit's group has no other process, it takes no lock and reads no record."""
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
    """Other processes of the unit's group get SIGTERM at once, and SIGKILL after --term."""
    stray = subprocess.Popen(["sleep", "60"], start_new_session=True)
    group = a_group(state, [stray.pid, os.getppid()])
    lines: list[str] = []
    assert [process.pid for process in members_of(group)] == [stray.pid]
    assert not SurvivorReaper(600, 30, lines.append, group).reap(state / "operations")
    assert stray.wait() == -signal.SIGTERM
    assert lines == [f"sent SIGTERM to sleep (pid {stray.pid})"]


def test_critical_program_has_no_strays(state: Path) -> None:
    """A running critical program, its small parent and its descendants are not strays."""
    script = f"setsid sleep 60 & echo $! > member; {ENDS_ON_GO}"
    directory = left_behind(state, script, budget=1.5)
    member = int((state / "member").read_text())
    record = child_of(directory)
    group = a_group(state, [member, record.program.pid, record.parent.pid])
    lines: list[str] = []
    assert SurvivorReaper(600, 30, lines.append, group).reap(state / "operations")
    assert lines[1:] == [
        f"sent SIGTERM to apply of operation {ID}",
    ]
    assert not alive(member)


def test_detached_helper_is_not_a_stray(state: Path) -> None:
    """A detached helper of a critical program is no stray as long as the program runs."""
    helper = "sh -c 'setsid sleep 60 & echo $! > helper' &"
    directory = left_behind(
        state, f"{helper} until [ -s helper ]; do :; done; {ENDS_ON_GO}", budget=60
    )
    helping = int((state / "helper").read_text())
    process = find_process(helping)
    assert process is not None
    record = child_of(directory)
    assert (process.parent, process.group) == (record.parent.pid, helping)
    lines: list[str] = []

    def report(_text: str, _seconds: float) -> None:
        # Called again after the program has ended: the helper may have been ended by then.
        assert alive(helping) or (state / "go").exists()
        (state / "go").touch()

    group = a_group(state, [helping, record.program.pid, record.parent.pid])
    assert not SurvivorReaper(600, 30, lines.append, group, report).reap(state / "operations")
    assert lines[-1] == f"sent SIGTERM to sleep (pid {helping})"


# -- the start of the next daemon ------------------------------------------------


def test_the_start_leaves_critical_programs_to_their_adoption(state: Path) -> None:
    """A start ends all survivors and strays, except critical programs of open operations."""
    adopted = left_behind(state, ENDS_ON_GO, budget=60, name=ID + "A")
    closed = left_behind(state, ENDS_ON_GO, budget=60, name=ID + "B")
    ordinary = left_behind(state, ENDS_ON_GO, name=ID + "C")
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
        f"sent SIGTERM to apply of operation {ID}B",
        f"sent SIGTERM to apply of operation {ID}C",
        f"sent SIGTERM to sleep (pid {stray.pid})",
    ]


def test_start_with_an_empty_group_reads_no_record(state: Path) -> None:
    """If the unit's group has no other process, a start reads no record."""
    log = Lines()
    (state / "operations" / ID).mkdir(parents=True)
    (state / "operations" / ID / "child").write_text("{")
    end_leftovers(a_group(state, []), state / "operations", [], log)  # type: ignore[arg-type]
    assert log.reasons == []


class Lines:
    """A log that keeps the reasons of its lines."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def warning(self, event: str, *, reason: str) -> None:
        assert event == "program.left_over"
        self.reasons.append(reason)
