"""Commands that query a real daemon: exit codes, output, and what they do not change."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import RECONCILED, Limits, Workspace

pytestmark = pytest.mark.processes


def change(workspace: Workspace, **sections: Any) -> None:
    """Set *sections* of the configuration."""
    workspace.write(
        workspace.config, yaml.safe_dump(yaml.safe_load(workspace.config.read_text()) | sections)
    )


def test_reload_returns_at_the_swap(workspace: Workspace) -> None:
    """`reload` returns 0 when the new configuration is in force, and not before."""
    workspace.configure()
    daemon = workspace.started()
    more = {"reconciler": "probe:ProbeReconciler", "watch": [{"every": "1h"}]}
    workspace.configure(controllers={"d": more})
    told = workspace.verb("reload")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == "The new configuration is in force.\nstarted: d\nremoved: c\n"
    assert daemon.all("reload.done", started=["d"])
    assert daemon.stop().code == 0


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("lgo: {level: info}\n", "unknown key lgo: did you mean log?"),
        ("control: {socket: elsewhere}\n", "control cannot change while the daemon runs"),
        ("http: [\n", "did not find expected node content"),
        ("state: elsewhere\n", "the key state is given twice"),
    ],
)
def test_c13_a_bad_configuration_is_78_with_its_problems(
    workspace: Workspace, damage: str, problem: str
) -> None:
    """C13: each problem is on standard error as the daemon reports it; it continues unchanged.

    The socket is found although the configuration is invalid.
    """
    workspace.configure()
    daemon = workspace.started()
    good = workspace.config.read_text()
    workspace.write(workspace.config, good + damage)
    told = workspace.verb("reload")
    assert (told.returncode, told.stdout) == (78, ""), told.stderr
    *problems, last = told.stderr.splitlines()
    line = len(good.splitlines()) + 1
    assert problems[0].startswith(tuple(f"{workspace.config}:{each}:" for each in (line, line + 1)))
    assert problem in problems[0]
    assert last == "rejected: the previous configuration stays in force"
    assert len(problems) == len(daemon.all("config.invalid"))
    workspace.write(workspace.config, good)
    assert workspace.verb("reload").returncode == 0
    assert daemon.stop().code == 0


@pytest.mark.parametrize("where", [">&-", ">&- 2>&-"])
def test_output_that_is_closed_does_not_matter(workspace: Workspace, where: str) -> None:
    """A command whose standard output is closed has its effect and its exit code."""
    workspace.configure()
    daemon = workspace.started()
    command = f'exec "$0" --config "$1" reload {where}'
    told = subprocess.run(
        ["sh", "-c", command, RECONCILED, workspace.config],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert daemon.all("reload.done")


@pytest.mark.parametrize("verb", ["reload", "stop"])
def test_without_a_daemon_it_is_69(workspace: Workspace, verb: str) -> None:
    """Without a daemon, or with the socket of a killed one, it is 69, and the path is named."""
    workspace.configure()
    path = workspace.state / "control.sock"
    told = workspace.verb(verb)
    assert told.returncode == 69
    assert told.stderr == f"reconciled {verb}: no daemon answers: {path} does not exist\n"
    daemon = workspace.started()
    daemon.send(signal.SIGKILL)
    daemon.ended()
    assert path.exists()
    told = workspace.verb(verb)
    assert told.returncode == 69
    assert told.stderr == f"reconciled {verb}: no daemon answers: no process serves {path}\n"


def test_a_killed_daemon_is_followed_by_one_that_answers(workspace: Workspace) -> None:
    """The socket file that a killed daemon left does not keep the next one from serving."""
    workspace.configure()
    daemon = workspace.started()
    daemon.send(signal.SIGKILL)
    daemon.ended()
    daemon = workspace.started()
    assert workspace.verb("reload").returncode == 0
    assert daemon.stop().code == 0
    assert not (workspace.state / "control.sock").exists()


def test_a_stop_is_begun_and_moved_on(workspace: Workspace) -> None:
    """`stop` returns when the stop has begun; each `--now` moves it on by one stage."""
    workspace.configure(Limits(drain=5, critical=20, cleanup=0.5))
    workspace.declare("held", do="critical", seconds=15, budget="18s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    for _ in range(2):
        told = workspace.verb("stop")
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout == "The daemon is draining: what runs may finish.\n"
    assert "stopping" in workspace.verb("stop", "--now").stdout
    assert workspace.verb("reload").returncode == 1
    assert workspace.verb("reload").stderr == "reconciled reload: stop in progress\n"
    assert "hard limit" in workspace.verb("stop", "--now").stdout
    stopped = daemon.ended()
    assert stopped.code == 3
    assert stopped.report["reason"].startswith("stop by uid ")
    assert [stage["stage"] for stage in stopped.report["stages"]] == [
        "draining",
        "stopping",
        "hard",
    ]


def test_a_daemon_without_work_is_stopped_with_an_answer(workspace: Workspace) -> None:
    """A daemon without work exits at once, and the command still gets its answer."""
    workspace.configure()
    daemon = workspace.started()
    assert workspace.verb("stop").returncode == 0
    assert daemon.ended().code == 0


def test_a_socket_of_another_daemon_is_left(workspace: Workspace, tmp_path: Path) -> None:
    """Of two daemons with one socket the second exits 1 with the reason; the first answers."""
    workspace.configure()
    path = tmp_path / "s"
    change(workspace, control={"socket": str(path)})
    first = workspace.started()
    change(workspace, state=str(tmp_path / "other"))
    second = workspace.start()
    assert second.ended().code == 1
    assert f"process {first.pid} serves it" in second.last("daemon.failed")["reason"]
    change(workspace, state=str(workspace.state))
    assert workspace.verb("reload").returncode == 0
    assert first.stop().code == 0


def test_c13_3_a_port_in_use(workspace: Workspace) -> None:
    """C13.3: at the start it is exit code 1 with a sentence, at a reload 78 and nothing changes."""
    workspace.configure()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = f"cannot listen on 127.0.0.1:{port}: another process listens there"
        daemon = workspace.started()
        change(workspace, http={"listen": f"127.0.0.1:{port}"})
        told = workspace.verb("reload")
        assert told.returncode == 78
        assert sentence in told.stderr
        assert daemon.stop().code == 0
        refused = workspace.start()
        assert refused.ended().code == 1
        assert sentence in refused.last("daemon.failed")["reason"]
    assert json.loads((workspace.state / "last-stop.json").read_text())["exit_code"] == 0
