"""The fixture of the kill suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test directories are not packages: this makes harness.py importable, and this directory.
sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
sys.path.insert(0, str(Path(__file__).parent))

from scenario import Scenario, scenario_in


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[Scenario]:
    """One daemon with keys of every kind; its processes are killed afterwards."""
    yield from scenario_in(tmp_path)
