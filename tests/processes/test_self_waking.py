"""C11: a daemon that wakes itself is noticed, named once, and slowed down."""

from __future__ import annotations

import pytest
from harness import Site, wait_until

pytestmark = pytest.mark.processes


def test_c11_a_write_without_a_change_wakes_nobody(site: Site) -> None:
    """C11: a reconciler that writes only a comment into the watched tree runs once."""
    site.configure(level="debug")
    path = site.resources / "a.yaml"
    site.declare("a", do="touch", path=str(path))
    daemon = site.started()
    daemon.wait_for("reconcile.done", key="c/a")
    wait_until(lambda: "# last run" in path.read_text(), "its write")
    # A key that is declared later is seen by a listing that has seen the write as well.
    site.declare("later")
    daemon.wait_for("reconcile.done", key="c/later")
    assert daemon.stop().code == 0
    assert len(daemon.all("reconcile.started", key="c/a")) == 1


def test_c11_a_reconciler_that_rewrites_its_own_spec_is_slowed_down(site: Site) -> None:
    """C11: own writes of a new spec each time are found out as a loop, which is named once."""
    site.configure(level="debug")
    path = site.resources / "a.yaml"
    site.declare("a", do="rewrite", path=str(path), count=1)
    daemon = site.started()
    looping = daemon.wait_for("reconcile.looping", key="c/a", within=40)
    before = len(daemon.all("reconcile.started", key="c/a"))
    # Rests of 1, 2, 4 s follow: two more runs take seconds, where 20 took a few.
    daemon.wait_for("reconcile.started", key="c/a", nth=before + 2, within=20)
    assert daemon.stop().code == 0
    assert "writes what it watches" in looping["reason"]
    assert before <= 30
    assert len(daemon.all("reconcile.looping")) == 1


def test_c11_a_reconciler_that_differs_from_itself_each_time_is_slowed_down(site: Site) -> None:
    """C11: a time stamp of its own, new each time, makes no endless run: CPU goes to nearly 0."""
    site.configure(level="debug")
    site.declare("a", do="stamp")
    daemon = site.started()
    daemon.wait_for("reconcile.looping", key="c/a")
    before, cpu = len(daemon.all("reconcile.started")), daemon.cpu()
    first = daemon.wait_for("reconcile.started", nth=before + 1)
    last = daemon.wait_for("reconcile.started", nth=before + 3, within=20)
    assert first["time"] < last["time"]
    # Three more runs took 1 + 2 + 4 s.
    assert daemon.cpu() - cpu <= 0.5
    assert len(daemon.all("reconcile.looping")) == 1
    assert daemon.stop().code == 0
