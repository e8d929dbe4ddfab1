"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where CI is set, a test whose means are missing has failed: nothing may go unproven.

    Not so one marked ``optional``: no machine can be made to have what it needs.
    """
    report = yield
    excused = hasattr(report, "wasxfail") or item.get_closest_marker("optional")
    if report.skipped and os.environ.get("CI") and not excused:
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(where)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: {reason}: CI has to have what this test needs"
    return report
