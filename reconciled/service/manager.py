"""Asking the service manager for a unit: over the bus, else by systemctl, else what we inherited.

1. Never raises, and takes TAKES at most: an answer that does not come is Unread, with the reason.
2. Which manager it is, the machine's or a user's, is told by our own control group: on the wrong
   bus the question "which unit is this process of" has an answer too, and a wrong one.
3. A unit counts as our own only if we are its main process. A daemon that somebody starts by hand
   below another service would else be measured by that one's limits.
4. A question starts nothing: no unit, and no service of the bus.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from reconciled.service.systemctl import systemctl_show
from reconciled.service.unit_facts import (
    Properties,
    UnitFacts,
    UnitUnavailable,
    facts_of,
    parse_timespan,
    seconds_of,
    socket_of,
)

TIMEOUT = 2.0  # seconds, for everything together
_BOOTED = Path("/run/systemd/system")
_GROUP = Path("/proc/self/cgroup")
_WATCHDOG = re.compile(r"^\s*WatchdogSec\s*=\s*(.*?)\s*$", re.MULTILINE)


@attrs.frozen
class Membership:
    """The service unit that a process is of, and whether that is of a user's own manager."""

    unit: str
    is_user_unit: bool = False


@attrs.frozen
class ManagerReply:
    """What the manager has said: of the unit, of its sockets, and of the host."""

    source: str
    unit: Properties
    sockets: tuple[Properties, ...] = ()
    inhibit_delay: int | None = None


def read_own_unit(
    environ: Mapping[str, str], watchdog: float | None = None
) -> UnitFacts | UnitUnavailable:
    """The unit whose main process this is. Blocks for TAKES at most; never raises.

    environ   tells where the buses are
    watchdog  what the manager has told this process of it, in seconds: all that there is to know
              where nobody answers
    """
    deadline = time.monotonic() + TIMEOUT
    mine = membership(_own_group())
    if mine is None:
        return UnitUnavailable("this process is not of a service unit")
    if "MANAGERPID" in environ:
        # Only users' managers set it; one that does not run below "user@" is known by it alone.
        mine = attrs.evolve(mine, is_user_unit=True)
    answer = _ask(None, mine.unit, environ, deadline, is_user_unit=mine.is_user_unit)
    if isinstance(answer, UnitUnavailable):
        if watchdog is None:
            return answer
        return UnitFacts(mine.unit, "environment", mine.is_user_unit, watchdog=watchdog)
    if answer.unit.get("MainPID") != os.getpid():
        return UnitUnavailable(f"this process is not the main one of {answer.unit.get('Id')}")
    return _facts_from_reply(answer, is_user_unit=mine.is_user_unit)


def read_unit(name: str, environ: Mapping[str, str]) -> UnitFacts | UnitUnavailable:
    """The service unit *name*, of the machine's manager or else of the user's.

    Blocks for TAKES at most; never raises.
    """
    deadline = time.monotonic() + TIMEOUT
    if not _BOOTED.is_dir():
        return UnitUnavailable("there is no systemd here")
    said: list[UnitUnavailable] = []
    for of_user in (False, True):
        answer = _ask(name, name, environ, deadline, is_user_unit=of_user)
        if isinstance(answer, UnitUnavailable):
            said.append(answer)
        elif (state := answer.unit.get("LoadState")) == "loaded":
            facts = _facts_from_reply(answer, is_user_unit=of_user)
            if isinstance(facts, UnitUnavailable):
                return facts
            # As it is written: what the manager tells is what the last start has made of it, and
            # "for ever" where there was none.
            written = _written_watchdog(facts.fragments)
            return facts if written is None else attrs.evolve(facts, watchdog=written)
        else:
            said.append(UnitUnavailable(f"{name} is not loaded: {state}"))
    return said[0]


def membership(group: str) -> Membership | None:
    """Whose process it is, by the text of its ``/proc/PID/cgroup``; None: of no service."""
    for line in group.splitlines():
        number, names, path = line.split(":", 2)
        if number != "0" and names != "name=systemd":
            continue
        parts = path.split("/")
        services = [index for index, part in enumerate(parts) if part.endswith(".service")]
        # A user's manager is a service itself, and its units lie below it.
        users = [index for index in services if parts[index].startswith("user@")]
        inner = [index for index in services if not users or index > users[0]]
        if inner:
            return Membership(parts[inner[-1]], bool(users))
    return None


def _own_group() -> str:
    try:
        return _GROUP.read_text()
    except (OSError, ValueError):  # a group whose name is no text
        return ""


def _ask(
    asked: str | None, name: str, environ: Mapping[str, str], deadline: float, *, is_user_unit: bool
) -> ManagerReply | UnitUnavailable:
    """Of the unit *asked*; None: of our own, of which *name* is known besides."""
    try:
        return _ask_bus(asked, environ, deadline, is_user_unit=is_user_unit)
    except Exception as error:  # noqa: BLE001 - a stranger's answer, and we can go without
        unread = UnitUnavailable(f"the bus: {str(error) or type(error).__name__}")
    # A user's manager is reached in no other way.
    if is_user_unit or not _BOOTED.is_dir() or (left := deadline - time.monotonic()) <= 0:
        return unread
    shown = systemctl_show([name], left)
    if isinstance(shown, UnitUnavailable):
        return unread
    sockets = systemctl_show(names, left) if (names := _sockets(shown[0])) else []
    return ManagerReply(
        "systemctl", shown[0], () if isinstance(sockets, UnitUnavailable) else tuple(sockets)
    )


def _ask_bus(
    asked: str | None, environ: Mapping[str, str], deadline: float, *, is_user_unit: bool
) -> ManagerReply | UnitUnavailable:
    """Raises whatever a bus that is not there, or not well, leads to."""
    from reconciled.core.errors import DBusError
    from reconciled.service.bus import (
        LOGIND,
        MANAGER,
        connect,
        system_bus_address,
        user_bus_address,
    )

    address = user_bus_address(environ) if is_user_unit else system_bus_address(environ)
    if not address:
        return UnitUnavailable("this user has no bus")
    with connect(address, deadline) as bus:
        if asked is None:
            unit = bus.properties(bus.call_method(MANAGER, "GetUnitByPID", "u", 0))
        else:
            unit = bus.properties(bus.call_method(MANAGER, "LoadUnit", "s", asked))
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


def _facts_from_reply(answer: ManagerReply, *, is_user_unit: bool) -> UnitFacts | UnitUnavailable:
    try:
        return attrs.evolve(
            facts_of(answer.unit, answer.source, is_user_unit=is_user_unit),
            inhibit_delay=seconds_of(answer.inhibit_delay),
            sockets=tuple(socket_of(each) for each in answer.sockets),
        )
    except Exception as error:  # noqa: BLE001 - properties of other types, of another version say
        return UnitUnavailable(f"{answer.source}: an answer that nobody understands: {error}")


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
    return seconds_of(parse_timespan(written)) if written else 0.0  # an empty value takes it back
