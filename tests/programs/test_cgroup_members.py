"""Rules of who is in a control group."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from reconciled.programs import cgroup
from reconciled.programs.cgroup import hidden_in, is_hidden
from reconciled.programs.processes import Process, find_process

pytestmark = pytest.mark.processes


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
