"""Rules and options for all tests."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--repeat N`` runs each selected test N times: see `make stress`."""
    parser.addoption("--repeat", type=int, default=1, help="run each test so many times")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test as often as --repeat says."""
    times = metafunc.config.getoption("repeat")
    if times > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI is set, a skipped test is a failure: nothing may be left unproven.

    A test marked ``optional`` may be skipped: it needs a feature that some kernels lack.
    """
    report = yield
    excused = hasattr(report, "wasxfail") or item.get_closest_marker("optional")
    if report.skipped and os.environ.get("CI") and not excused:
        location = report.longrepr
        reason = location[2] if isinstance(location, tuple) else str(location)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}: CI has to have what this test needs"
    return report
