"""The findings of a comparison between unit and daemon, and the files that resolve them."""

from __future__ import annotations

import enum
import math

import attrs

from reconciled.service.unit.facts import UnitFacts


class Severity(enum.IntEnum):
    """How much a finding matters; the worst is the lowest.

    FAULT   the stop budget does not fit: ``run --strict`` refuses to start
    ADVICE  works in normal operation, and fails in a crash, a hang or a shutdown
    NOTE    a choice, with its price
    """

    FAULT = 0
    ADVICE = 1
    NOTE = 2


@attrs.frozen
class Remedy:
    """A file to write, and the command that puts it into effect. Empty path: the command alone."""

    path: str
    text: str
    command: str


@attrs.frozen
class Finding:
    """One mismatch: the directive, and a message that states what is wrong and what to set."""

    severity: Severity
    directive: str
    message: str
    remedy: Remedy | None = None


@attrs.frozen
class UnitComparison:
    """The unit *name* compared with the stop budget.

    facts   None where the unit could not be read
    reason  why the unit, or its stop limit, is unknown; empty where it is known
    """

    name: str = ""
    facts: UnitFacts | None = None
    findings: tuple[Finding, ...] = ()
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the stop budget fits, as far as is known."""
        return all(each.severity is not Severity.FAULT for each in self.findings)

    @property
    def warnings(self) -> list[str]:
        """Findings that call for a change, one sentence each."""
        return [
            f"{self.name}: {each.message}"
            for each in self.findings
            if each.severity < Severity.NOTE
        ]

    @property
    def notes(self) -> list[str]:
        """Findings that describe a choice and its price."""
        return [
            f"{self.name}: {each.message}"
            for each in self.findings
            if each.severity is Severity.NOTE
        ]

    @property
    def remedies(self) -> list[Remedy]:
        """The files and commands that resolve the findings."""
        return [each.remedy for each in self.findings if each.remedy is not None]


def drop_in(facts: UnitFacts, topic: str, *lines: str, section: str = "Service") -> Remedy:
    """A drop-in of the unit with *lines*."""
    directory = "~/.config/systemd/user" if facts.is_user_unit else "/etc/systemd/system"
    text = "".join(f"{line}\n" for line in (f"[{section}]", *lines))
    return Remedy(f"{directory}/{facts.name}.d/60-{topic}.conf", text, reload_command(facts))


def reload_command(facts: UnitFacts) -> str:
    """The command that makes the manager read its files again."""
    return "systemctl --user daemon-reload" if facts.is_user_unit else "systemctl daemon-reload"


def format_timespan(seconds: float) -> str:
    """*seconds* in the syntax of a unit file: 6min, 1h 30min."""
    if seconds == math.inf:
        return "infinity"
    parts = []
    rest = round(seconds * 1000)
    for unit, size in (("h", 3_600_000), ("min", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0"
