"""Adoption and reloads: a program that goes on never gets a second one beside it."""

from __future__ import annotations

import signal
from pathlib import Path

import attrs
import pytest
from harness import Daemon, Limits, Workspace, wait_until

pytestmark = pytest.mark.processes

# Notes its begin, an overlap, a SIGTERM and its end; goes on until the test releases it.
PROGRAM = """#!/bin/sh
cd "$(dirname "$0")"
exec 9> lock
flock -n 9 || echo overlap >> notes
trap 'echo SIGTERM >> notes' TERM
echo "began $RECONCILED_KEY $1" >> notes
while [ ! -e release ]; do sleep 0.02 9>&-; done
echo "ended $RECONCILED_KEY $1" >> notes
"""
LIMITS = Limits(drain=60, critical=300, cleanup=2)


@attrs.frozen
class Site:
    """A workspace with the Exec ``site``, whose program goes on until release()."""

    workspace: Workspace

    def configure(self, name: str = "c", **changes: object) -> None:
        """Write the configuration: one controller *name*."""
        controller = {"reconciler": "exec", "watch": [{"directory": "resources"}], **changes}
        self.workspace.configure(LIMITS, controllers={name: controller})

    def declare(self, version: str = "v1", **spec: object) -> None:
        """Write the manifest; its program gets *version*."""
        program = str(self.workspace.root / "program")
        self.workspace.declare("site", kind="Exec", apply=[program, version], **spec)

    def start(self, **spec: object) -> Daemon:
        """A daemon whose program has begun."""
        program = self.workspace.root / "program"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        self.configure()
        self.declare(**spec)
        daemon = self.workspace.started()
        self.wait_for("began c/site v1")
        return daemon

    def restart_killed(self, name: str = "c") -> Daemon:
        """A daemon with the controller *name* that follows a killed one; the program goes on."""
        killed = self.start(critical={"budget": "4m"})
        killed.send(signal.SIGKILL)
        killed.ended()
        self.configure(name)
        daemon = self.workspace.started()
        daemon.wait_for("program.adopted", key="c/site")
        return daemon

    def reload(self, daemon: Daemon, name: str = "c", **changes: object) -> None:
        """Reload with the controller *name*, changed."""
        self.configure(name, **changes)
        daemon.send(signal.SIGHUP)
        daemon.wait_for("reload.done", started=[name])

    def run_another(self, daemon: Daemon, name: str = "c") -> None:
        """Declare another key and wait for its run: what was queued before has been handled."""
        self.workspace.declare("other", kind="Exec", apply=["true"])
        daemon.wait_for("reconcile.done", key=f"{name}/other")

    def release(self) -> None:
        """Let programs end."""
        (self.workspace.root / "release").touch()

    @property
    def notes(self) -> list[str]:
        """What the programs have noted."""
        file = Path(self.workspace.root / "notes")
        return file.read_text().splitlines() if file.exists() else []

    def wait_for(self, note: str) -> None:
        """Wait until a program has noted this."""
        wait_until(lambda: note in self.notes, note)


@pytest.fixture
def site(workspace: Workspace) -> Site:
    """The workspace, not configured yet."""
    return Site(workspace)


def test_a_reload_while_an_adopted_program_is_waited_for_keeps_its_key(site: Site) -> None:
    """A reload hands the adopted program on: an edit waits for it, and its end queues the key."""
    daemon = site.restart_killed()
    site.reload(daemon, concurrency=3)
    site.declare("v2")
    site.run_another(daemon)
    assert site.notes == ["began c/site v1"]
    site.release()
    daemon.wait_for("recovery.done", key="c/site")
    site.wait_for("ended c/site v2")
    assert site.notes == [
        "began c/site v1", "ended c/site v1", "began c/site v2", "ended c/site v2"
    ]  # fmt: skip
    assert len(daemon.all("program.adopted")) == 1
    assert daemon.stop().code == 0


def test_the_key_of_an_adopted_program_is_not_lost_by_a_reload(site: Site) -> None:
    """Without an edit, too, the operation is finished when the program ends after a reload."""
    daemon = site.restart_killed()
    site.reload(daemon, concurrency=3)
    site.release()
    daemon.wait_for("recovery.done", key="c/site")
    assert daemon.stop().code == 0
    assert site.notes == ["began c/site v1", "ended c/site v1"]


def test_a_stop_after_a_reload_counts_the_adopted_program_as_critical(site: Site) -> None:
    """After a reload an adopted program still has its budget in a stop."""
    daemon = site.restart_killed()
    site.reload(daemon, concurrency=3)
    daemon.send(signal.SIGTERM)
    daemon.wait_for("stop.began")
    site.release()
    assert daemon.ended().code == 0
    assert site.notes == ["began c/site v1", "ended c/site v1"]


@pytest.mark.parametrize("once", [True, False])
def test_a_reload_that_changes_a_controller_lets_the_program_of_its_own_run_drain(
    site: Site, *, once: bool
) -> None:
    """The program of a living run is not adopted: no SIGTERM, and its run ends well."""
    daemon = site.start(once=once)
    site.reload(daemon, concurrency=3)
    site.run_another(daemon)
    site.release()
    daemon.wait_for("reconcile.done", key="c/site")
    assert daemon.stop().code == 0
    assert site.notes == ["began c/site v1", "ended c/site v1"]
    assert daemon.all("program.adopted") == daemon.all("operation.held") == []


def test_a_controller_renamed_while_an_operation_is_open(site: Site) -> None:
    """The program is waited for, the new controller waits, and a person resolves the operation."""
    daemon = site.restart_killed("d")
    daemon.wait_for("operation.found_open", key="c/site")
    daemon.wait_for("reconcile.waiting", key="d/site")
    site.run_another(daemon, "d")
    assert site.notes == ["began c/site v1"]
    site.release()
    held = daemon.wait_for("operation.held", key="c/site")
    assert held["reason"] == "its controller c is not configured: it was removed or renamed"
    daemon.wait_for("reconcile.blocked", key="d/site", operation=held["operation"])
    site.run_another(daemon, "d")
    assert site.notes == ["began c/site v1", "ended c/site v1"]
    listed = site.workspace.verb("journal", "list").stdout
    assert "c/site" in listed
    assert "held" in listed
    resolved = site.workspace.verb(
        "journal", "resolve", held["operation"], "--complete", "--why", "it is done"
    )
    assert resolved.returncode == 0, resolved.stderr
    site.wait_for("ended d/site v1")
    assert daemon.stop().code == 0
    assert "overlap" not in site.notes


def test_a_controller_renamed_by_a_reload_waits_for_the_old_run(site: Site) -> None:
    """The renamed controller's key runs after the run of its old name, never beside it."""
    daemon = site.start()
    site.reload(daemon, "d")
    daemon.wait_for("reconcile.waiting", key="d/site")
    assert site.notes == ["began c/site v1"]
    site.release()
    site.wait_for("ended d/site v1")
    assert daemon.stop().code == 0
    assert site.notes == [
        "began c/site v1", "ended c/site v1", "began d/site v1", "ended d/site v1"
    ]  # fmt: skip


def test_a_controller_renamed_back_recovers_its_operation(site: Site) -> None:
    """A hold for a missing controller ends when the controller is configured again."""
    daemon = site.restart_killed("d")
    site.release()
    daemon.wait_for("operation.held", key="c/site")
    assert daemon.stop().code == 0
    daemon = site.workspace.started()
    daemon.wait_for("reconcile.blocked", key="d/site")
    site.reload(daemon, "c")
    daemon.wait_for("recovery.done", key="c/site")
    assert daemon.stop().code == 0
    assert site.notes == ["began c/site v1", "ended c/site v1"]
