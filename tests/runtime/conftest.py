"""Fixtures of the runtime's tests: everything in one process, on a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

# Test folders are not packages: this makes the helper modules of this one importable.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls in threads run in the loop instead: a virtual clock cannot wait for threads."""

    async def run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


@pytest.fixture
def whole_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The directory of a whole daemon, with scripted sources and reconcilers."""
    from whole_daemon import WholeDaemon

    return WholeDaemon(tmp_path, monkeypatch)
