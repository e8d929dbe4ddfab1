"""Finds a reconciler by name: built in, an entry point, or a file in a plugin directory."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import attrs

from reconciled.config.structuring.faults import guess
from reconciled.core.errors import PluginNotFound

GROUP = "reconciled.reconcilers"


# Found without a scan of all installed packages, which would delay every start.
_BUILT_IN = {
    "exec": "reconciled.reconcilers.exec:ExecReconciler",
    "file": "reconciled.reconcilers.file:FileReconciler",
}


@attrs.frozen
class PluginLocation:
    """Where a reconciler is defined: ``MODULE:CLASS`` of a package, or a class of a single file."""

    name: str
    target: str
    version: str
    file: Path | None = None


def find_reconciler(name: str, directories: Sequence[Path] = ()) -> PluginLocation:
    """Where the reconciler *name* is defined. Raises PluginNotFound; imports nothing.

    *name* is an entry point, or FILE_STEM:Class for a file in one of *directories*.
    """
    if name in _BUILT_IN:
        return PluginLocation(name, _BUILT_IN[name], _own_version())
    stem, colon, class_name = name.partition(":")
    if colon:
        return _find_file(name, stem, class_name, directories)
    points = importlib.metadata.entry_points(group=GROUP)
    for point in points:
        if point.name == name:
            return PluginLocation(
                name, point.value, point.dist.version if point.dist else "unknown"
            )
    known = {*_BUILT_IN, *(point.name for point in points)}
    close = guess(name, known)
    if close is not None:
        raise PluginNotFound(f"no reconciler {name}: did you mean {close}?")
    if any((directory / f"{name}.py").is_file() for directory in directories):
        raise PluginNotFound(f"no reconciler {name}: for its file write {name}:CLASS")
    raise PluginNotFound(
        f"no reconciler {name}: available: {', '.join(sorted(known))}; "
        "install its package, or write FILE:CLASS for a file in a plugin directory"
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("reconciled")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree


def _find_file(
    name: str, stem: str, class_name: str, directories: Sequence[Path]
) -> PluginLocation:
    if not stem.replace("-", "_").isidentifier() or not class_name.isidentifier():
        raise PluginNotFound(f"{name} is not a reconciler: write FILE:CLASS, the file without .py")
    files = [directory / f"{stem}.py" for directory in directories]
    present = [file for file in files if file.is_file()]
    if len(present) > 1:
        raise PluginNotFound(
            f"{name} is in two plugin directories, {present[0]} and {present[1]}: remove one"
        )
    if present:
        return PluginLocation(name, f"{stem}:{class_name}", "file", present[0])
    if not directories:
        raise PluginNotFound(f"no reconciler {name}: set plugins.directories, which is empty")
    stems = {file.stem for directory in directories for file in directory.glob("*.py")}
    close = guess(stem, stems)
    if close is not None:
        raise PluginNotFound(f"no plugin file {stem}.py: did you mean {close}:{class_name}?")
    raise PluginNotFound(f"no plugin file {stem}.py in {', '.join(map(str, directories))}")
