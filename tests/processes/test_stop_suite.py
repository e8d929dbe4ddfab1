"""The stop suite: each stop signal, in each state of the daemon, with each budget.

The rule of each cell: wall time is at most what that state has to wait for, plus SLACK; the
daemon does not compute meanwhile; the exit code is that of the contract; no process is left.
Both bounds allow for a busy machine: bench/start.py has the figures for a quiet one.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import pytest
from harness import SLACK, Daemon, Limits, Workspace, wait_until

from reconciled.core.stages import BLOCKED_AFTER

pytestmark = pytest.mark.processes

TIGHT = Limits(drain=0.3, critical=1.0, cleanup=0.4)
ROOMY = Limits(drain=1.0, critical=8.0, cleanup=1.0)
# 10 times what bench/start.py expects of a stop.
CPU, CPU_SHARE = 0.2, 0.1
# The length of a critical operation: it fits into ROOMY, but not into TIGHT.
HELD = 2.0


@attrs.frozen
class Wait:
    """The time that a stop waits in a state, in seconds from the signal, and the exit code."""

    least: float = 0.0
    most: float = 0.0
    code: int = 0
    spins: bool = False  # the plugin itself uses the processor


NOTHING = Wait()


@attrs.frozen
class State:
    """A state of a daemon. begin() returns when the daemon is in it."""

    begin: Callable[[Workspace, Limits], Daemon]
    wait: Callable[[Limits], Wait]


def _starting(workspace: Workspace, limits: Limits) -> Daemon:
    workspace.plugin(
        "slow",
        "import os, time\n"
        'os.write(2, b\'{"event": "test.importing"}\\n\')\n'
        "time.sleep(60)\n"
        "from probe import ProbeReconciler\n",
    )
    workspace.configure(limits, reconciler="slow:ProbeReconciler")
    daemon = workspace.start()
    daemon.wait_for("test.importing")
    return daemon


def _idle(workspace: Workspace, limits: Limits) -> Daemon:
    workspace.configure(limits)
    workspace.declare("calm")
    return workspace.started()


def _doing(do: str, event: str, workspace: Workspace, limits: Limits) -> Daemon:
    workspace.configure(limits)
    workspace.declare("busy", do=do)
    daemon = workspace.started()
    daemon.wait_for(event)
    return daemon


def _critical(workspace: Workspace, limits: Limits) -> Daemon:
    workspace.configure(limits)
    workspace.declare("busy", do="critical", seconds=HELD, budget=f"{limits.critical:g}s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    return daemon


def _program(workspace: Workspace, limits: Limits) -> Daemon:
    """An ordinary program that ignores SIGTERM, run by the exec reconciler."""
    workspace.configure(limits, reconciler="exec")
    script = 'trap "" TERM; touch running; while true; do sleep 60; done'
    workspace.declare("site", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = workspace.started()
    wait_until((workspace.resources / "running").exists, "the program")
    return daemon


def _patched(source: str, workspace: Workspace, limits: Limits) -> Daemon:
    """With a plugin that patches the directory watcher."""
    workspace.plugin("patch", f"from reconciled.watchers import directory\n{source}\n")
    broken = {"reconciler": "patch:Nothing", "watch": [{"every": "1h"}]}
    watching = {"reconciler": "probe:ProbeReconciler", "watch": [{"directory": "resources"}]}
    workspace.configure(limits, controllers={"broken": broken, "c": watching})
    return workspace.start()


STALLED = """
import os, time
from reconciled.api import Reconciler
def stalled(*_):
    os.write(2, b'{"event": "test.stalled"}\\n')
    time.sleep(600)
directory.read_listing = stalled
import attrs
@attrs.frozen
class Spec: pass
class Nothing(Reconciler[Spec]):
    async def reconcile(self, request): raise AssertionError
"""

FAILING = """
from reconciled.api import Reconciler
async def failing(self, report):
    raise OSError("the watcher's own fault")
directory.DirectoryWatcher.watch = failing
import attrs
@attrs.frozen
class Spec: pass
class Nothing(Reconciler[Spec]):
    async def reconcile(self, request): raise AssertionError
"""


def _stalled_source(workspace: Workspace, limits: Limits) -> Daemon:
    daemon = _patched(STALLED, workspace, limits)
    daemon.wait_for("test.stalled")
    return daemon


def _failing_watcher(workspace: Workspace, limits: Limits) -> Daemon:
    daemon = _patched(FAILING, workspace, limits)
    daemon.wait_for("source.failed")
    daemon.wait_for("daemon.ready")
    return daemon


def _stalled_reader(workspace: Workspace, limits: Limits) -> Daemon:
    daemon = _doing("sleep", "probe.began", workspace, limits)
    daemon.stall()
    return daemon


def _drained(limits: Limits) -> Wait:
    return Wait(limits.drain, limits.drain)


def _cleaned(limits: Limits) -> Wait:
    """The wait of a run that uses up drain and cleanup."""
    both = limits.drain + limits.cleanup
    return Wait(both, both)


def _held(limits: Limits) -> Wait:
    if limits.critical < HELD:
        return Wait(limits.critical, limits.critical + limits.cleanup, code=3)
    # The signal comes right after it began.
    return Wait(HELD / 2, HELD)


def _blocked(limits: Limits) -> Wait:
    end = min(BLOCKED_AFTER, limits.critical + limits.cleanup + 3.0)
    return Wait(end - 0.1, end, code=70, spins=True)


STATES = {
    "starting": State(_starting, lambda _: NOTHING),
    "idle": State(_idle, lambda _: NOTHING),
    "reconciling": State(partial(_doing, "clean", "probe.began"), _cleaned),
    "critical": State(_critical, _held),
    "program": State(_program, _cleaned),
    "blocked-loop": State(partial(_doing, "spin", "probe.began"), _blocked),
    "stalled-source": State(_stalled_source, lambda _: NOTHING),
    "failing-watcher": State(_failing_watcher, lambda _: NOTHING),
    "stalled-reader": State(_stalled_reader, _drained),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
@pytest.mark.parametrize("limits", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("state", STATES)
def test_a_stop_takes_no_longer_than_what_it_waits_for(
    workspace: Workspace, state: str, limits: Limits, number: signal.Signals
) -> None:
    """A stop takes what its state has to wait for, does not compute meanwhile, leaves nothing."""
    daemon = STATES[state].begin(workspace, limits)
    wait = STATES[state].wait(limits)
    stopped = daemon.stop(number)
    assert stopped.code == wait.code, daemon
    assert wait.least <= stopped.wall <= wait.most + SLACK, daemon
    if not wait.spins:
        assert stopped.cpu <= CPU + CPU_SHARE * wait.most
    assert daemon.left() == []
    if state != "starting":
        assert stopped.report["signal"] == number.name
        assert stopped.report["exit_code"] == wait.code


def test_a_signal_in_any_moment_of_the_start_ends_it_with_0(workspace: Workspace) -> None:
    """Once the handlers are installed, a signal during the start ends it at once with 0."""
    workspace.configure()
    for turn in range(5):
        daemon = workspace.start()
        # As soon as the kernel has the handler, which is before the first log line.
        wait_until(partial(_catches, daemon.pid, signal.SIGTERM), "the handler")
        stopped = daemon.stop((signal.SIGTERM, signal.SIGINT)[turn % 2])
        assert stopped.code == 0
        assert stopped.wall <= SLACK
        assert daemon.all("daemon.ready") == []


def _catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
