"""A daemon that no service manager has started: nothing is missed, and nothing is said of it."""

from __future__ import annotations

import json
import os
import signal

import pytest
from harness import Site

pytestmark = pytest.mark.processes

# What only ties to a manager, a journal or a bus would bring up.
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
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no manager is, a daemon runs, reloads and stops without one word about it."""
    for name in (*VARIABLES, "INVOCATION_ID"):
        monkeypatch.delenv(name, raising=False)
    site.plugin("asks", ASKS)
    site.configure(reconciler="asks:Asks")
    site.declare("a", kind="Ask")
    daemon = site.started()
    assert daemon.wait_for("asks.loaded")["found"] == []
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.done")
    assert daemon.stop().code == 0
    lines = [json.dumps(line).replace(str(site.root), "SITE") for line in daemon.lines]
    said = [line.lower() for line in lines]
    assert [line for line in said if any(word in line for word in WORDS)] == []
    assert daemon.other == []


def test_a_manager_that_is_not_there_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that nobody listens to, and a watchdog that is meant for others, change nothing."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(site.root / "nobody"))
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    site.configure()
    site.declare("a")
    daemon = site.started()
    assert daemon.stop().code == 0
    assert [line for line in daemon.lines if line["level"] in ("error", "critical")] == []
    assert daemon.other == []
