"""Synchronous reloads, and listeners that refuse no connection, on a real manager."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from installed import ETC, Service, wait_until

PYTHON = "/opt/reconciled/bin/python3"
CONTROL = "/run/reconciled/control.sock"
ACTIVATED = "/run/reconciled.sock"
PORT = 9464
HTTP = {"listen": f"127.0.0.1:{PORT}"}


def controllers(*names: str) -> dict[str, Any]:
    """Controllers of these names without keys."""
    return {name: {"reconciler": "exec", "watch": [{"every": "1h"}]} for name in names}


def ended(process: subprocess.Popen[str]) -> int:
    """The exit code of a command, once it has ended."""
    process.communicate(timeout=20)
    return process.returncode


# -- reload ------------------------------------------------------------------------------------


def test_a_reload_is_synchronous(service: Service) -> None:
    """``systemctl reload`` returns when the new configuration is in force, in the same process."""
    service.configure(controllers=controllers("a"))
    service.start()
    before = service.show("MainPID", "InvocationID")
    service.configure(controllers=controllers("a", "b"))
    service.reload()
    (line,) = service.all("reload.done")
    assert json.loads(line.fields["started"]) == ["b"]
    assert service.show("MainPID", "InvocationID") == before
    assert service.property("ActiveState") == "active"


def test_c13_a_rejected_reload_fails_with_its_message(service: Service) -> None:
    """C13: ``systemctl reload`` fails with location and reason; the old configuration stays."""
    service.configure()
    service.start()
    before = service.show("MainPID", "ActiveState", "SubState")
    bad = "controllers: {c: {reconciler: fiel, watch: [{every: 1h}]}}\n"
    service.file("reconciled.yaml", bad)
    assert service.reload(check=False).returncode != 0
    column = bad.index("fiel") + 1
    problem = f"{ETC}/reconciled.yaml:1:{column}: controllers.c.reconciler: no reconciler fiel"
    assert problem in service.journal("-o", "cat", "_COMM=reconciled").partition("daemon.ready")[2]
    assert service.show("MainPID", "ActiveState", "SubState") == before
    # The controllers of the old configuration continue.
    service.declare("after", apply=["true"])
    service.wait_for("reconcile.done", key="x/after")
    # root gets the reason of the daemon; other users get no answer.
    told = service.container.run("reconciled", "reload", check=False)
    assert told.returncode == 78
    assert problem in told.stderr
    other = ["setpriv", "--reuid=65534", "--clear-groups", "reconciled", "reload"]
    assert problem not in service.container.run(*other, check=False).stderr
    assert len(service.all("control.accepted")) == 2


def test_a_reload_during_a_start_waits_for_it(service: Service) -> None:
    """The manager merges both jobs; the command waits for a daemon that restarts.

    It connects to a socket that the manager keeps: the starting daemon answers it.
    """
    service.configure(controllers=controllers("a"))
    service.drop_in("[Service]\nExecStartPre=sleep 1\n")
    start = service.begin("start")
    wait_until(lambda: service.property("SubState") == "start-pre", "start-pre")
    assert service.reload().returncode == 0
    assert ended(start) == 0
    assert service.all("reload.done") == []
    service.kill("KILL")
    told = service.container.run("reconciled", "reload", check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert len(service.all("daemon.starting")) == 2
    assert len(service.all("reload.done")) == 1


def test_a_reload_during_a_drain_is_refused(service: Service) -> None:
    """The daemon refuses with 1 and a reason, the manager too; the drain is not affected.

    A reload job of the manager cancels the waiting ``systemctl stop``, but not the stop.
    """
    service.configure()
    service.start()
    service.declare("held", kind="Probe", do="critical", seconds=3, budget="5s")
    service.wait_for("probe.critical")
    stop = service.begin("stop")
    service.wait_for("stop.began")
    told = service.container.run("reconciled", "reload", check=False)
    assert (told.returncode, told.stderr) == (1, "reconciled reload: stop in progress\n")
    assert service.reload(check=False).returncode != 0
    assert ended(stop) != 0  # "Job canceled"
    service.wait_for("stop.ended", exit_code=0)
    service.wait_for_state("inactive")
    assert service.property("Result") == "success"
    assert service.all("probe.finished", key="c/held")
    assert len(service.all("daemon.starting")) == 1


def test_c13_a_storm_of_reloads(service: Service) -> None:
    """C13: beside a thousand SIGHUP each reload is answered, and the last content is in force."""
    service.configure(controllers=controllers("a"))
    service.start()
    pid = service.property("MainPID")
    storm = f"for i in $(seq 1000); do kill -HUP {pid}; done"
    hups = service.container.begin("sh", "-c", storm)
    commands = []
    for number in range(4):
        service.configure(controllers=controllers("a", f"b{number}"))
        commands += [service.begin("reload"), service.container.begin("reconciled", "reload")]
    service.configure(controllers=controllers("a", "last"))
    commands.append(service.begin("reload"))
    assert [ended(command) for command in [*commands, hups]] == [0] * 10
    done = service.all("reload.done")
    assert {"a", "last"} == {
        name
        for line in done[-1:]
        for name in json.loads(line.fields["kept"]) + json.loads(line.fields["started"])
    }
    assert service.show("MainPID", "ActiveState") == {"MainPID": pid, "ActiveState": "active"}


# -- listeners ---------------------------------------------------------------------------------


@contextlib.contextmanager
def reconnecting(service: Service, *addresses: str) -> Iterator[dict[str, Any]]:
    """Connect to *addresses* all the time; the mapping has the results afterwards."""
    program = service.file(
        "programs/reconnecting_client.py",
        Path(__file__).with_name("reconnecting_client.py").read_text(),
    )
    process = subprocess.Popen(
        service.container.command(PYTHON, program, *addresses),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, Any] = {}
    try:
        yield found
        found |= json.loads(process.communicate(timeout=20)[0])
    finally:
        process.kill()
        process.communicate()


def test_no_connection_is_refused_over_a_restart_and_a_kill(service: Service) -> None:
    """Both listeners are kept: connections wait for the next daemon, which answers them.

    After a stop nothing is kept, so that no client waits for a daemon that does not come.
    """
    service.configure(http=HTTP)
    service.drop_in("[Service]\nRestartSec=100ms\n")
    service.start()
    with reconnecting(service, f"unix:{CONTROL}", f"tcp:{PORT}") as found:
        service.restart()
        service.kill("KILL")
        service.wait_for("daemon.ready", nth=3)
    for connections in found.values():
        assert connections["refused"] == []
        assert connections["connected"] > 100
        # Connections that were accepted right before the end of a daemon may get no answer.
        assert connections["answered"] > 0.8 * connections["connected"]
    kept = [entry.fields["kept"] for entry in service.all("listener.opened")]
    assert kept == ["false"] * 2 + ["true"] * 4
    assert service.property("NFileDescriptorStore") == "2"
    service.stop()
    assert service.property("NFileDescriptorStore") == "0"
    assert service.container.run("reconciled", "reload", check=False).returncode == 69


def test_a_listener_of_another_configuration_is_not_kept(service: Service) -> None:
    """A restart with another address closes the old one, and the manager drops it."""
    service.configure(http=HTTP)
    service.start()
    service.configure(http={"listen": f":{PORT}"})
    service.restart()
    assert [entry.fields["kept"] for entry in service.all("listener.opened")[2:]] == [
        "true",
        "false",
    ]
    assert service.property("NFileDescriptorStore") == "2"
    service.configure()
    service.reload()
    assert service.property("NFileDescriptorStore") == "1"


def test_an_activated_socket_starts_the_daemon_and_refuses_no_connection(service: Service) -> None:
    """reconciled.socket: the first connection starts it; all are answered over restart and kill."""
    service.configure()
    service.drop_in("[Service]\nRestartSec=100ms\n")
    service.systemctl("start", "reconciled.socket")
    try:
        with reconnecting(service, f"unix:{ACTIVATED}") as found:
            service.wait_for("daemon.ready")
            service.restart()
            service.kill("KILL")
            service.wait_for("daemon.ready", nth=3)
    finally:
        service.systemctl("stop", "reconciled.socket")
    (connections,) = found.values()
    assert connections["refused"] == []
    assert connections["answered"] > 0.8 * connections["connected"] > 80
