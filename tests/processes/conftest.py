"""The fixture of the tests on real processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test folders are not packages; here is the one place that makes this one's modules importable.
sys.path.insert(0, str(Path(__file__).parent))

from harness import Site, site_in


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A directory for one daemon; whatever ran there is gone afterwards."""
    yield from site_in(tmp_path)
