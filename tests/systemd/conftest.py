"""Fixtures of the tests on a real systemd manager: a box a worker, a fresh service a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test folders are not packages; here is the one place that makes this one's modules importable.
sys.path.insert(0, str(Path(__file__).parent))

import program
from box import Box, Missing, booted
from installed import Service, install


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs real processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.systemd)


@pytest.fixture(scope="session")
def binds() -> list[str]:
    """What a box has to be given for the program to be there."""
    try:
        return program.binds()
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def box(tmp_path_factory: pytest.TempPathFactory, binds: list[str]) -> Iterator[Box]:
    """The manager that all tests of one worker share; the service is installed in it."""
    try:
        with booted(tmp_path_factory.mktemp("box"), *binds) as made:
            install(made)
            yield made
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def own_box(tmp_path: Path, binds: list[str]) -> Iterator[Box]:
    """A box for one test alone, which may power it off or break its services."""
    try:
        with booted(
            tmp_path / "box", *binds, kernel=["systemd.journald.forward_to_console=1"]
        ) as made:
            install(made)
            yield made
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def service(box: Box) -> Iterator[Service]:
    """reconciled.service as freshly installed; stopped and cleaned up afterwards."""
    made = Service(box)
    made.clean()
    yield made
    made.clean()
