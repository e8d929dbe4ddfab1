"""The facts of one unit of the service manager, parsed from its properties.

1. None means "could not be read", and is never a default: a comparison skips it.
2. Durations are seconds; ``math.inf`` where the manager waits for ever.
3. Properties have the types of D-Bus: microseconds, booleans, lists. ``systemctl.py`` converts the
   output of systemctl into them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

# The properties that systemctl is asked for; the bus returns all of them.
PROPERTIES = (
    *("Id", "LoadState", "ActiveState", "MainPID", "NeedDaemonReload", "TriggeredBy"),
    *("FragmentPath", "DropInPaths"),
    *("Type", "TimeoutStopUSec", "TimeoutAbortUSec", "TimeoutStopFailureMode", "KillMode"),
    *("SendSIGKILL", "WatchdogUSec", "NotifyAccess", "Restart", "RestartUSec"),
    *("RestartPreventExitStatus", "OOMPolicy", "StartLimitIntervalUSec", "StartLimitBurst"),
    *("ExecStart", "ExecStopPost", "User", "ProtectSystem", "ProtectHome", "PrivateTmp"),
    *("ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths"),
    *("StateDirectory", "CacheDirectory", "LogsDirectory", "RuntimeDirectory"),
    *("Listen", "SocketUser", "SocketMode"),
)
_FOREVER = 2**64 - 1
_SPANS = {"us": 1, "ms": 1000, "s": 10**6, "sec": 10**6, "m": 60 * 10**6, "min": 60 * 10**6}
_SPANS |= {"h": 3600 * 10**6, "hr": 3600 * 10**6, "d": 86400 * 10**6, "w": 604800 * 10**6}
# The lengths that systemd assumes; a number without a unit is in seconds.
_SPANS |= {"month": 2629800 * 10**6, "y": 31557600 * 10**6, "": 10**6}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_ROOTS = {"State": "/var/lib", "Cache": "/var/cache", "Logs": "/var/log", "Runtime": "/run"}

Properties = Mapping[str, Any]
Command = tuple[str, ...]


@attrs.frozen
class UnitUnavailable:
    """Why the facts of a unit could not be read."""

    reason: str


@attrs.frozen
class Sandbox:
    """Which parts of the file system a service can see and write.

    protect_system  ProtectSystem=: no, yes, full or strict
    protect_home    ProtectHome=: no, yes, read-only or tmpfs
    private_tmp     PrivateTmp=: the service has its own /tmp and /var/tmp
    writable        ReadWritePaths= and the directories that the manager creates for it
    """

    protect_system: str = "no"
    protect_home: str = "no"
    private_tmp: bool = False
    writable: tuple[str, ...] = ()
    read_only: tuple[str, ...] = ()
    inaccessible: tuple[str, ...] = ()


@attrs.frozen
class SocketFacts:
    """A socket unit that starts the service: its name, its paths, and their owner."""

    name: str
    paths: tuple[str, ...] = ()
    user: str = ""


@attrs.frozen
class UnitFacts:
    """One service unit, and the settings of logind that concern its stop.

    source                       bus, systemctl or environment
    is_user_unit                 whether a user's manager runs it
    restart_prevent_exit_status  the exit codes after which it is not restarted
    inhibit_delay                InhibitDelayMaxSec= of logind
    runtime_directories          RuntimeDirectory=, as paths; each stop removes them
    """

    name: str
    source: str
    is_user_unit: bool = False
    type: str | None = None
    timeout_stop: float | None = None
    timeout_abort: float | None = None
    stop_failure_mode: str | None = None
    kill_mode: str | None = None
    send_sigkill: bool | None = None
    watchdog: float | None = None
    notify_access: str | None = None
    restart: str | None = None
    restart_delay: float | None = None
    restart_prevent_exit_status: frozenset[int] | None = None
    oom_policy: str | None = None
    start_limit_interval: float | None = None
    start_limit_burst: int | None = None
    exec_start: tuple[Command, ...] | None = None
    exec_stop_post: tuple[Command, ...] | None = None
    need_daemon_reload: bool | None = None
    user: str | None = None
    fragments: tuple[str, ...] = ()  # the unit file and its drop-ins, in order
    inhibit_delay: float | None = None
    runtime_directories: tuple[str, ...] = ()
    sandbox: Sandbox = attrs.Factory(Sandbox)
    sockets: tuple[SocketFacts, ...] = ()

    @property
    def reaper(self) -> Command | None:
        """The command in ExecStopPost= that is ``reconciled reap``; None: there is none."""
        return next((each for each in self.exec_stop_post or () if "reap" in each[1:2]), None)

    @property
    def program(self) -> str:
        """The name by which the unit starts ``reconciled``."""
        return self.exec_start[0][0] if self.exec_start and self.exec_start[0] else "reconciled"


def facts_of(properties: Properties, source: str, *, is_user_unit: bool = False) -> UnitFacts:
    """The facts of a service unit; a property that is missing is unknown."""
    get = properties.get
    codes = get("RestartPreventExitStatus")
    burst = get("StartLimitBurst")
    return UnitFacts(
        name=str(get("Id", "")),
        source=source,
        is_user_unit=is_user_unit,
        type=get("Type"),
        timeout_stop=seconds_of(get("TimeoutStopUSec")),
        timeout_abort=seconds_of(get("TimeoutAbortUSec")),
        stop_failure_mode=get("TimeoutStopFailureMode"),
        kill_mode=get("KillMode"),
        send_sigkill=get("SendSIGKILL"),
        watchdog=_watchdog(properties),
        notify_access=get("NotifyAccess"),
        restart=get("Restart"),
        restart_delay=seconds_of(get("RestartUSec")),
        restart_prevent_exit_status=None if codes is None else frozenset(codes[0]),
        oom_policy=get("OOMPolicy"),
        start_limit_interval=seconds_of(get("StartLimitIntervalUSec")),
        start_limit_burst=None if burst is None else int(burst),
        exec_start=_commands(get("ExecStart")),
        exec_stop_post=_commands(get("ExecStopPost")),
        need_daemon_reload=get("NeedDaemonReload"),
        user=get("User"),
        fragments=tuple(filter(None, (get("FragmentPath", ""), *get("DropInPaths", ())))),
        runtime_directories=_directories(properties, "Runtime"),
        sandbox=Sandbox() if is_user_unit else _sandbox(properties),
    )


def socket_of(properties: Properties) -> SocketFacts:
    """The facts of a socket unit."""
    listened = [path for _, path in properties.get("Listen", ()) if str(path).startswith("/")]
    owner = str(properties.get("SocketUser", ""))
    return SocketFacts(str(properties.get("Id", "")), tuple(listened), owner)


def seconds_of(microseconds: int | None) -> float | None:
    """The manager's microseconds as seconds."""
    if microseconds is None:
        return None
    return math.inf if microseconds >= _FOREVER else microseconds / 1_000_000


def parse_timespan(text: str) -> int | None:
    """A time span in the syntax of systemd.time(7), in microseconds; None: it is invalid."""
    if text == "infinity":
        return _FOREVER
    parts = _PART.findall(text)
    if not parts or _PART.sub("", text).strip() or any(unit not in _SPANS for _, unit in parts):
        return None
    return round(sum(float(number) * _SPANS[unit] for number, unit in parts))


def _watchdog(properties: Properties) -> float | None:
    """0 where it is off. For a unit that never ran the manager always returns "infinity"."""
    seconds = seconds_of(properties.get("WatchdogUSec"))
    if seconds == math.inf:
        return 0.0 if properties.get("MainPID") else None
    return seconds


def _commands(entries: Sequence[Sequence[Any]] | None) -> tuple[Command, ...] | None:
    """The arguments of each (path, arguments, …), the program first."""
    return None if entries is None else tuple(tuple(each[1]) for each in entries)


def _directories(properties: Properties, kind: str) -> tuple[str, ...]:
    names = properties.get(f"{kind}Directory", ())
    # Since 254 a name may have a link beside it: "name:link".
    return tuple(f"{_ROOTS[kind]}/{str(name).partition(':')[0]}" for name in names)


def _sandbox(properties: Properties) -> Sandbox:
    def paths(name: str) -> tuple[str, ...]:
        # "-" in front: may be missing. "+": below RootDirectory=, which the unit does not use.
        return tuple(str(path).lstrip("-+") for path in properties.get(name, ()))

    created = [path for kind in _ROOTS for path in _directories(properties, kind)]
    return Sandbox(
        str(properties.get("ProtectSystem", "no")),
        str(properties.get("ProtectHome", "no")),
        bool(properties.get("PrivateTmp", False)),
        (*paths("ReadWritePaths"), *created),
        paths("ReadOnlyPaths"),
        paths("InaccessiblePaths"),
    )
