"""The exit codes of ``run`` that are no stop: 75, 78, and those of ``run --once``; R7."""

from __future__ import annotations

import pytest
from harness import SLACK, Limits, Site, wait_until

pytestmark = pytest.mark.processes


def test_a_second_daemon_is_refused_with_75(site: Site) -> None:
    """A second daemon on one state directory waits 5 s and ends with 75; the first goes on."""
    site.configure(level="debug")
    first = site.started()
    second = site.start()
    refused = second.ended()
    assert refused.code == 75
    assert refused.wall >= 5.0
    locked = second.last("daemon.locked")
    assert f"process {first.pid}" in locked["reason"]
    site.declare("a")
    first.wait_for("reconcile.done", key="c/a")
    assert first.stop().code == 0


def test_a_stop_while_another_daemon_is_waited_for_leaves_at_once(site: Site) -> None:
    """Nothing has begun while the lock is waited for: a signal then leaves at once, with 0."""
    site.configure()
    first = site.started()
    second = site.start()
    second.wait_for_file("lock")
    stopped = second.stop()
    assert stopped.code == 0
    assert stopped.wall <= SLACK
    assert first.stop().code == 0


def test_a_killed_daemon_leaves_no_lock(site: Site) -> None:
    """After SIGKILL the next start has the lock at once."""
    site.configure()
    first = site.started()
    first.send(9)
    assert first.ended().code == -9
    second = site.started()
    assert second.all("daemon.locked") == []
    assert second.stop().code == 0


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("state: state\ncontrolers: {}\n", ":2:1"),
        ("state: [\n", ":"),
        ("state: state\nstop: {drain: 20}\n", ":2:15"),
    ],
)
def test_a_bad_configuration_is_78_with_its_place(site: Site, text: str, at: str) -> None:
    """What is wrong in the configuration is told with its place; exit code 78, nothing written."""
    site.configure()
    site.write(site.config, text)
    daemon = site.start()
    assert daemon.ended().code == 78
    fault = daemon.last("config.invalid")
    assert f"{site.config}{at}" in fault["at"]
    assert not (site.root / "state").exists()
    assert daemon.other == []


def test_a_missing_configuration_is_78(site: Site) -> None:
    """A configuration that is not there is told, without a traceback."""
    daemon = site.start()
    assert daemon.ended().code == 78
    assert "r.yaml" in daemon.last("config.invalid")["at"]
    assert daemon.other == []


def test_wrong_usage_of_run_is_78(site: Site) -> None:
    """A unit must not restart on a misspelt option."""
    site.configure()
    assert site.start("--onse").ended().code == 78


def test_once_runs_each_key_and_ends_with_0(site: Site) -> None:
    """``run --once`` runs each key to its outcome, then stops by itself with 0."""
    site.configure(level="debug")
    for name in ("a", "b", "c"):
        site.declare(name)
    daemon = site.start("--once")
    assert daemon.ended().code == 0
    for name in ("a", "b", "c"):
        assert len(daemon.all("reconcile.done", key=f"c/{name}")) == 1


def test_once_ends_with_4_and_names_each_key_that_is_not_done(site: Site) -> None:
    """``run --once``: terminal, and failed three times in a row, is 4, with the key and why."""
    site.configure(retry={"initial": "10ms", "max": "10ms"})
    site.declare("good")
    site.declare("never", do="refuse")
    site.declare("down", do="fail", count=1000)
    site.declare("twice", do="fail", count=2)
    daemon = site.start("--once")
    assert daemon.ended().code == 4
    named = {line["key"] for line in daemon.all("once.not_done")}
    assert named == {"c/never", "c/down"}


def test_once_ends_with_4_where_a_source_could_not_be_read(site: Site) -> None:
    """``run --once``: what could not be read is not done."""
    site.configure()
    site.resources.rmdir()
    daemon = site.start("--once")
    assert daemon.ended().code == 4
    assert daemon.all("once.source_incomplete")


def test_once_that_is_stopped_names_what_it_did_not_get_to(site: Site) -> None:
    """``run --once``: a signal is a stop as ever; keys without an outcome are named, 4."""
    site.configure(Limits(drain=0.3, critical=3, cleanup=0.5))
    site.declare("busy", do="sleep")
    daemon = site.start("--once")
    daemon.wait_for("probe.began")
    daemon.wait_for("daemon.ready")
    stopped = daemon.stop()
    assert stopped.code == 4
    assert [line["key"] for line in daemon.all("once.not_done")] == ["c/busy"]


def test_r7_a_plan_neither_waits_for_nor_holds_up_the_daemon(site: Site) -> None:
    """R7: ``plan`` beside a live daemon takes no lock, ends at once, and changes nothing."""
    site.configure(reconciler="exec")
    script = "touch running; sleep 600"
    site.declare("a", kind="Exec", apply=["/bin/sh", "-c", script])
    daemon = site.started()
    wait_until((site.resources / "running").exists, "the run")
    before = sorted(path.name for path in site.state.iterdir())
    plan = site.verb("plan")
    assert plan.returncode == 1, plan.stderr
    assert sorted(path.name for path in site.state.iterdir()) == before
    assert daemon.stop().code == 0
