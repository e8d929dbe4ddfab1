"""The facts of a unit, from the bus and from systemctl, and the unit of a control group."""

from __future__ import annotations

import math
from typing import Any

import pytest

from reconciled.service.unit.facts import UnitFacts, facts_of, parse_timespan, seconds_of, socket_of
from reconciled.service.unit.query import Membership, membership
from reconciled.service.unit.systemctl import parse_show_output

FOREVER = 2**64 - 1
# The properties of the shipped unit, from the bus of systemd 252.
BUS: dict[str, Any] = {
    "Id": "reconciled.service",
    "LoadState": "loaded",
    "MainPID": 77,
    "NeedDaemonReload": False,
    "TriggeredBy": ["reconciled.socket"],
    "FragmentPath": "/etc/systemd/system/reconciled.service",
    "DropInPaths": ["/etc/systemd/system/reconciled.service.d/50-x.conf"],
    "Type": "notify",
    "TimeoutStopUSec": 360_000_000,
    "TimeoutAbortUSec": 30_000_000,
    "TimeoutStopFailureMode": "abort",
    "KillMode": "process",
    "SendSIGKILL": True,
    "WatchdogUSec": 60_000_000,
    "NotifyAccess": "exec",
    "Restart": "always",
    "RestartUSec": 1_000_000,
    "RestartPreventExitStatus": ([78], []),
    "OOMPolicy": "continue",
    "StartLimitIntervalUSec": 0,
    "StartLimitBurst": 5,
    "ExecStart": [("reconciled", ["reconciled", "run"], False, 0, 0, 0, 0, 0, 0, 0)],
    "ExecStopPost": [
        ("reconciled", ["reconciled", "reap", "--wait=5m"], False, 0, 0, 0, 0, 0, 0, 0)
    ],
    "User": "reconciled",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": True,
    "ReadWritePaths": ["-/etc"],
    "ReadOnlyPaths": [],
    "InaccessiblePaths": [],
    "StateDirectory": ["reconciled"],
    "CacheDirectory": [],
    "LogsDirectory": [],
    "RuntimeDirectory": ["reconciled:link"],
}
# The same properties, by `systemctl show`.
SHOWN = """\
Type=notify
Restart=always
NotifyAccess=exec
RestartUSec=1s
TimeoutStopUSec=6min
TimeoutAbortUSec=30s
TimeoutStopFailureMode=abort
WatchdogUSec=1min
RestartPreventExitStatus=78
MainPID=77
OOMPolicy=continue
ExecStart={ path=reconciled ; argv[]=reconciled run ; ignore_errors=no ; pid=0 ; status=0/0 }
ExecStopPost={ path=reconciled ; argv[]=reconciled reap --wait=5m ; ignore_errors=no ; pid=0 }
User=reconciled
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ReadWritePaths=-/etc
ReadOnlyPaths=
InaccessiblePaths=
StateDirectory=reconciled
CacheDirectory=
LogsDirectory=
RuntimeDirectory=reconciled:link
KillMode=process
SendSIGKILL=yes
Id=reconciled.service
TriggeredBy=reconciled.socket
LoadState=loaded
FragmentPath=/etc/systemd/system/reconciled.service
DropInPaths=/etc/systemd/system/reconciled.service.d/50-x.conf
NeedDaemonReload=no
StartLimitIntervalUSec=0
StartLimitBurst=5
"""


def test_bus_and_systemctl_give_the_same_facts() -> None:
    """The facts of one unit are equal from the bus and from systemctl."""
    assert facts_of(parse_show_output(SHOWN), "x") == facts_of(BUS, "x")


def test_properties_are_converted() -> None:
    """Durations are converted to seconds, lists and commands to values."""
    facts = facts_of(BUS, "bus")
    assert (facts.timeout_stop, facts.watchdog, facts.restart_delay) == (360.0, 60.0, 1.0)
    assert facts.reaper == ("reconciled", "reap", "--wait=5m")
    assert (facts.program, facts.restart_prevent_exit_status, facts.need_daemon_reload) == (
        "reconciled",
        {78},
        False,
    )
    assert len(facts.fragments) == 2
    assert facts.runtime_directories == ("/run/reconciled",)
    writable = ("/etc", "/var/lib/reconciled", "/run/reconciled")
    assert facts.sandbox.writable == writable


def test_a_missing_property_is_unknown() -> None:
    """A property that is missing or malformed is None, not a default."""
    unknown = facts_of(
        parse_show_output("Id=x.service\nTimeoutStopUSec=[not set]\nRestartUSec=soon\n"), "x"
    )
    assert unknown == UnitFacts("x.service", "x")


def test_an_empty_list_is_not_unknown() -> None:
    """Systemctl prints no line for an empty list of commands: the unit has no reaper."""
    text = "\n".join(line for line in SHOWN.splitlines() if not line.startswith("ExecStopPost"))
    assert facts_of(parse_show_output(text), "x").exec_stop_post == ()


def test_the_watchdog_of_a_unit_that_never_ran_is_unknown() -> None:
    """For a unit that never ran the manager reports "infinity", which is not its setting."""
    assert facts_of(BUS | {"WatchdogUSec": FOREVER, "MainPID": 0}, "bus").watchdog is None
    assert facts_of(BUS | {"WatchdogUSec": FOREVER}, "bus").watchdog == 0.0
    assert facts_of(BUS | {"WatchdogUSec": 0}, "bus").watchdog == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("infinity", math.inf),
        ("0", 0.0),
        ("90", 90.0),
        ("1min 30s", 90.0),
        ("1h30m", 5400.0),
        ("100ms", 0.1),
        ("1d 2h", 93600.0),
        ("2.5s", 2.5),
        ("", None),
        ("soon", None),
        ("1 fortnight", None),
        ("-1s", None),
    ],
)
def test_spans_of_time(text: str, seconds: float | None) -> None:
    """Durations as systemd prints them and as people write them are parsed; others are None."""
    assert seconds_of(parse_timespan(text)) == seconds


def test_sockets_are_identified_by_their_paths() -> None:
    """The facts of a socket unit are its paths and their owner, not its network ports."""
    bus = {
        "Id": "reconciled.socket",
        "Listen": [("Stream", "/run/reconciled.sock"), ("Stream", "127.0.0.1:9464")],
        "SocketUser": "reconciled",
    }
    facts = socket_of(bus)
    assert (facts.name, facts.paths) == ("reconciled.socket", ("/run/reconciled.sock",))
    shown = "Id=reconciled.socket\nSocketUser=reconciled\nListen=/run/reconciled.sock (Stream)\n"
    assert socket_of(parse_show_output(shown)) == facts


@pytest.mark.parametrize(
    ("group", "found"),
    [
        ("0::/system.slice/reconciled.service\n", Membership("reconciled.service")),
        ("0::/system.slice/reconciled.service/main\n", Membership("reconciled.service")),
        (
            "1:name=systemd:/system.slice/system-reconciled.slice/reconciled@a.service\n0::/\n",
            Membership("reconciled@a.service"),
        ),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/reconciled.service\n",
            Membership("reconciled.service", is_user_unit=True),
        ),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/app-term-5.scope\n", None),
        ("0::/user.slice/user-0.slice/login-3.scope\n", None),
        ("5:cpu:/system.slice/reconciled.service\n", None),
        ("0::/\n", None),
        ("", None),
    ],
)
def test_the_unit_is_read_from_the_control_group(group: str, found: Membership | None) -> None:
    """The innermost service is the unit; the service of a user manager is not."""
    assert membership(group) == found
