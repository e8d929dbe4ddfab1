"""Rules of the unit's control group: when it is used, and which processes are in it."""

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
    """A tree of control groups, and this process's entry in it, that each test fills."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/cgroup.procs").touch()
    monkeypatch.setattr(cgroup, "_MOUNT_POINTS", (tmp_path / "none", tmp_path / "tree"))
    monkeypatch.setattr(cgroup, "_OWN_CGROUP", tmp_path / "own")
    return tmp_path


def put_process(kernel: Path, path: str, *, exists: bool = True) -> None:
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
def test_group_of_the_unit_is_found(kernel: Path, path: str, group: str) -> None:
    """The group is the service's own, even if delegation has put the process in a leaf."""
    put_process(kernel, path)
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
def test_other_groups_are_ignored(kernel: Path, path: str) -> None:
    """A scope, a slice, a container and a path outside the namespace give no group."""
    put_process(kernel, path)
    assert cgroup_of_control_process(AFTER) is None
    assert cgroup_of_main_process(MINE) is None


@pytest.mark.parametrize("pid", ["", str(os.getppid())])
def test_only_for_the_process_that_the_manager_started(kernel: Path, pid: str) -> None:
    """A process started by another service, such as a CI runner, gets no group."""
    put_process(kernel, "/system.slice/runner.service")
    inherited = {"SYSTEMD_EXEC_PID": pid, "INVOCATION_ID": "0" * 32, "NOTIFY_SOCKET": "/n"}
    assert cgroup_of_main_process(inherited) is None
    assert cgroup_of_control_process(inherited) is None


def test_no_control_groups(kernel: Path) -> None:
    """Without visible control groups there is no group and no error."""
    assert cgroup_of_main_process(MINE) is None
    put_process(kernel, "/system.slice/r.service", exists=False)
    assert cgroup_of_main_process(MINE) is None


def test_pids_of_the_whole_group_are_listed(kernel: Path) -> None:
    """Pids of leaves are included; a removed group has none."""
    put_process(kernel, "/r.service/main")
    group = kernel / "tree/r.service"
    (group / "cgroup.procs").write_text("4\n5\n")
    (group / "main/cgroup.procs").write_text("6\n")
    assert pids_in(group) == [4, 5, 6]
    assert pids_in(kernel / "tree/none.service") == []


@pytest.mark.processes
def test_hidden_processes_differ_from_ended_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that the sandbox hides is reported hidden; one that has just ended is not."""
    group = tmp_path
    monkeypatch.setattr(cgroup, "own_cgroup", lambda: group)
    hides, ends, other = (subprocess.Popen(["sleep", "60"]) for _ in range(3))

    def find(pid: int) -> Process | None:
        if pid == ends.pid:
            ends.kill()
            ends.wait()
        return None if pid == hides.pid else find_process(pid)

    monkeypatch.setattr(cgroup, "find_process", find)
    pids = [each.pid for each in (hides, ends, other)]
    try:
        (group / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        assert hidden_in(group) == [hides.pid]
        assert [is_hidden(pid) for pid in pids] == [True, False, False]
        (group / "cgroup.procs").write_text(f"{other.pid}\n")
        assert not is_hidden(hides.pid)
    finally:
        for process in (hides, ends, other):
            process.kill()
            process.wait()
