"""A state directory that is deleted, moved, exchanged or copied, beside real daemons."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon, Limits, Workspace, wait_until

from reconciled.journal.sqlite.schema import FILE

pytestmark = pytest.mark.processes


def delete(state: Path) -> None:
    # Renamed first: the daemon may add a file while the tree is removed.
    doomed = state.with_name("doomed")
    state.rename(doomed)
    shutil.rmtree(doomed)


def move(state: Path) -> None:
    state.rename(state.with_name("moved"))


def exchange(state: Path) -> None:
    shutil.copytree(state, state.with_name("new"), ignore=shutil.ignore_patterns("*.sock"))
    move(state)
    state.with_name("new").rename(state)


def delete_content(state: Path) -> None:
    for entry in state.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def exchange_lock(state: Path) -> None:
    (state / "lock").unlink()
    (state / "lock").touch(0o600)


LOSSES = [delete, move, exchange, delete_content, exchange_lock]


def a_running_program(workspace: Workspace, do: str) -> Daemon:
    """A daemon with a program that would run for a minute."""
    workspace.configure(Limits(drain=60, critical=60, cleanup=2))
    argv = ["sh", "-c", f"touch {workspace.root}/began; sleep 60"]
    workspace.declare("a", do=do, argv=argv, budget="50s")
    daemon = workspace.started()
    wait_until((workspace.root / "began").exists, "the program")
    return daemon


@pytest.mark.parametrize("lose", LOSSES)
def test_state_directory_deleted_or_moved_under_a_running_daemon(
    workspace: Workspace, lose: Callable[[Path], None]
) -> None:
    """Everything is stopped in stages, critical work included, and the exit code is 1."""
    daemon = a_running_program(workspace, "outliving_program")
    lose(workspace.state)
    assert daemon.ended().code == 1
    lost = daemon.last("state.lost")
    assert str(workspace.state) in lost["reason"]
    assert "while the daemon was running" in lost["reason"]
    assert daemon.last("stop.began")["reason"] == lost["reason"]
    ended = daemon.last("stop.ended")
    assert (ended["exit_code"], ended["stage"], ended["cut"]) == (1, "HARD", 1)
    assert lost["reason"] in ended["reason"]
    assert daemon.left() == []
    assert not (workspace.state / "last-stop.json").exists()


@pytest.mark.parametrize("lose", LOSSES)
def test_lost_state_directory_of_an_ordinary_program(
    workspace: Workspace, lose: Callable[[Path], None]
) -> None:
    """Ordinary work is cancelled without a drain."""
    daemon = a_running_program(workspace, "program")
    lose(workspace.state)
    assert daemon.ended().code == 1
    assert daemon.left() == []


def test_second_daemon_on_an_exchanged_directory_is_left_alone(workspace: Workspace) -> None:
    """The daemon that lost its directory changes nothing in the store of its successor."""
    first = a_running_program(workspace, "outliving_program")
    first.send(19)  # halted, so that the second one certainly starts before it notices
    move(workspace.state)
    (workspace.resources / "a.yaml").unlink()
    workspace.declare("b")
    second = workspace.started()
    first.send(18)
    assert first.ended().code == 1
    assert first.left() == []
    assert second.alive
    second.send(9)
    second.ended()
    third = workspace.started()
    assert third.all("journal.damaged") == []
    assert third.stop().code == 0


def test_loss_is_noticed_by_a_stop_in_progress(workspace: Workspace) -> None:
    """The loss during a stop cuts what the stop waits for; 1 outranks 3."""
    daemon = a_running_program(workspace, "outliving_program")
    daemon.send(15)
    daemon.wait_for("stop.began")
    delete(workspace.state)
    assert daemon.ended().code == 1


def test_loss_at_the_end_of_a_stop(workspace: Workspace) -> None:
    """A loss that no check noticed in time is found at the end of the stop."""
    workspace.configure()
    daemon = workspace.started()
    daemon.send(19)
    exchange(workspace.state)
    daemon.send(15)
    daemon.send(18)
    assert daemon.ended().code == 1
    assert not (workspace.state / "last-stop.json").exists()


def test_moved_state_directory_keeps_its_operations(workspace: Workspace) -> None:
    """After the directory is moved back, the next start recovers what was cut."""
    daemon = a_running_program(workspace, "outliving_program")
    move(workspace.state)
    assert daemon.ended().code == 1
    (workspace.root / "moved").rename(workspace.state)
    daemon = workspace.started()
    assert daemon.all("journal.damaged") == []
    assert daemon.last("operation.found_open")["key"] == "c/a"


def test_left_behind_work_of_a_lost_directory(workspace: Workspace) -> None:
    """1 outranks 3, also if a task ignores its cancellation."""
    workspace.configure(Limits(drain=60, critical=60, cleanup=0.5))
    workspace.declare("a", do="thread", seconds=60)
    daemon = workspace.started()
    daemon.wait_for("probe.began")
    delete(workspace.state)
    assert daemon.ended().code == 1
    assert daemon.all("stop.left_behind")


# -- a copy ----------------------------------------------------------------------


def test_daemon_on_a_copy_holds_its_operations_once(workspace: Workspace) -> None:
    """A daemon on a copy leaves the original's program alone, and holds its operation once."""
    first = a_running_program(workspace, "outliving_program")
    programs = first.left()
    original = (workspace.state / "identity").read_bytes()
    shutil.copytree(
        workspace.state, workspace.root / "copy", ignore=shutil.ignore_patterns("*.sock")
    )
    text = workspace.config.read_text()
    workspace.write(workspace.config, text.replace(str(workspace.state), f"{workspace.root}/copy"))
    second = workspace.started()
    assert second.last("state.copied")["id"] not in original.decode()
    held = second.wait_for("operation.held", key="c/a")
    assert "is a copy" in held["reason"]
    assert second.stop().code == 0
    assert set(programs) <= set(first.left())
    assert first.alive
    assert (workspace.state / "identity").read_bytes() == original
    third = workspace.started()
    assert third.all("state.copied") == []
    listed = workspace.verb("journal", "list", "--json")
    assert [each["id"] for each in json.loads(listed.stdout)] == [held["operation"]]
    (workspace.root / "began").unlink()
    resolved = workspace.verb(
        "journal", "resolve", held["operation"], "--abandon", "--why", "the original runs it"
    )
    assert resolved.returncode == 0
    wait_until((workspace.root / "began").exists, "the copy's own program")
    third.send(9)
    third.ended()
    fourth = workspace.started()
    assert fourth.all("operation.held") == []
    assert first.alive
    assert set(programs) <= set(first.left())


# -- a damaged store ---------------------------------------------------------------


def damage(state: Path) -> None:
    """Damage the store: its marker is closed or open, and the database is empty."""
    (state / "store" / FILE).write_bytes(b"")


@pytest.mark.parametrize("do", ["outliving_program", "ordinary_program"])
def test_set_aside_store_takes_no_program_with_it(workspace: Workspace, do: str) -> None:
    """A live program with an intact record is found, waited for or ended, and listed."""
    first = a_running_program(workspace, do)
    epoch = first.last("daemon.starting")["epoch"]
    first.send(9)
    first.ended()
    programs = first.left()
    assert programs
    (workspace.root / "began").unlink()
    damage(workspace.state)
    second = workspace.started()
    assert second.all("journal.damaged")
    assert second.last("daemon.starting")["epoch"] > epoch
    held = second.wait_for("operation.held", key="c/a")
    assert "was set aside" in held["reason"]
    second.wait_for("program.adopted", key="c/a")
    listed = json.loads(workspace.verb("journal", "list", "--json").stdout)
    assert [(each["id"], each["state"]) for each in listed] == [(held["operation"], "held")]
    assert "No operation is open" not in workspace.verb("journal", "list").stdout
    if do == "outliving_program":
        assert set(programs) <= set(first.left())
    else:
        wait_until(lambda: first.left() == [], "the end of an ordinary program")
    assert not (workspace.root / "began").exists()
    resolved = workspace.verb("journal", "resolve", "--all", "--abandon", "--why", "checked")
    assert resolved.returncode == 0
    if do == "outliving_program":
        # Still no second run beside it.
        assert not (workspace.root / "began").exists()
        for pid in programs:
            os.kill(pid, 9)
    wait_until((workspace.root / "began").exists, "the next run, after the first has ended")
    assert first.left() == []


@pytest.mark.parametrize("resolution", ["--forward", "--complete", "--abandon"])
def test_lost_operation_can_be_resolved(workspace: Workspace, resolution: str) -> None:
    """Each decision about a lost operation is carried out, also without its controller."""
    first = a_running_program(workspace, "outliving_program")
    first.send(9)
    first.ended()
    damage(workspace.state)
    reconciler = {"reconciler": "probe:ProbeReconciler", "watch": [{"directory": "resources"}]}
    workspace.configure(controllers={"renamed": reconciler})
    second = workspace.started()
    operation = second.wait_for("operation.held", key="c/a")["operation"]
    resolved = workspace.verb("journal", "resolve", operation, resolution, "--why", "checked")
    assert resolved.returncode == 0, resolved.stderr
    second.wait_for("operation.resolved", operation=operation)
    assert second.stop().code in (0, 3)
    assert second.all("daemon.crashed") == []


def test_epoch_never_goes_back(workspace: Workspace) -> None:
    """The epoch rises over a damaged, a deleted and a new store."""
    workspace.configure()
    epochs = []
    for spoil in (damage, lambda state: shutil.rmtree(state / "store"), lambda _: None):
        daemon = workspace.started()
        epochs.append(daemon.last("daemon.starting")["epoch"])
        assert daemon.stop().code == 0
        spoil(workspace.state)
    daemon = workspace.started()
    epochs.append(daemon.last("daemon.starting")["epoch"])
    assert epochs == sorted(set(epochs))
