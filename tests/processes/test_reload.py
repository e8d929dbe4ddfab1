"""C13: a reload takes effect completely or not at all, and errors name file and line."""

from __future__ import annotations

import signal

import pytest
import yaml
from harness import SLACK, Limits, Workspace, wait_until

pytestmark = pytest.mark.processes


def _still_v1(workspace: Workspace) -> None:
    """Reload an invalid configuration: it is refused, ``check`` exits 78, and v1 stays in force."""
    daemon = workspace.daemons[-1]
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.failed")
    assert workspace.verb("check").returncode == 78
    workspace.declare("after")
    daemon.wait_for("reconcile.done", key="c/after")
    assert daemon.all("reload.done") == []
    assert daemon.stop().code == 0


def _v1(workspace: Workspace) -> None:
    workspace.configure(level="debug")
    workspace.declare("a")
    workspace.started().wait_for("reconcile.done", key="c/a")


def test_c13_1_a_syntax_error_changes_nothing(workspace: Workspace) -> None:
    """C13.1: v1 stays in force after a syntax error, which is logged with line and column."""
    _v1(workspace)
    workspace.write(workspace.config, workspace.config.read_text() + "log: {format: [json\n")
    daemon = workspace.daemons[-1]
    daemon.send(signal.SIGHUP)
    fault = daemon.wait_for("config.invalid")
    assert fault["at"].startswith(f"{workspace.config}:")
    _still_v1(workspace)


def test_c13_2_an_unknown_plugin_changes_nothing(workspace: Workspace) -> None:
    """C13.2: v1 stays in force if v2 names an unknown reconciler; a similar name is suggested."""
    _v1(workspace)
    text = workspace.config.read_text().replace("probe:ProbeReconciler", "probe:ProbeReconcilr")
    workspace.write(workspace.config, text)
    daemon = workspace.daemons[-1]
    daemon.send(signal.SIGHUP)
    assert "did you mean ProbeReconciler?" in daemon.wait_for("config.invalid")["reason"]
    _still_v1(workspace)


def test_c13_4_one_bad_file_of_three_changes_nothing(workspace: Workspace) -> None:
    """C13.4: if one of three included files is invalid, the other two take no effect either."""
    _v1(workspace)
    parts = workspace.root / "conf.d"
    parts.mkdir()
    more = {"reconciler": "probe:ProbeReconciler", "watch": [{"every": "1h"}]}
    for name in ("one", "three"):
        (parts / f"{name}.yaml").write_text(yaml.safe_dump({"controllers": {name: more}}))
    (parts / "two.yaml").write_text("controllers: {two: {reconciler: exec, wach: []}}\n")
    config = yaml.safe_load(workspace.config.read_text()) | {"include": ["conf.d/*.yaml"]}
    workspace.write(workspace.config, yaml.safe_dump(config))
    daemon = workspace.daemons[-1]
    daemon.send(signal.SIGHUP)
    fault = daemon.wait_for("config.invalid")
    assert fault["at"].startswith(f"{parts}/two.yaml:1:")
    _still_v1(workspace)


def test_c13_5_a_controller_that_leaves_is_named_and_its_keys_stay(workspace: Workspace) -> None:
    """C13.5: a controller may be dropped: its keys are named, and nothing is removed."""
    _v1(workspace)
    daemon = workspace.daemons[-1]
    config = yaml.safe_load(workspace.config.read_text())
    config["controllers"]["d"] = {"reconciler": "exec", "watch": [{"every": "1h"}]}
    del config["controllers"]["c"]
    workspace.write(workspace.config, yaml.safe_dump(config))
    daemon.send(signal.SIGHUP)
    left = daemon.wait_for("controller.removed", controller="c")
    assert left["keys"] == ["c/a"]
    daemon.wait_for("reload.done", removed=["c"], started=["d"])
    assert daemon.stop().code == 0
    assert daemon.all("probe.removed") == []


def test_c13_a_reload_and_a_restart_give_the_same(workspace: Workspace) -> None:
    """C13: a reload has the effect of a restart: limits, controllers, log level."""
    _v1(workspace)
    daemon = workspace.daemons[-1]
    workspace.configure(Limits(drain=0.2, critical=3, cleanup=0.3), concurrency=2)
    workspace.declare("busy", do="sleep")
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.done", started=["c"])
    daemon.wait_for("probe.began", key="c/busy")
    reloaded = daemon.stop()
    daemon = workspace.started()
    daemon.wait_for("probe.began", key="c/busy")
    restarted = daemon.stop()
    for stopped in (reloaded, restarted):
        assert stopped.code == 0
        assert 0.2 <= stopped.wall <= 0.2 + SLACK


def test_c13_a_running_key_finishes_its_old_run_before_its_new_one(workspace: Workspace) -> None:
    """C13: a reload ends the old run by a staged stop; a key never has two runs at once."""
    workspace.configure(Limits(drain=0.3, critical=20, cleanup=0.5), level="debug")
    workspace.declare("held", do="critical", seconds=2.0, budget="10s")
    daemon = workspace.started()
    daemon.wait_for("probe.critical")
    workspace.configure(Limits(drain=0.3, critical=20, cleanup=0.5), level="debug", concurrency=3)
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.done", started=["c"])
    daemon.wait_for("reconcile.started", key="c/held", nth=2)
    order = [line["event"] for line in daemon.lines if line.get("key") == "c/held"]
    assert order.index("probe.finished") < len(order) - order[::-1].index("reconcile.started")
    assert order.index("probe.finished") < order.index("reconcile.done")
    starts = [index for index, event in enumerate(order) if event == "reconcile.started"]
    assert order.index("reconcile.done") < starts[1]
    daemon.stop(signal.SIGINT)


def test_c13_a_burst_of_reloads_ends_with_the_last_content(workspace: Workspace) -> None:
    """C13: requests during a reload cause one more reload; the last content is in force."""
    _v1(workspace)
    daemon = workspace.daemons[-1]
    for number in range(2, 12):
        workspace.configure(level="debug", concurrency=number)
        daemon.send(signal.SIGHUP)
    config = yaml.safe_load(workspace.config.read_text())
    more = {"reconciler": "probe:ProbeReconciler", "watch": [{"every": "1h"}]}
    config["controllers"]["last"] = more
    workspace.write(workspace.config, yaml.safe_dump(config))
    daemon.send(signal.SIGHUP)
    wait_until(lambda: any("last" in each["started"] for each in daemon.all("reload.done")), "last")
    assert daemon.stop().code == 0


def test_c13_a_stop_during_a_reload_is_a_stop(workspace: Workspace) -> None:
    """A signal during a reload begins a stop, as at any other time."""
    _v1(workspace)
    daemon = workspace.daemons[-1]
    workspace.configure(level="debug", concurrency=3)
    daemon.send(signal.SIGHUP)
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= SLACK
