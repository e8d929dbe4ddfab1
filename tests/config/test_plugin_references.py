"""References: checks of a configuration whose plugins are loaded."""

from __future__ import annotations

from pathlib import Path

from reconciled.config.load import load
from reconciled.config.model import Config
from reconciled.config.plugin_references import check_references

TEXT = """state: /x
journal: {history: {age: 1d}}
controllers:
  a:
    reconciler: exec
    watch: [{directory: one}, {every: 1m}]
    interrupted: hold
  b:
    reconciler: exec
    watch: [{every: 1m}, {directory: ./two/../one}]
"""


def config(folder: Path) -> Config:
    path = folder / "c.yaml"
    path.write_text(TEXT)
    path.chmod(0o644)
    return load(path, {}).config


def test_two_controllers_with_one_kind_and_directory_are_refused(tmp_path: Path) -> None:
    """Two controllers that take one kind from one directory are reported, with both locations."""
    (problem,) = check_references(config(tmp_path), {"a": "Exec", "b": "Exec"})
    assert str(problem.origin) == f"{tmp_path}/c.yaml:10:26"
    assert f"controllers a ({tmp_path}/c.yaml:6:13) and b both take Exec" in problem.message


def test_one_directory_serves_several_kinds(tmp_path: Path) -> None:
    """Controllers of different kinds share a directory; one whose plugin is broken has no kind."""
    assert check_references(config(tmp_path), {"a": "Exec", "b": "File"}) == []
    assert check_references(config(tmp_path), {"a": "Exec"}) == []
