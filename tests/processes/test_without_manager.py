"""A daemon without a service manager: it needs none, and does not log its absence."""

from __future__ import annotations

import json
import os
import signal

import pytest
from harness import Workspace

pytestmark = pytest.mark.processes

# Words that only integrations with a manager, a journal or D-Bus would log.
WORDS = ("systemd", "notify", "watchdog", "d-bus", "dbus", "logind", "inhibit", "unit", "journald")
ASKS = """
import os, sys
import attrs
from reconciled.api import Reconciler, done

@attrs.frozen
class Ask:
    pass

class Asks(Reconciler[Ask]):
    async def reconcile(self, request):
        found = [name for name in sys.modules if name.partition(".")[0] in ("jeepney", "h11")]
        request.log.info("asks.loaded", found=found)
        return done()
"""
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "JOURNAL_STREAM")


def test_without_systemd_all_of_it_is_silently_off(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a manager the daemon runs, reloads and stops, and logs nothing about it."""
    for name in (*VARIABLES, "INVOCATION_ID"):
        monkeypatch.delenv(name, raising=False)
    workspace.plugin("asks", ASKS)
    workspace.configure(reconciler="asks:Asks")
    workspace.declare("a", kind="Ask")
    daemon = workspace.started()
    assert daemon.wait_for("asks.loaded")["found"] == []
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.done")
    assert daemon.stop().code == 0
    lines = [json.dumps(line).replace(str(workspace.root), "SITE") for line in daemon.lines]
    said = [line.lower() for line in lines]
    assert [line for line in said if any(word in line for word in WORDS)] == []
    assert daemon.other == []


def test_a_manager_that_does_not_listen_is_ignored(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket without a listener, and the watchdog of another process, change nothing."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(workspace.root / "no-listener"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    workspace.configure()
    workspace.declare("a")
    daemon = workspace.started()
    assert daemon.stop().code == 0
    assert [line for line in daemon.lines if line["level"] in ("error", "critical")] == []
    assert daemon.other == []
