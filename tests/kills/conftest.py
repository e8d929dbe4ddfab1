"""The fixture of the kill suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test folders are not packages; the harness of all real processes is the stop suite's.
sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
sys.path.insert(0, str(Path(__file__).parent))

from world import World, world_in


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """One daemon with keys of every kind; whatever ran there is gone afterwards."""
    yield from world_in(tmp_path)
