"""What does not fit between a unit and the daemon: values, and the files that put it right."""

from __future__ import annotations

import enum
import math

import attrs

from reconciled.service.unit_facts import UnitFacts


class Severity(enum.IntEnum):
    """How much a finding matters; the worst is the lowest.

    FAULT   the stop budget does not fit: ``--strict`` refuses
    ADVICE  works, until the day on which it matters
    NOTE    a choice, with its price
    """

    FAULT = 0
    ADVICE = 1
    NOTE = 2


@attrs.frozen
class Remedy:
    """A file to write, and the command that makes it count. Without a path: the command alone."""

    path: str
    text: str
    command: str


@attrs.frozen
class Finding:
    """One thing that does not fit: the directive, and what is wrong with it and what to set."""

    severity: Severity
    directive: str
    message: str
    remedy: Remedy | None = None


def drop_in(facts: UnitFacts, topic: str, *lines: str, section: str = "Service") -> Remedy:
    """A drop-in of the unit with *lines*."""
    place = "~/.config/systemd/user" if facts.is_user_unit else "/etc/systemd/system"
    text = "".join(f"{line}\n" for line in (f"[{section}]", *lines))
    return Remedy(f"{place}/{facts.name}.d/60-{topic}.conf", text, reload_command(facts))


def reload_command(facts: UnitFacts) -> str:
    """What has the manager read its files."""
    return "systemctl --user daemon-reload" if facts.is_user_unit else "systemctl daemon-reload"


def format_timespan(seconds: float) -> str:
    """*seconds* as a unit file has them: 6min, 1h 30min."""
    if seconds == math.inf:
        return "infinity"
    parts = []
    rest = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0"
