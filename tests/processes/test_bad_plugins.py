"""C15: a faulty plugin does not end the daemon, and its wrong results are not accepted."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import SLACK, Daemon, Limits, Workspace

pytestmark = pytest.mark.processes

LIMITS = Limits(drain=0.3, critical=5, cleanup=0.5)

IMPORTS = {
    "raises": 'raise RuntimeError("not today")',
    "exits": "import sys; sys.exit(3)",
    "interrupts": "raise KeyboardInterrupt",
    "does not parse": "def reconcile(:",
    "lacks a module": "import no_such_module",
    "raises a group": 'raise ExceptionGroup("two", [ValueError("one"), OSError("two")])',
}


@pytest.mark.parametrize("fault", IMPORTS)
def test_c15_a_plugin_that_fails_to_import_stalls_its_controller_alone(
    workspace: Workspace, fault: str
) -> None:
    """C15: whatever an import raises, other controllers work; file and line are logged."""
    workspace.plugin("bad", f"{IMPORTS[fault]}\nclass Bad: pass\n")
    _beside(workspace, "bad:Bad")
    workspace.declare("good")
    daemon = workspace.started()
    stalled = daemon.wait_for("controller.stalled", controller="bad")
    assert f"{workspace.plugins}/bad.py:1:" in stalled["reason"]
    _works_on(workspace, daemon)


def _beside(workspace: Workspace, reconciler: str) -> None:
    watch = [{"directory": "resources"}]
    bad = {"reconciler": reconciler, "watch": [{"every": "1h"}]}
    good = {"reconciler": "probe:ProbeReconciler", "watch": watch}
    workspace.configure(LIMITS, level="debug", controllers={"bad": bad, "c": good})


def _works_on(workspace: Workspace, daemon: Daemon) -> None:
    """Another key is still reconciled, and the daemon stops cleanly."""
    workspace.declare("other")
    daemon.wait_for("reconcile.done", key="c/other")
    stopped = daemon.stop()
    assert stopped.code == 0, daemon
    assert stopped.wall <= LIMITS.drain + LIMITS.cleanup + SLACK
    assert daemon.left() == []


# The fault of a run, and the reason in the failure of its key.
RUNS: dict[str, str] = {
    "exit": "SystemExit: 3: raised by plugin code; the daemon continues",
    "interrupt": "KeyboardInterrupt: raised by plugin code; the daemon continues",
    "group": "ValueError: one",
    "base_group": "SystemExit: 3: raised by plugin code; the daemon continues",
    "garbage": "reconcile() returned 42",
    "crash": "ValueError: no such thing",
}


@pytest.mark.parametrize("do", RUNS)
def test_c15_a_fault_stays_with_its_key(workspace: Workspace, do: str) -> None:
    """C15: whatever a run raises or returns fails its key alone, with backoff."""
    workspace.configure(LIMITS, level="debug", retry={"initial": "1h", "max": "1h"})
    workspace.declare("bad", do=do)
    daemon = workspace.started()
    failed = daemon.wait_for("reconcile.failed", key="c/bad", failures=1)
    assert RUNS[do] in failed["reason"]
    _works_on(workspace, daemon)


def test_c15_a_fault_names_plugin_and_line(workspace: Workspace) -> None:
    """C15: an unexpected exception is logged with plugin, version and line of code."""
    workspace.configure(LIMITS, level="debug")
    workspace.declare("bad", do="crash")
    daemon = workspace.started()
    told = daemon.wait_for("plugin.failed", key="c/bad")
    assert told["plugin"] == "probe:ProbeReconciler"
    assert told["version"]
    assert told["at"].startswith(f"{workspace.plugins}/probe.py:")
    _works_on(workspace, daemon)


def test_c15_a_plugin_may_cancel_its_own_scope(workspace: Workspace) -> None:
    """C15: trio.Cancelled of a plugin's own scope is not a failure."""
    workspace.configure(LIMITS, level="debug")
    workspace.declare("odd", do="cancel")
    daemon = workspace.started()
    daemon.wait_for("reconcile.done", key="c/odd")
    _works_on(workspace, daemon)


def test_c15_a_plugin_that_leaks_a_gigabyte_affects_no_other_key(workspace: Workspace) -> None:
    """C15: a leak of 1 GiB in a plugin does not affect other keys or the stop."""
    workspace.configure(LIMITS, level="debug")
    workspace.declare("leaky", do="leak")
    daemon = workspace.started()
    daemon.wait_for("reconcile.done", key="c/leaky")
    _works_on(workspace, daemon)


def test_c15_an_import_that_takes_the_signals_does_not_get_them(workspace: Workspace) -> None:
    """C15: signal handlers that an import installs are replaced again, with a warning."""
    workspace.plugin(
        "bad",
        "import signal\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "from probe import ProbeReconciler\n",
    )
    (workspace.plugins / "bad.py").write_text(
        (workspace.plugins / "bad.py").read_text().replace(
            "from probe import ProbeReconciler",
            f"exec(open({str(workspace.plugins / 'probe.py')!r}).read())",
        )
    )  # fmt: skip
    _beside(workspace, "bad:ProbeReconciler")
    workspace.configure(LIMITS, level="debug", reconciler="bad:ProbeReconciler")
    daemon = workspace.started()
    for number in ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD"):
        reasons = [warning["reason"] for warning in daemon.all("plugin.warning")]
        assert any(number in reason for reason in reasons)
    _works_on(workspace, daemon)


def test_c15_os_exit_is_an_unclean_stop_and_the_next_start_works(workspace: Workspace) -> None:
    """C15: os._exit in a plugin ends the process; the next start works, and nothing is lost."""
    workspace.configure(LIMITS, level="debug")
    workspace.declare("good")
    manifest = workspace.declare("bad", do="sleep")
    daemon = workspace.started()
    daemon.wait_for("reconcile.done", key="c/good")
    workspace.declare("bad", do="leave")
    # The run of the old spec ends only by its timeout or a stop of its key: remove the key.
    manifest.unlink()
    daemon.wait_for("reconcile.interrupted", key="c/bad")
    workspace.declare("bad", do="leave")
    assert daemon.ended().code == 9
    manifest.unlink()
    daemon = workspace.started()
    assert daemon.wait_for("reconcile.started", key="c/good")["causes"] == ["start"]
    _works_on(workspace, daemon)


def test_c15_a_thread_that_a_plugin_left_does_not_keep_the_process(workspace: Workspace) -> None:
    """C15: a thread of a plugin that never ends does not delay the exit."""
    source: dict[str, Any] = {"reconciler": "left:ProbeReconciler"}
    workspace.plugin(
        "left",
        "import threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        f"exec(open({str(workspace.plugins / 'probe.py')!r}).read())\n",
    )
    workspace.configure(LIMITS, **source)
    daemon = workspace.started()
    stopped = daemon.stop(signal.SIGINT)
    assert stopped.code == 0
    assert stopped.wall <= SLACK
