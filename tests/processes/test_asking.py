"""Commands that ask a real daemon: their exit codes, what they print, and what they leave alone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import RECONCILED, Limits, Site

pytestmark = pytest.mark.processes


def change(site: Site, **sections: Any) -> None:
    """Set *sections* of the configuration."""
    site.write(site.config, yaml.safe_dump(yaml.safe_load(site.config.read_text()) | sections))


def test_reload_comes_back_at_the_swap(site: Site) -> None:
    """0 when the new configuration is in force, and not before."""
    site.configure()
    daemon = site.started()
    more = {"reconciler": "probe:ProbeReconciler", "watch": [{"every": "1h"}]}
    site.configure(controllers={"d": more})
    told = site.verb("reload")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == "The new configuration is in force.\nstarted: d\nleft: c\n"
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
    site: Site, damage: str, problem: str
) -> None:
    """C13: each problem is on standard error, by the daemon's own word; it runs on as it was.

    The socket is found although the configuration cannot be used.
    """
    site.configure()
    daemon = site.started()
    good = site.config.read_text()
    site.write(site.config, good + damage)
    told = site.verb("reload")
    assert (told.returncode, told.stdout) == (78, ""), told.stderr
    *problems, last = told.stderr.splitlines()
    line = len(good.splitlines()) + 1
    assert problems[0].startswith(tuple(f"{site.config}:{each}:" for each in (line, line + 1)))
    assert problem in problems[0]
    assert last == "rejected: the previous configuration stays in force"
    assert len(problems) == len(daemon.all("config.invalid"))
    site.write(site.config, good)
    assert site.verb("reload").returncode == 0
    assert daemon.stop().code == 0


@pytest.mark.parametrize("where", [">&-", ">&- 2>&-"])
def test_nobody_has_to_read_the_answer(site: Site, where: str) -> None:
    """A command whose output was closed by whoever started it does what it is for."""
    site.configure()
    daemon = site.started()
    command = f'exec "$0" --config "$1" reload {where}'
    told = subprocess.run(
        ["sh", "-c", command, RECONCILED, site.config], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert daemon.all("reload.done")


@pytest.mark.parametrize("verb", ["reload", "stop"])
def test_without_a_daemon_it_is_69(site: Site, verb: str) -> None:
    """No daemon, or one that was killed and left its socket's file: 69, and where it was looked."""
    site.configure()
    path = site.state / "control.sock"
    told = site.verb(verb)
    assert told.returncode == 69
    assert told.stderr == f"reconciled {verb}: no daemon answers: there is no {path}\n"
    daemon = site.started()
    daemon.send(signal.SIGKILL)
    daemon.ended()
    assert path.exists()
    told = site.verb(verb)
    assert told.returncode == 69
    assert told.stderr == f"reconciled {verb}: no daemon answers: nobody serves {path}\n"


def test_a_killed_daemon_is_followed_by_one_that_answers(site: Site) -> None:
    """The file that it left keeps the next one from nothing."""
    site.configure()
    daemon = site.started()
    daemon.send(signal.SIGKILL)
    daemon.ended()
    daemon = site.started()
    assert site.verb("reload").returncode == 0
    assert daemon.stop().code == 0
    assert not (site.state / "control.sock").exists()


def test_a_stop_is_begun_and_taken_on(site: Site) -> None:
    """`stop` comes back when it has begun; `--now` goes one stage on, as often as it is said."""
    site.configure(Limits(drain=5, critical=20, cleanup=0.5))
    site.declare("held", do="critical", seconds=15, budget="18s")
    daemon = site.started()
    daemon.wait_for("probe.critical")
    for _ in range(2):
        told = site.verb("stop")
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout == "The daemon is draining: what runs may finish.\n"
    assert "stopping" in site.verb("stop", "--now").stdout
    assert site.verb("reload").returncode == 1
    assert site.verb("reload").stderr == "reconciled reload: stop in progress\n"
    assert "hard limit" in site.verb("stop", "--now").stdout
    stopped = daemon.ended()
    assert stopped.code == 3
    assert stopped.report["reason"].startswith("stop by uid ")
    assert [stage["stage"] for stage in stopped.report["stages"]] == [
        "draining",
        "stopping",
        "hard",
    ]


def test_a_daemon_without_work_is_stopped_with_an_answer(site: Site) -> None:
    """It is gone at once, and the command still hears that the stop has begun."""
    site.configure()
    daemon = site.started()
    assert site.verb("stop").returncode == 0
    assert daemon.ended().code == 0


def test_a_socket_of_another_daemon_is_left(site: Site, tmp_path: Path) -> None:
    """Two daemons with one socket: the second cannot start (1), says why, and the first answers."""
    site.configure()
    path = tmp_path / "s"
    change(site, control={"socket": str(path)})
    first = site.started()
    change(site, state=str(tmp_path / "other"))
    second = site.start()
    assert second.ended().code == 1
    assert f"process {first.pid} serves it" in second.last("daemon.failed")["reason"]
    change(site, state=str(site.state))
    assert site.verb("reload").returncode == 0
    assert first.stop().code == 0


def test_c13_3_a_port_in_use(site: Site) -> None:
    """C13.3: at the start it is exit code 1 with a sentence, at a reload 78 and nothing changes."""
    site.configure()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = f"127.0.0.1:{port} cannot be listened on: something listens there already"
        daemon = site.started()
        change(site, http={"listen": f"127.0.0.1:{port}"})
        told = site.verb("reload")
        assert told.returncode == 78
        assert sentence in told.stderr
        assert daemon.stop().code == 0
        refused = site.start()
        assert refused.ended().code == 1
        assert sentence in refused.last("daemon.failed")["reason"]
    assert json.loads((site.state / "last-stop.json").read_text())["exit_code"] == 0
