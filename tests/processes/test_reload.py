"""C13: a reload is one step, or none; and what is wrong is said with its place."""

from __future__ import annotations

import signal

import pytest
import yaml
from harness import SLACK, Limits, Site, wait_until

pytestmark = pytest.mark.processes


def _still_v1(site: Site) -> None:
    """Reload a bad configuration: it is refused, ``check`` says 78, and v1 works on."""
    daemon = site.daemons[-1]
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.failed")
    assert site.verb("check").returncode == 78
    site.declare("after")
    daemon.wait_for("reconcile.done", key="c/after")
    assert daemon.all("reload.done") == []
    assert daemon.stop().code == 0


def _v1(site: Site) -> None:
    site.configure(level="debug")
    site.declare("a")
    site.started().wait_for("reconcile.done", key="c/a")


def test_c13_1_a_syntax_error_changes_nothing(site: Site) -> None:
    """C13.1: v1 runs on after a syntax error, which is told with line and column."""
    _v1(site)
    site.write(site.config, site.config.read_text() + "log: {format: [json\n")
    daemon = site.daemons[-1]
    daemon.send(signal.SIGHUP)
    fault = daemon.wait_for("config.invalid")
    assert fault["at"].startswith(f"{site.config}:")
    _still_v1(site)


def test_c13_2_an_unknown_plugin_changes_nothing(site: Site) -> None:
    """C13.2: v1 runs on when v2 names a reconciler that is not there; a near name is offered."""
    _v1(site)
    text = site.config.read_text().replace("probe:ProbeReconciler", "probe:ProbeReconcilr")
    site.write(site.config, text)
    daemon = site.daemons[-1]
    daemon.send(signal.SIGHUP)
    assert "did you mean ProbeReconciler?" in daemon.wait_for("config.invalid")["reason"]
    _still_v1(site)


def test_c13_4_one_bad_file_of_three_changes_nothing(site: Site) -> None:
    """C13.4: of three included files one is bad: nothing of the other two is taken over."""
    _v1(site)
    parts = site.root / "conf.d"
    parts.mkdir()
    more = {"reconciler": "probe:ProbeReconciler", "watch": [{"every": "1h"}]}
    for name in ("one", "three"):
        (parts / f"{name}.yaml").write_text(yaml.safe_dump({"controllers": {name: more}}))
    (parts / "two.yaml").write_text("controllers: {two: {reconciler: exec, wach: []}}\n")
    config = yaml.safe_load(site.config.read_text()) | {"include": ["conf.d/*.yaml"]}
    site.write(site.config, yaml.safe_dump(config))
    daemon = site.daemons[-1]
    daemon.send(signal.SIGHUP)
    fault = daemon.wait_for("config.invalid")
    assert fault["at"].startswith(f"{parts}/two.yaml:1:")
    _still_v1(site)


def test_c13_5_a_controller_that_leaves_is_named_and_its_keys_stay(site: Site) -> None:
    """C13.5: valid content that drops a controller is taken, with a warning, and undoes nothing."""
    _v1(site)
    daemon = site.daemons[-1]
    config = yaml.safe_load(site.config.read_text())
    config["controllers"]["d"] = {"reconciler": "exec", "watch": [{"every": "1h"}]}
    del config["controllers"]["c"]
    site.write(site.config, yaml.safe_dump(config))
    daemon.send(signal.SIGHUP)
    left = daemon.wait_for("controller.removed", controller="c")
    assert left["keys"] == ["c/a"]
    daemon.wait_for("reload.done", left=["c"], started=["d"])
    assert daemon.stop().code == 0
    assert daemon.all("probe.removed") == []


def test_c13_a_reload_and_a_restart_give_the_same(site: Site) -> None:
    """C13: what a reload takes over is what a restart would: limits, controllers, log level."""
    _v1(site)
    daemon = site.daemons[-1]
    site.configure(Limits(drain=0.2, critical=3, cleanup=0.3), concurrency=2)
    site.declare("busy", do="sleep")
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.done", started=["c"])
    daemon.wait_for("probe.began", key="c/busy")
    reloaded = daemon.stop()
    daemon = site.started()
    daemon.wait_for("probe.began", key="c/busy")
    restarted = daemon.stop()
    for stopped in (reloaded, restarted):
        assert stopped.code == 0
        assert 0.2 <= stopped.wall <= 0.2 + SLACK


def test_c13_a_running_key_finishes_its_old_run_before_its_new_one(site: Site) -> None:
    """C13: a reload ends the old run by its own staged stop; a key never runs twice at once."""
    site.configure(Limits(drain=0.3, critical=20, cleanup=0.5), level="debug")
    site.declare("held", do="critical", seconds=2.0, budget="10s")
    daemon = site.started()
    daemon.wait_for("probe.critical")
    site.configure(Limits(drain=0.3, critical=20, cleanup=0.5), level="debug", concurrency=3)
    daemon.send(signal.SIGHUP)
    daemon.wait_for("reload.done", started=["c"])
    daemon.wait_for("reconcile.started", key="c/held", nth=2)
    order = [line["event"] for line in daemon.lines if line.get("key") == "c/held"]
    assert order.index("probe.finished") < len(order) - order[::-1].index("reconcile.started")
    assert order.index("probe.finished") < order.index("reconcile.done")
    starts = [place for place, event in enumerate(order) if event == "reconcile.started"]
    assert order.index("reconcile.done") < starts[1]
    daemon.stop(signal.SIGINT)


def test_c13_a_burst_of_reloads_ends_with_the_last_content(site: Site) -> None:
    """C13: requests during a reload are one more reload; the last content is what runs."""
    _v1(site)
    daemon = site.daemons[-1]
    for number in range(2, 12):
        site.configure(level="debug", concurrency=number)
        daemon.send(signal.SIGHUP)
    config = yaml.safe_load(site.config.read_text())
    more = {"reconciler": "probe:ProbeReconciler", "watch": [{"every": "1h"}]}
    config["controllers"]["last"] = more
    site.write(site.config, yaml.safe_dump(config))
    daemon.send(signal.SIGHUP)
    wait_until(lambda: any("last" in each["started"] for each in daemon.all("reload.done")), "last")
    assert daemon.stop().code == 0


def test_c13_a_stop_during_a_reload_is_a_stop(site: Site) -> None:
    """A signal that comes while a reload is under way begins a stop, as at any time."""
    _v1(site)
    daemon = site.daemons[-1]
    site.configure(level="debug", concurrency=3)
    daemon.send(signal.SIGHUP)
    stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= SLACK
