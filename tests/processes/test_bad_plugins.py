"""C15: one plugin does not take the house down; and no wrong answer of one is taken for right."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from harness import SLACK, Daemon, Limits, Site

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
    site: Site, fault: str
) -> None:
    """C15: whatever an import raises, the others work, and the fault is told with its place."""
    site.plugin("bad", f"{IMPORTS[fault]}\nclass Bad: pass\n")
    _beside(site, "bad:Bad")
    site.declare("good")
    daemon = site.started()
    stalled = daemon.wait_for("controller.stalled", controller="bad")
    assert f"{site.plugins}/bad.py:1:" in stalled["reason"]
    _works_on(site, daemon)


def _beside(site: Site, reconciler: str) -> None:
    watch = [{"directory": "resources"}]
    bad = {"reconciler": reconciler, "watch": [{"every": "1h"}]}
    good = {"reconciler": "probe:ProbeReconciler", "watch": watch}
    site.configure(LIMITS, level="debug", controllers={"bad": bad, "c": good})


def _works_on(site: Site, daemon: Daemon) -> None:
    """Another key is reconciled from here on, and the daemon stops cleanly."""
    site.declare("other")
    daemon.wait_for("reconcile.done", key="c/other")
    stopped = daemon.stop()
    assert stopped.code == 0, daemon
    assert stopped.wall <= LIMITS.drain + LIMITS.cleanup + SLACK
    assert daemon.left() == []


# What a run does, and what its key's failure says.
RUNS: dict[str, str] = {
    "exit": "SystemExit: 3: raised by plugin code; the daemon continues",
    "interrupt": "KeyboardInterrupt: raised by plugin code; the daemon continues",
    "group": "ValueError: one",
    "base_group": "SystemExit: 3: raised by plugin code; the daemon continues",
    "garbage": "reconcile() returned 42",
    "crash": "ValueError: no such thing",
}


@pytest.mark.parametrize("do", RUNS)
def test_c15_a_fault_stays_with_its_key(site: Site, do: str) -> None:
    """C15: what a run raises or returns is its key's failure, with backoff; the rest works on."""
    site.configure(LIMITS, level="debug", retry={"initial": "1h", "max": "1h"})
    site.declare("bad", do=do)
    daemon = site.started()
    failed = daemon.wait_for("reconcile.failed", key="c/bad", failures=1)
    assert RUNS[do] in failed["reason"]
    _works_on(site, daemon)


def test_c15_a_fault_names_plugin_and_place(site: Site) -> None:
    """C15: an exception that nobody foresaw is told with plugin, version and line of code."""
    site.configure(LIMITS, level="debug")
    site.declare("bad", do="crash")
    daemon = site.started()
    told = daemon.wait_for("plugin.failed", key="c/bad")
    assert told["plugin"] == "probe:ProbeReconciler"
    assert told["version"]
    assert told["at"].startswith(f"{site.plugins}/probe.py:")
    _works_on(site, daemon)


def test_c15_a_cancellation_of_its_own_is_no_failure(site: Site) -> None:
    """C15: trio.Cancelled of a plugin's own scope passes as in any trio program."""
    site.configure(LIMITS, level="debug")
    site.declare("odd", do="cancel")
    daemon = site.started()
    daemon.wait_for("reconcile.done", key="c/odd")
    _works_on(site, daemon)


def test_c15_a_plugin_that_keeps_a_gigabyte_harms_nobody_else(site: Site) -> None:
    """C15: what a plugin leaks is its own affair; other keys and the stop are as ever."""
    site.configure(LIMITS, level="debug")
    site.declare("leaky", do="leak")
    daemon = site.started()
    daemon.wait_for("reconcile.done", key="c/leaky")
    _works_on(site, daemon)


def test_c15_an_import_that_takes_the_signals_does_not_get_them(site: Site) -> None:
    """C15: handlers that an import installs are taken away again, with a warning."""
    site.plugin(
        "bad",
        "import signal\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
        "from probe import ProbeReconciler\n",
    )
    (site.plugins / "bad.py").write_text(
        (site.plugins / "bad.py").read_text().replace(
            "from probe import ProbeReconciler",
            f"exec(open({str(site.plugins / 'probe.py')!r}).read())",
        )
    )  # fmt: skip
    _beside(site, "bad:ProbeReconciler")
    site.configure(LIMITS, level="debug", reconciler="bad:ProbeReconciler")
    daemon = site.started()
    for number in ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD"):
        reasons = [warning["reason"] for warning in daemon.all("plugin.warning")]
        assert any(number in reason for reason in reasons)
    _works_on(site, daemon)


def test_c15_os_exit_is_an_unclean_stop_that_harms_no_next_start(site: Site) -> None:
    """C15: os._exit in a plugin ends the process; the next start works, and nothing is lost."""
    site.configure(LIMITS, level="debug")
    site.declare("good")
    manifest = site.declare("bad", do="sleep")
    daemon = site.started()
    daemon.wait_for("reconcile.done", key="c/good")
    site.declare("bad", do="leave")
    # The run of the old spec ends by its timeout or a stop only: give it its stop.
    manifest.unlink()
    daemon.wait_for("reconcile.interrupted", key="c/bad")
    site.declare("bad", do="leave")
    assert daemon.ended().code == 9
    manifest.unlink()
    daemon = site.started()
    assert daemon.wait_for("reconcile.started", key="c/good")["causes"] == ["start"]
    _works_on(site, daemon)


def test_c15_a_thread_that_a_plugin_left_does_not_keep_the_process(site: Site) -> None:
    """C15: a thread of a plugin's own, which never ends, holds up no exit."""
    source: dict[str, Any] = {"reconciler": "left:ProbeReconciler"}
    site.plugin(
        "left",
        "import threading\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        f"exec(open({str(site.plugins / 'probe.py')!r}).read())\n",
    )
    site.configure(LIMITS, **source)
    daemon = site.started()
    stopped = daemon.stop(signal.SIGINT)
    assert stopped.code == 0
    assert stopped.wall <= SLACK
