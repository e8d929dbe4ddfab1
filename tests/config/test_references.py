"""References: what a configuration says with its plugins, and with this version, in view."""

from __future__ import annotations

from pathlib import Path

from reconciled.config.load import load
from reconciled.config.model import Config
from reconciled.config.references import check_references

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


def test_two_takers_of_one_kind_in_one_directory(tmp_path: Path) -> None:
    """Two controllers that take one kind from one directory are told, both with their places."""
    (problem,) = check_references(config(tmp_path), {"a": "Exec", "b": "Exec"})
    assert str(problem.origin) == f"{tmp_path}/c.yaml:10:26"
    assert f"controllers a ({tmp_path}/c.yaml:6:13) and b both take Exec" in problem.message


def test_one_directory_serves_several_kinds(tmp_path: Path) -> None:
    """Controllers of different kinds share a directory; one whose plugin is broken has no kind."""
    assert check_references(config(tmp_path), {"a": "Exec", "b": "File"}) == []
    assert check_references(config(tmp_path), {"a": "Exec"}) == []
