"""The fixture of the tests with real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test directories are not packages: this makes the modules of this one importable.
sys.path.insert(0, str(Path(__file__).parent))

from harness import Workspace, workspace_in


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A directory for one daemon; its processes are killed afterwards."""
    yield from workspace_in(tmp_path)
