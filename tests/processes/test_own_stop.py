"""An operation whose own program stops or reloads its daemon is not repeated for ever."""

from __future__ import annotations

import pytest
from harness import RECONCILED, Daemon, Limits, Workspace, wait_until

pytestmark = pytest.mark.processes

LIMITS = Limits(drain=0.2, critical=6, cleanup=1)
MAX_RECOVERIES = 3  # the default
# Notes each attempt, does $2, requests $1, and goes on until it is ended.
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
echo "$RECONCILED_ATTEMPT" >> attempts
$2
$1
exec sleep 600
"""


def declare(workspace: Workspace, request: str, before: str = ":") -> None:
    """An Exec whose program runs *before* and then *request*."""
    controller = {"reconciler": "exec", "watch": [{"directory": "resources"}]}
    workspace.configure(LIMITS, controllers={"c": controller})
    program = workspace.root / "program"
    program.write_text(PROGRAM.replace("$1", request).replace("$2", before))
    program.chmod(0o755)
    workspace.declare("site", kind="Exec", apply=[str(program)])


def attempts(workspace: Workspace) -> int:
    """How many attempts have begun."""
    file = workspace.root / "attempts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def held_after_restarts(workspace: Workspace) -> Daemon:
    """The daemon that holds the operation, after each earlier one was stopped by its program."""
    for _ in range(1 + MAX_RECOVERIES):
        assert workspace.start().ended().code == 0
    daemon = workspace.started()
    held = daemon.wait_for("operation.held", key="c/site")
    assert held["reason"] == (
        "its recovery did not complete 3 times in a row: its own program requested a stop of the"
        " daemon, which interrupts it"
    )
    return daemon


@pytest.mark.parametrize("way", ["", "setsid -f ", "env -i "])
def test_p09_an_apply_that_stops_its_own_daemon_is_held(workspace: Workspace, way: str) -> None:
    """P09: a stop that the operation itself requests counts like a kill, whatever hides it."""
    declare(workspace, f"{way}{RECONCILED} --config $PWD/r.yaml stop")
    daemon = held_after_restarts(workspace)
    assert daemon.stop().code == 0
    assert attempts(workspace) == 1 + MAX_RECOVERIES


def test_a_new_step_sets_the_count_back(workspace: Workspace) -> None:
    """An operation that makes progress in each attempt is not held, however often it stops."""
    declare(
        workspace,
        f"{RECONCILED} --config $PWD/r.yaml stop",
        f"{RECONCILED} step s$RECONCILED_ATTEMPT",
    )
    for number in range(1, 3 + MAX_RECOVERIES):
        assert workspace.start().ended().code == 0
        assert attempts(workspace) == number


def test_a_stop_by_a_person_is_not_counted(workspace: Workspace) -> None:
    """A stop from outside the operation does not hold it, however often it interrupts it."""
    declare(workspace, ":")
    for number in range(1, 3 + MAX_RECOVERIES):
        daemon = workspace.started()
        wait_until(lambda number=number: attempts(workspace) == number, "the attempt")
        assert workspace.verb("stop").returncode == 0
        assert daemon.ended().code == 0
