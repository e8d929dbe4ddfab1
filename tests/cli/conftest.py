"""A configuration on disk, and verbs called as the command line calls them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test folders are not packages; here is the one place that makes this one's modules importable.
sys.path.insert(0, str(Path(__file__).parent))

from desk import Desk


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Desk:
    """An empty configuration directory, with nothing of ours in the environment.

    There is no service manager, whatever this machine has.
    """
    monkeypatch.setattr("reconciled.service.unit.query._BOOTED", tmp_path / "no-systemd")
    for name in ("RECONCILED_CONFIG", "CONFIGURATION_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path, capfd)
