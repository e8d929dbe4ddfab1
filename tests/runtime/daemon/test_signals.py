"""The daemon keeps its signal handlers, even if a plugin's run replaces them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from reconciled.runtime.daemon.commands import Commands
from reconciled.signal_handlers import OTHER_SIGNALS, STOP_SIGNALS, SignalHandlers

PLUGIN = """
import attrs, signal
from reconciled.api import Reconciler, done

@attrs.frozen
class Deaf:
    pass

class DeafReconciler(Reconciler[Deaf]):
    async def reconcile(self, request):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return done("deaf")
"""
CONFIG = """\
state: {here}/state
plugins: {{directories: [plugins]}}
controllers:
  deaf: {{reconciler: "deaf:DeafReconciler", watch: [directory: resources]}}
"""


EARLY = """
import attrs, os, signal
from reconciled.api import Reconciler, done
os.kill(os.getpid(), signal.SIGUSR1)

@attrs.frozen
class Deaf:
    pass

class DeafReconciler(Reconciler[Deaf]):
    async def reconcile(self, request):
        os.kill(os.getpid(), signal.SIGUSR1)
        return done()
"""


@pytest.mark.processes
def test_sigusr1_dumps_stacks_and_ends_nothing(tmp_path: Path) -> None:
    """SIGUSR1 during the start is harmless, and dumps stacks once there is a log."""
    for directory in ("plugins", "resources"):
        (tmp_path / directory).mkdir()
    (tmp_path / "plugins/deaf.py").write_text(EARLY)
    (tmp_path / "resources/a.yaml").write_text("kind: Deaf\nmetadata: {name: a}\nspec: {}\n")
    (tmp_path / "reconciled.yaml").write_text(CONFIG.format(here=tmp_path))
    ended = subprocess.run(
        [
            str(Path(sys.executable).with_name("reconciled")),
            *("--config", str(tmp_path / "reconciled.yaml"), "run", "--once"),
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 0
    assert "most recent call first" in ended.stderr


def test_reclaim_restores_replaced_handlers() -> None:
    """reclaim() restores exactly the handlers that were replaced, and names them."""
    before = {
        number: signal.getsignal(number)
        for number in (*STOP_SIGNALS, *OTHER_SIGNALS, signal.SIGUSR1)
    }
    signals = SignalHandlers()
    try:
        signals.install()
        assert signals.reclaim() == []
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signals.reclaim() == ["SIGTERM", "SIGHUP"]
        assert signals.reclaim() == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.processes
def test_c15_a_daemon_whose_signals_a_plugin_ignores_stops(tmp_path: Path) -> None:
    """A plugin that ignores SIGTERM for the whole process does not prevent a stop (C15)."""
    for directory in ("plugins", "resources"):
        (tmp_path / directory).mkdir()
    (tmp_path / "plugins/deaf.py").write_text(PLUGIN)
    (tmp_path / "resources/a.yaml").write_text("kind: Deaf\nmetadata: {name: a}\nspec: {}\n")
    (tmp_path / "reconciled.yaml").write_text(CONFIG.format(here=tmp_path))
    with subprocess.Popen(
        [
            str(Path(sys.executable).with_name("reconciled")),
            *("--config", str(tmp_path / "reconciled.yaml"), "run"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        try:
            assert daemon.stderr is not None
            restored = next(
                line
                for line in map(json.loads, daemon.stderr)
                if line["event"] == "signals.restored"
            )
            assert restored["signals"] == ["SIGTERM"]
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(20) == 0
        finally:
            daemon.kill()


def test_a_signal_after_the_loop_has_ended_changes_nothing() -> None:
    """Between the end of the loop and the exit, a signal raises nothing: the exit code stays."""
    signals = SignalHandlers()

    async def start() -> None:
        unused = cast("Any", None)
        context = cast("Any", SimpleNamespace(signals=signals))
        Commands(context, unused, unused, unused, unused).start()

    trio.run(start)
    signals._on_other(signal.SIGCHLD, None)
    assert [number for number, _ in signals.received] == [signal.SIGCHLD]
