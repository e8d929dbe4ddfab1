"""How verbs show the unit that runs the daemon: findings as JSON, remedies as shell commands."""

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
from reconciled.service.unit.comparison import compare_unit
from reconciled.service.unit.findings import Remedy, UnitComparison
from reconciled.service.unit.sandbox import blocking_directive

UNIT = "reconciled.service"
_ETC = Path("/etc")


def default_unit(config: Config) -> str:
    """The unit that runs with *config*, by the directory of the configuration."""
    directory = Path(config.files[0]).parent if config.files else _ETC
    instance = directory.name.removeprefix("reconciled-")
    of_instance = directory.parent == _ETC and instance not in ("", directory.name)
    return f"reconciled@{instance}.service" if of_instance else UNIT


def check_unit(name: str | None, config: Config) -> UnitComparison:
    """Compare *config* with the unit *name*; None: with the one that runs with it."""
    full_name = name or default_unit(config)
    if "." not in full_name:
        full_name += ".service"
    return compare_unit(os.environ, config.stop, full_name)


def remedy_shell(unit: UnitComparison) -> str:
    """The shell in which shell_commands() work."""
    return "its user's shell" if unit.facts and unit.facts.is_user_unit else "a root shell"


def unit_data(unit: UnitComparison) -> dict[str, Any]:
    """*unit* for ``--json``."""
    limit = unit.facts.timeout_stop if unit.facts else None
    return {
        "name": unit.name,
        "read": unit.facts.source if unit.facts else None,
        "reason": unit.reason or None,
        # JSON has no infinity.
        "timeout_stop_s": None if limit == float("inf") else limit,
        "fits": unit.fits if unit.facts else None,
        "findings": [
            {
                "grade": each.severity.name.lower(),
                "directive": each.directive,
                "message": each.message,
                "remedy": attrs.asdict(each.remedy) if each.remedy else None,
            }
            for each in unit.findings
        ],
    }


def shell_commands(remedies: Iterable[Remedy]) -> list[str]:
    """Lines for a shell that write the files of *remedies* and put them into effect."""
    files = {each.path: each.text for each in remedies if each.path}
    lines = []
    if files:
        directories = sorted({_quote_path(str(Path(path).parent)) for path in files})
        lines.append(f"mkdir -p {' '.join(directories)}")
    for path, text in files.items():
        lines += [f"cat >{_quote_path(path)} <<'END'", *text.splitlines(), "END"]
    # In this order the manager reads its files before it restarts anything.
    return [*lines, *sorted({each.command for each in remedies})]


def _quote_path(path: str) -> str:
    """*path* for a shell, which expands a tilde only outside quotes."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") else shlex.quote(path)


def unwritable_paths(
    unit: UnitComparison, config: Config, scanned: Iterable[ControllerScan]
) -> list[str]:
    """Warnings, one for each configured path that the unit's sandbox makes unwritable."""
    if unit.facts is None:
        return []
    main_file = Origin(str(config.files[0]) if config.files else "configuration")
    found = []
    for origin, path in [(main_file, str(config.state)), *_declared_files(scanned)]:
        directive = blocking_directive(unit.facts.sandbox, path)
        if directive is not None:
            found.append(
                f"{origin}: {directive} prevents {unit.name} from writing {path};"
                f" {_describe_remedy(directive, path)}"
            )
    return found


def _declared_files(scanned: Iterable[ControllerScan]) -> Iterator[tuple[Origin, str]]:
    """The files that manifests declare."""
    for each in scanned:
        root = getattr(each.ready.reconciler.options, "root", "/")
        for manifest in each.desired.manifests.values():
            spec = each.ready.plugin.spec_of(manifest)
            if isinstance(spec, File):
                yield manifest.origin, os.path.normpath(Path(root) / spec.path)


def _describe_remedy(directive: str, path: str) -> str:
    if directive == "PrivateTmp=yes":
        return "the service has its own directory there: choose another path"
    if directive in ("ProtectHome=yes", "ProtectHome=tmpfs", "InaccessiblePaths="):
        return "it is hidden from the service: choose another path, or override it in a drop-in"
    return f"add ReadWritePaths={Path(path).parent} in a drop-in, or choose another path"
