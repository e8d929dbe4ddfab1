"""Fixtures of the runtime's tests: everything in one process, on a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

# Test folders are not packages; here is the one place that makes this one's modules importable.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def inline_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that go to a thread are made in the loop: a virtual clock cannot wait for threads."""

    async def run_sync(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


@pytest.fixture
def whole_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The directory of a whole daemon, and the script around it."""
    from whole_daemon import WholeDaemon

    return WholeDaemon(tmp_path, monkeypatch)
