"""Fixtures for tests of verbs: a configuration on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test directories are not packages: this makes the modules of this one importable.
sys.path.insert(0, str(Path(__file__).parent))

from desk import Desk


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Desk:
    """An empty configuration directory, without variables of reconciled in the environment.

    There is no service manager, even if this machine has one.
    """
    monkeypatch.setattr("reconciled.service.unit.query._BOOTED", tmp_path / "no-systemd")
    for name in ("RECONCILED_CONFIG", "CONFIGURATION_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path, capfd)
