"""What verbs say of the unit that runs the daemon: what does not fit, and what to paste."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from reconciled.config.model import Config
from reconciled.core.resources import Origin
from reconciled.offline.scan import ControllerScan
from reconciled.reconcilers.file import File
from reconciled.service.comparison import compare
from reconciled.service.findings import Finding, Remedy, Severity
from reconciled.service.manager import read_unit
from reconciled.service.sandbox import blocking_directive
from reconciled.service.unit_facts import UnitFacts, UnitUnavailable

UNIT = "reconciled.service"
_ETC = Path("/etc")


@attrs.frozen
class UnitReport:
    """The unit *name*, and what does not fit; facts are None where it could not be read."""

    name: str
    facts: UnitFacts | None = None
    findings: tuple[Finding, ...] = ()
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the stop budget fits, as far as is known."""
        return all(each.severity is not Severity.FAULT for each in self.findings)

    @property
    def shell(self) -> str:
        """Whose shell can put it right."""
        return "its user's shell" if self.facts and self.facts.is_user_unit else "a root shell"

    @property
    def warnings(self) -> list[str]:
        """What does not fit, a sentence each; what is only noted is left out."""
        return [
            f"{self.name}: {each.message}"
            for each in self.findings
            if each.severity < Severity.NOTE
        ]

    @property
    def notes(self) -> list[str]:
        """What is a choice, with its price."""
        return [
            f"{self.name}: {each.message}"
            for each in self.findings
            if each.severity is Severity.NOTE
        ]

    @property
    def remedies(self) -> list[Remedy]:
        """What puts it right."""
        return [each.remedy for each in self.findings if each.remedy is not None]

    def as_data(self) -> dict[str, Any]:
        """For programs."""
        limit = self.facts.timeout_stop if self.facts else None
        return {
            "name": self.name,
            "read": self.facts.source if self.facts else None,
            "reason": self.reason or None,
            # JSON has no word for "for ever".
            "timeout_stop_s": None if limit == float("inf") else limit,
            "fits": self.fits if self.facts else None,
            "findings": [
                {
                    "grade": each.severity.name.lower(),
                    "directive": each.directive,
                    "message": each.message,
                    "remedy": attrs.asdict(each.remedy) if each.remedy else None,
                }
                for each in self.findings
            ],
        }


def unit_of(config: Config) -> str:
    """The unit that runs with *config*, by the place that its manager gives configurations."""
    directory = Path(config.files[0]).parent if config.files else _ETC
    instance = directory.name.removeprefix("reconciled-")
    of_instance = directory.parent == _ETC and instance not in ("", directory.name)
    return f"reconciled@{instance}.service" if of_instance else UNIT


def check_unit(name: str | None, config: Config) -> UnitReport:
    """Compare *config* with the unit *name*; None: with its own, where that is loaded."""
    named = name or unit_of(config)
    if "." not in named:
        named += ".service"
    facts = read_unit(named, os.environ)
    if isinstance(facts, UnitUnavailable):
        return UnitReport(named, reason=facts.reason)
    return UnitReport(facts.name, facts, compare(facts, config.stop))


def shell_commands(remedies: Iterable[Remedy]) -> list[str]:
    """Lines for a shell that write the files of *remedies* and make them count."""
    files = {each.path: each.text for each in remedies if each.path}
    lines = []
    if files:
        places = sorted({_word(str(Path(path).parent)) for path in files})
        lines.append(f"mkdir -p {' '.join(places)}")
    for path, text in files.items():
        lines += [f"cat >{_word(path)} <<'END'", *text.splitlines(), "END"]
    # The manager reads its files before it restarts anything.
    return [*lines, *sorted({each.command for each in remedies})]


def _word(path: str) -> str:
    """*path* for a shell, which expands a tilde only where it is bare."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def unwritable_paths(
    unit: UnitReport, config: Config, surveyed: Iterable[ControllerScan]
) -> list[str]:
    """Configured paths that the unit's sandbox keeps the daemon from writing, each at its place."""
    if unit.facts is None:
        return []
    place = Origin(str(config.files[0]) if config.files else "configuration")
    found = []
    for origin, path in [(place, str(config.state)), *_files(surveyed)]:
        directive = blocking_directive(unit.facts.sandbox, path)
        if directive is not None:
            found.append(
                f"{origin}: {path} cannot be written by {unit.name}: {directive} stands in the way;"
                f" {_describe_remedy(directive, path)}"
            )
    return found


def _files(surveyed: Iterable[ControllerScan]) -> Iterator[tuple[Origin, str]]:
    """The files that manifests declare."""
    for each in surveyed:
        root = getattr(each.ready.reconciler.options, "root", "/")
        for manifest in each.desired.manifests.values():
            spec = each.ready.plugin.spec(manifest)
            if isinstance(spec, File):
                yield manifest.origin, os.path.normpath(Path(root) / spec.path)


def _describe_remedy(directive: str, path: str) -> str:
    if directive == "PrivateTmp=yes":
        return "the service has a directory of its own there: choose another place"
    if directive in ("ProtectHome=yes", "ProtectHome=tmpfs", "InaccessiblePaths="):
        return "it is hidden from the service: choose another place, or lift that in a drop-in"
    return f"add ReadWritePaths={Path(path).parent} in a drop-in, or choose another place"
