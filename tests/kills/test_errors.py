"""EIO and ENOSPC from calls of the running daemon: it logs them, continues, and recovers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness import Daemon
from scenario import PATIENCE, Scenario
from test_powercuts import need_strace

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@contextmanager
def failing(daemon: Daemon, what: str, *paths: str) -> Iterator[None]:
    """Let calls of the daemon fail, not those of its programs; on *paths* alone if given."""
    command = ["strace", "-f", "-b", "execve", "-o", "/dev/null"]
    command += [*(f"--trace-path={path}" for path in paths), f"--inject={what}"]
    strace = subprocess.Popen([*command, "-p", str(daemon.pid)], stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    try:
        output = ""
        for line in strace.stderr:
            output += line
            if "attached" in line:
                break
        else:
            pytest.fail(output)
        yield
    finally:
        # SIGKILL detaches from the daemon at once; SIGTERM waits for each of its threads to stop.
        strace.kill()
        strace.stderr.close()
        strace.wait(PATIENCE)


@pytest.mark.parametrize(
    "what", ["fdatasync:error=EIO", "pwrite64:error=ENOSPC", "pwrite64:error=EIO"]
)
def test_a_store_that_cannot_be_written(scenario: Scenario, what: str) -> None:
    """No operation starts without its intent; other work continues, and operations resume."""
    need_strace()
    scenario.declare()
    daemon = scenario.workspace.started()
    scenario.wait_for(daemon)
    before = len(scenario.effects())
    store = scenario.workspace.state / "store"
    with failing(daemon, what, f"{store}/store.sqlite-wal", f"{store}/store.sqlite"):
        scenario.declare()
        daemon.wait_for("journal.unwritable", within=PATIENCE)
        # Reading continues: an invalid manifest is found and logged.
        scenario.workspace.write(scenario.workspace.resources / "x/bad.yaml", "kind: Nothing\n")
        daemon.wait_for("manifest.invalid", within=PATIENCE)
        (scenario.workspace.resources / "x/bad.yaml").unlink()
        began = [each for each in scenario.effects()[before:] if each.what == "begin"]
        assert began == []
    daemon.wait_for("journal.writable", within=PATIENCE)
    scenario.wait_for(daemon)
    assert daemon.stop(within=PATIENCE).code == 0
    scenario.check()


@pytest.mark.parametrize(
    "what",
    [
        "fsync,fdatasync:error=EIO:when=1+3",
        "fsync,fdatasync:error=ENOSPC:when=2+3",
        "rename,renameat,renameat2:error=EIO",
        "renameat,renameat2:error=ENOSPC:when=1+2",
        "pwrite64,ftruncate:error=ENOSPC:when=2+5",
        "pwrite64,ftruncate:error=EIO:when=3+4",
    ],
)
def test_a_call_that_fails_now_and_then(scenario: Scenario, what: str) -> None:
    """Whatever call fails, and at whatever time: afterwards everything becomes as desired."""
    need_strace()
    # An attempt whose outcome could not be made durable counts, and several are needed here.
    scenario.configure(max_recoveries=100)
    scenario.declare()
    daemon = scenario.workspace.started()
    scenario.wait_for(daemon)
    with failing(daemon, what):
        scenario.declare()
        daemon.wait_for("reconcile.failed", within=PATIENCE)
    scenario.wait_for(daemon)
    assert daemon.stop(within=PATIENCE).code == 0
    scenario.check()
