"""C08 and C10 end to end, and sources that stall: no change is lost, nothing unread is empty."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PATIENCE, SLACK, Limits, Workspace, wait_until

pytestmark = pytest.mark.processes


def _files(workspace: Workspace) -> Path:
    """With the file reconciler below ``root``."""
    root = workspace.root / "root"
    root.mkdir()
    workspace.configure(reconciler="file", options={"root": str(root)})
    return root


def _contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.name[0] != "."}


def test_c08_1_changes_around_the_first_listing_are_applied(workspace: Workspace) -> None:
    """C08.1: manifests change all the time during the start; the last contents are applied."""
    root = _files(workspace)
    started = threading.Event()

    def change() -> None:
        turn = 0
        while not started.is_set():
            turn += 1
            for name in ("a", "b", "c"):
                workspace.declare(name, kind="File", path=name, content=f"{turn}\n")
        for name in ("a", "b", "c"):
            workspace.declare(name, kind="File", path=name, content="last\n")

    writer = threading.Thread(target=change)
    writer.start()
    daemon = workspace.start()
    daemon.wait_for("daemon.ready")
    started.set()
    writer.join()
    wanted = {"a": "last\n", "b": "last\n", "c": "last\n"}
    wait_until(lambda: _contents(root) == wanted, "the last contents")
    assert daemon.stop().code == 0


def test_c08_2_what_was_deleted_without_a_daemon_is_removed(workspace: Workspace) -> None:
    """C08.2: the key of a manifest deleted while no daemon ran is removed at the next start."""
    root = _files(workspace)
    manifest = workspace.declare("a", kind="File", path="a", content="x\n")
    workspace.declare("b", kind="File", path="b", content="x\n")
    daemon = workspace.started()
    wait_until(lambda: set(_contents(root)) == {"a", "b"}, "both files")
    daemon.wait_for("reconcile.done", key="c/a")
    daemon.wait_for("reconcile.done", key="c/b")
    daemon.stop(signal.SIGKILL)
    manifest.unlink()
    daemon = workspace.started()
    daemon.wait_for("reconcile.removed", key="c/a")
    assert set(_contents(root)) == {"b"}
    assert daemon.stop().code == 0


def test_c08_3_a_deletion_of_what_was_declared_again_removes_nothing(workspace: Workspace) -> None:
    """C08.3: alternating deletions and creations end in the state of the last listing."""
    root = _files(workspace)
    workspace.declare("keep", kind="File", path="keep", content="x\n")
    daemon = workspace.started()
    for turn in range(20):
        workspace.declare("a", kind="File", path="a", content=f"{turn}\n").unlink()
    workspace.declare("a", kind="File", path="a", content="last\n")
    wait_until(lambda: _contents(root) == {"keep": "x\n", "a": "last\n"}, "the last state")
    assert daemon.stop().code == 0


def test_c08_4_a_moved_output_leaves_no_old_copy(workspace: Workspace) -> None:
    """C08.4: when the path of a file changes, the file at the old path is removed."""
    root = _files(workspace)
    workspace.declare("a", kind="File", path="old", content="x\n")
    daemon = workspace.started()
    wait_until(lambda: _contents(root) == {"old": "x\n"}, "the file")
    workspace.declare("a", kind="File", path="new", content="x\n")
    wait_until(lambda: _contents(root) == {"new": "x\n"}, "the move")
    assert daemon.stop().code == 0


@pytest.mark.parametrize("fault", ["empty-file", "typo", "renamed", "new-and-empty"])
def test_c10_what_cannot_be_read_removes_nothing(workspace: Workspace, fault: str) -> None:
    """C10.3-5: after an empty file, a typo, a missing or replaced directory nothing is removed."""
    root = _files(workspace)
    names = {f"f{number}" for number in range(8)}
    for name in names:
        workspace.declare(name, kind="File", path=name, content="x\n")
    daemon = workspace.started()
    for name in names:
        daemon.wait_for("reconcile.done", key=f"c/{name}")
    moved = workspace.root / "moved"
    if fault == "empty-file":
        (workspace.resources / "f0.yaml").write_bytes(b"")
        (workspace.resources / "f1.yaml").unlink()
        daemon.wait_for("source.incomplete")
    elif fault == "typo":
        (workspace.resources / "f0.yaml").write_text("kind: File\nmetdata: {name: f0}\nspec: {}\n")
        (workspace.resources / "f1.yaml").unlink()
        problem = daemon.wait_for("manifest.invalid")
        assert problem["at"] == f"{workspace.resources}/f0.yaml:2:1"
        assert "did you mean metadata" in problem["reason"]
    else:
        workspace.resources.rename(moved)
        if fault == "new-and-empty":
            workspace.resources.mkdir()
        daemon.wait_for("source.unavailable")
    # A change that is seen after the fault: the listing before it has been processed.
    if fault in ("empty-file", "typo"):
        workspace.declare("later", kind="File", path="later", content="x\n")
        daemon.wait_for("reconcile.done", key="c/later")
        names.add("later")
    assert daemon.stop().code == 0
    assert daemon.all("reconcile.removed") == []
    assert set(_contents(root)) == names


def test_c10_2_a_mass_deletion_is_held_until_it_is_allowed(workspace: Workspace) -> None:
    """C10.2: too many removals at once are held and logged; ``allow`` approves them, once."""
    root = _files(workspace)
    manifests = [
        workspace.declare(f"f{number}", kind="File", path=f"f{number}", content="x\n")
        for number in range(8)
    ]
    daemon = workspace.started()
    for number in range(8):
        daemon.wait_for("reconcile.done", key=f"c/f{number}")
    for manifest in manifests[:7]:
        new = workspace.root / manifest.name
        manifest.rename(new)
    held = daemon.wait_for("removals.held", count=7, owned=8)
    assert held["commands"] == ["reconciled allow c"]
    daemon.stop()
    assert len(_contents(root)) == 8
    # They are held across a restart too.
    daemon = workspace.started()
    daemon.wait_for("removals.held", count=7)
    allowed = workspace.verb("allow", "c")
    assert allowed.returncode == 0, allowed.stderr
    wait_until(lambda: set(_contents(root)) == {"f7"}, "the approved removals")
    assert workspace.verb("allow", "c").returncode == 4
    assert daemon.stop().code == 0


def test_a_source_that_stalls_in_the_kernel_delays_no_stop(workspace: Workspace) -> None:
    """A directory whose open() hangs in the kernel does not delay a stop."""
    workspace.configure(Limits(drain=5, critical=20, cleanup=1))
    workspace.declare("calm")
    with _held_up(workspace.resources) as asked:
        daemon = workspace.start()
        poll = select.poll()
        poll.register(asked, select.POLLIN)
        assert poll.poll(1000 * PATIENCE), f"the directory was not opened:\n{daemon}"
        assert daemon.all("source.ready") == []
        stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= SLACK
    assert daemon.left() == []


@contextlib.contextmanager
def _held_up(path: Path) -> Iterator[int]:
    """Each open() of the directory waits for a permission that never comes: fanotify(7).

    Yields the descriptor, readable once a process waits. Rejected: strace, which sometimes
    misses the end of a process one of whose threads it holds.
    """
    library = ctypes.CDLL(None, use_errno=True)
    content, cloexec, add, on_directory, open_permission = 0x4, 0x1, 0x1, 0x40000000, 0x10000
    listener = library.fanotify_init(content | cloexec, os.O_RDONLY)
    mask = ctypes.c_uint64(open_permission | on_directory)
    here = -100  # AT_FDCWD
    if listener < 0 or library.fanotify_mark(listener, add, mask, here, bytes(path)):
        pytest.skip(f"fanotify is not available: {os.strerror(ctypes.get_errno())}")
    try:
        yield listener
    finally:
        os.close(listener)
