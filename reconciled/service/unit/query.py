"""Reads a unit from the service manager: over D-Bus, else by systemctl, else from the environment.

1. Never raises, and blocks for TIMEOUT at most: without a usable reply the result is
   UnitUnavailable, with the reason.
2. This process's control group determines which manager is queried, the system's or a user's: on
   the wrong bus the query "which unit is this process of" has a reply too, and a wrong one.
3. A unit counts as this process's own only if this is its main process. A daemon that a person
   starts below another service would otherwise be measured against that service's limits.
4. A query starts nothing: no unit, and no service of the bus.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from reconciled.service.unit.facts import (
    Properties,
    UnitFacts,
    UnitUnavailable,
    facts_of,
    parse_timespan,
    seconds_of,
    socket_of,
)
from reconciled.service.unit.systemctl import systemctl_show

TIMEOUT = 2.0  # seconds, for the whole query
_BOOTED = Path("/run/systemd/system")
_GROUP = Path("/proc/self/cgroup")
_WATCHDOG = re.compile(r"^\s*WatchdogSec\s*=\s*(.*?)\s*$", re.MULTILINE)


@attrs.frozen
class Membership:
    """The service unit that a process belongs to, and whether a user's manager runs it."""

    unit: str
    is_user_unit: bool = False


@attrs.frozen
class ManagerReply:
    """What the manager returned: of the unit, of its sockets, and of logind."""

    source: str
    unit: Properties
    sockets: tuple[Properties, ...] = ()
    inhibit_delay: int | None = None


def read_unit(
    environ: Mapping[str, str], name: str | None = None, watchdog: float | None = None
) -> UnitFacts | UnitUnavailable:
    """The service unit *name*; None: the one whose main process this is.

    environ   has the addresses of the buses
    watchdog  what the manager passed to this process, in seconds: all that is known of its own
              unit where neither the bus nor systemctl replies
    """
    deadline = time.monotonic() + TIMEOUT
    if name is None:
        return _read_own_unit(environ, watchdog, deadline)
    return _read_named_unit(name, environ, deadline)


def _read_own_unit(
    environ: Mapping[str, str], watchdog: float | None, deadline: float
) -> UnitFacts | UnitUnavailable:
    own = membership(_own_group())
    if own is None:
        return UnitUnavailable("this process does not belong to a service unit")
    if "MANAGERPID" in environ:
        # Only users' managers set it. It alone identifies one that does not run below "user@".
        own = attrs.evolve(own, is_user_unit=True)
    reply = _query(None, own.unit, environ, deadline, is_user_unit=own.is_user_unit)
    if isinstance(reply, UnitUnavailable):
        if watchdog is None:
            return reply
        return UnitFacts(own.unit, "environment", own.is_user_unit, watchdog=watchdog)
    if reply.unit.get("MainPID") != os.getpid():
        return UnitUnavailable(f"this process is not the main process of {reply.unit.get('Id')}")
    return _facts_from_reply(reply, is_user_unit=own.is_user_unit)


def _read_named_unit(
    name: str, environ: Mapping[str, str], deadline: float
) -> UnitFacts | UnitUnavailable:
    """The unit of the system's manager, else of the user's."""
    if not _BOOTED.is_dir():
        return UnitUnavailable("this machine was not booted with systemd")
    failures: list[UnitUnavailable] = []
    for of_user in (False, True):
        reply = _query(name, name, environ, deadline, is_user_unit=of_user)
        if isinstance(reply, UnitUnavailable):
            failures.append(reply)
        elif (state := reply.unit.get("LoadState")) == "loaded":
            facts = _facts_from_reply(reply, is_user_unit=of_user)
            if isinstance(facts, UnitUnavailable):
                return facts
            # As written in the files: the manager returns the value of the last start, and
            # "infinity" where there was none.
            written = _written_watchdog(facts.fragments)
            return facts if written is None else attrs.evolve(facts, watchdog=written)
        else:
            failures.append(UnitUnavailable(f"{name} is not loaded: {state}"))
    return failures[0]


def membership(group: str) -> Membership | None:
    """The unit of a process, by the text of its ``/proc/PID/cgroup``; None: of no service."""
    for line in group.splitlines():
        number, names, path = line.split(":", 2)
        if number != "0" and names != "name=systemd":
            continue
        parts = path.split("/")
        services = [index for index, part in enumerate(parts) if part.endswith(".service")]
        # A user's manager is a service itself, and its units are below it.
        users = [index for index in services if parts[index].startswith("user@")]
        inner = [index for index in services if not users or index > users[0]]
        if inner:
            return Membership(parts[inner[-1]], bool(users))
    return None


def _own_group() -> str:
    try:
        return _GROUP.read_text()
    except (OSError, ValueError):  # ValueError: the group's name is not valid text
        return ""


def _query(
    queried: str | None,
    name: str,
    environ: Mapping[str, str],
    deadline: float,
    *,
    is_user_unit: bool,
) -> ManagerReply | UnitUnavailable:
    """Query the unit *queried*; None: this process's own, which is known to be called *name*."""
    try:
        return _query_bus(queried, environ, deadline, is_user_unit=is_user_unit)
    except Exception as error:  # noqa: BLE001 - another process's reply, and it is optional
        failure = UnitUnavailable(f"D-Bus: {str(error) or type(error).__name__}")
    # systemctl would query the system's manager.
    if is_user_unit or not _BOOTED.is_dir() or (left := deadline - time.monotonic()) <= 0:
        return failure
    shown = systemctl_show([name], left)
    if isinstance(shown, UnitUnavailable):
        return failure
    sockets = systemctl_show(names, left) if (names := _sockets(shown[0])) else []
    return ManagerReply(
        "systemctl", shown[0], () if isinstance(sockets, UnitUnavailable) else tuple(sockets)
    )


def _query_bus(
    queried: str | None, environ: Mapping[str, str], deadline: float, *, is_user_unit: bool
) -> ManagerReply | UnitUnavailable:
    """Raises whatever a missing or faulty bus leads to."""
    from reconciled.core.errors import DBusError
    from reconciled.service.dbus import LOGIND, MANAGER, system_bus_address, user_bus_address
    from reconciled.service.unit.bus_connection import connect

    address = user_bus_address(environ) if is_user_unit else system_bus_address(environ)
    if not address:
        return UnitUnavailable("this user has no D-Bus of its own")
    with connect(address, deadline) as bus:
        if queried is None:
            unit = bus.properties(bus.call_method(MANAGER, "GetUnitByPID", "u", 0))
        else:
            unit = bus.properties(bus.call_method(MANAGER, "LoadUnit", "s", queried))
        names = _sockets(unit)
        sockets = [
            bus.properties(bus.call_method(MANAGER, "LoadUnit", "s", each)) for each in names
        ]
        delay = None
        if not is_user_unit:
            with contextlib.suppress(DBusError):  # logind does not run
                delay = bus.get_property(LOGIND, "InhibitDelayMaxUSec")
        return ManagerReply("bus", unit, tuple(sockets), delay)


def _sockets(unit: Properties) -> Sequence[str]:
    return [name for name in unit.get("TriggeredBy", ()) if str(name).endswith(".socket")]


def _facts_from_reply(reply: ManagerReply, *, is_user_unit: bool) -> UnitFacts | UnitUnavailable:
    try:
        return attrs.evolve(
            facts_of(reply.unit, reply.source, is_user_unit=is_user_unit),
            inhibit_delay=seconds_of(reply.inhibit_delay),
            sockets=tuple(socket_of(each) for each in reply.sockets),
        )
    except Exception as error:  # noqa: BLE001 - another version may return other types
        return UnitUnavailable(f"{reply.source}: malformed response: {error}")


def _written_watchdog(files: Sequence[str]) -> float | None:
    """WatchdogSec= as the unit's files have it; None where they cannot be read."""
    if not files:
        return None  # a transient unit
    written = ""
    for file in files:
        try:
            found = _WATCHDOG.findall(Path(file).read_text())
        except (OSError, ValueError):
            return None
        written = found[-1] if found else written
    return seconds_of(parse_timespan(written)) if written else 0.0  # an empty value resets it
