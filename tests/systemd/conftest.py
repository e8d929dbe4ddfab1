"""Fixtures of the tests with a real systemd: a container per worker, a fresh service per test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test directories are not packages: this makes the modules of this one importable.
sys.path.insert(0, str(Path(__file__).parent))

import program
from container import Container, Missing, booted
from installed import Service, install


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this directory."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.systemd)


@pytest.fixture(scope="session")
def binds() -> list[str]:
    """The bind mounts that put the program into a container."""
    try:
        return program.binds()
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory, binds: list[str]) -> Iterator[Container]:
    """The container that all tests of a worker share, with the service installed."""
    try:
        with booted(tmp_path_factory.mktemp("container"), *binds) as made:
            install(made)
            yield made
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def own_container(tmp_path: Path, binds: list[str]) -> Iterator[Container]:
    """A container of one test, which may power it off or break its services."""
    try:
        with booted(
            tmp_path / "container", *binds, kernel=["systemd.journald.forward_to_console=1"]
        ) as made:
            install(made)
            yield made
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def service(container: Container) -> Iterator[Service]:
    """reconciled.service as freshly installed; stopped afterwards."""
    made = Service(container)
    made.clean()
    yield made
    made.end()
