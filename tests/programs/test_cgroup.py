"""Rules of the unit's control group: when it is ours to look at, and who is in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from reconciled.programs import cgroup
from reconciled.programs.cgroup import (
    cgroup_of_control_process,
    cgroup_of_main_process,
    hidden_in,
    is_hidden,
    pids_in,
)
from reconciled.programs.processes import Process, find_process

MINE = {"SYSTEMD_EXEC_PID": str(os.getpid())}
AFTER = {"SERVICE_RESULT": "success"}


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of control groups, and what the kernel says of this process, as each test has it."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/cgroup.procs").touch()
    monkeypatch.setattr(cgroup, "_MOUNT_POINTS", (tmp_path / "none", tmp_path / "tree"))
    monkeypatch.setattr(cgroup, "_OWN_CGROUP", tmp_path / "own")
    return tmp_path


def place(kernel: Path, path: str, *, exists: bool = True) -> None:
    (kernel / "own").write_text(f"4:memory:/elsewhere.service\n0::{path}\n")
    if exists and path.startswith("/"):
        directory = kernel / "tree" / path.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        for each in (directory, directory.parent):
            (each / "cgroup.procs").touch()


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/system.slice/r.service", "system.slice/r.service"),
        ("/system.slice/r.service/.control", "system.slice/r.service"),
        ("/system.slice/r.service/main", "system.slice/r.service"),
        ("/system.slice/system-r.slice/r@a.service", "system.slice/system-r.slice/r@a.service"),
        (
            "/user.slice/user-1.slice/user@1.service/app.slice/r.service",
            "user.slice/user-1.slice/user@1.service/app.slice/r.service",
        ),
    ],
)
def test_the_group_of_a_unit(kernel: Path, path: str, group: str) -> None:
    """It is the service's own group, also from a leaf that delegation has put in between."""
    place(kernel, path)
    assert cgroup_of_control_process(AFTER) == kernel / "tree" / group
    assert cgroup_of_main_process(MINE) == kernel / "tree" / group


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/user.slice/user-1.slice/session-2.scope",
        "/user.slice/user-1.slice/user@1.service/init.scope",
        "/user.slice/user-1.slice/user@1.service/app.slice/shell-5.scope",
        "/user.slice/user-1.slice/user@1.service/app.slice",
        "/docker/0123abcd",
        "/../r.service",
    ],
)
def test_what_is_no_unit_of_ours(kernel: Path, path: str) -> None:
    """A scope, a slice, a container, a place outside the namespace: nobody there is looked at."""
    place(kernel, path)
    assert cgroup_of_control_process(AFTER) is None
    assert cgroup_of_main_process(MINE) is None


@pytest.mark.parametrize("pid", ["", str(os.getppid())])
def test_only_for_the_process_that_the_manager_started(kernel: Path, pid: str) -> None:
    """Below another service, a runner of CI jobs say, its group is none of our business."""
    place(kernel, "/system.slice/runner.service")
    inherited = {"SYSTEMD_EXEC_PID": pid, "INVOCATION_ID": "0" * 32, "NOTIFY_SOCKET": "/n"}
    assert cgroup_of_main_process(inherited) is None
    assert cgroup_of_control_process(inherited) is None


def test_no_control_groups(kernel: Path) -> None:
    """A kernel or container that shows none: nothing is looked at, and nothing fails."""
    assert cgroup_of_main_process(MINE) is None
    place(kernel, "/system.slice/r.service", exists=False)
    assert cgroup_of_main_process(MINE) is None


def test_numbers_are_those_of_the_whole_group(kernel: Path) -> None:
    """Leaves below the group count; a group that has gone holds nobody."""
    place(kernel, "/r.service/main")
    group = kernel / "tree/r.service"
    (group / "cgroup.procs").write_text("4\n5\n")
    (group / "main/cgroup.procs").write_text("6\n")
    assert pids_in(group) == [4, 5, 6]
    assert pids_in(kernel / "tree/none.service") == []


@pytest.mark.processes
def test_what_cannot_be_seen_is_told_from_what_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that the sandbox hides is neither seen nor gone; one that has just ended is gone."""
    group = tmp_path
    monkeypatch.setattr(cgroup, "own_cgroup", lambda: group)
    hides, ends, other = (subprocess.Popen(["sleep", "60"]) for _ in range(3))

    def look(pid: int) -> Process | None:
        if pid == ends.pid:
            ends.kill()
            ends.wait()
        return None if pid == hides.pid else find_process(pid)

    monkeypatch.setattr(cgroup, "find_process", look)
    everybody = [each.pid for each in (hides, ends, other)]
    try:
        (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in everybody))
        assert hidden_in(group) == [hides.pid]
        assert [is_hidden(pid) for pid in everybody] == [True, False, False]
        (group / "cgroup.procs").write_text(f"{other.pid}\n")
        assert not is_hidden(hides.pid)
    finally:
        for process in (hides, ends, other):
            process.kill()
            process.wait()
