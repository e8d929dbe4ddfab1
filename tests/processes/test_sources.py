"""C08 and C10 end to end, and sources that stall: nothing is lost, nothing is taken for empty."""

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
from harness import PATIENCE, SLACK, Limits, Site, wait_until

pytestmark = pytest.mark.processes


def _files(site: Site) -> Path:
    """With the file reconciler below ``root``."""
    root = site.root / "root"
    root.mkdir()
    site.configure(reconciler="file", options={"root": str(root)})
    return root


def _contents(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in root.iterdir() if path.name[0] != "."}


def test_c08_1_changes_around_the_first_listing_are_applied(site: Site) -> None:
    """C08.1: while the daemon starts, files change all the time; the final state is the last."""
    root = _files(site)
    started = threading.Event()

    def change() -> None:
        turn = 0
        while not started.is_set():
            turn += 1
            for name in ("a", "b", "c"):
                site.declare(name, kind="File", path=name, content=f"{turn}\n")
        for name in ("a", "b", "c"):
            site.declare(name, kind="File", path=name, content="last\n")

    writer = threading.Thread(target=change)
    writer.start()
    daemon = site.start()
    daemon.wait_for("daemon.ready")
    started.set()
    writer.join()
    wanted = {"a": "last\n", "b": "last\n", "c": "last\n"}
    wait_until(lambda: _contents(root) == wanted, "the last contents")
    assert daemon.stop().code == 0


def test_c08_2_what_was_deleted_while_nobody_watched_is_removed(site: Site) -> None:
    """C08.2: a manifest that went while the daemon was down, or killed, is removed at the start."""
    root = _files(site)
    manifest = site.declare("a", kind="File", path="a", content="x\n")
    site.declare("b", kind="File", path="b", content="x\n")
    daemon = site.started()
    wait_until(lambda: set(_contents(root)) == {"a", "b"}, "both files")
    daemon.wait_for("reconcile.done", key="c/a")
    daemon.wait_for("reconcile.done", key="c/b")
    daemon.stop(signal.SIGKILL)
    manifest.unlink()
    daemon = site.started()
    daemon.wait_for("reconcile.removed", key="c/a")
    assert set(_contents(root)) == {"b"}
    assert daemon.stop().code == 0


def test_c08_3_a_deletion_of_what_was_declared_again_removes_nothing(site: Site) -> None:
    """C08.3: delete and create in quick turns ends as the last listing says, however it is seen."""
    root = _files(site)
    site.declare("keep", kind="File", path="keep", content="x\n")
    daemon = site.started()
    for turn in range(20):
        site.declare("a", kind="File", path="a", content=f"{turn}\n").unlink()
    site.declare("a", kind="File", path="a", content="last\n")
    wait_until(lambda: _contents(root) == {"keep": "x\n", "a": "last\n"}, "the last state")
    assert daemon.stop().code == 0


def test_c08_4_a_moved_output_leaves_no_old_copy(site: Site) -> None:
    """C08.4: when the path of a file changes, the old one goes."""
    root = _files(site)
    site.declare("a", kind="File", path="old", content="x\n")
    daemon = site.started()
    wait_until(lambda: _contents(root) == {"old": "x\n"}, "the file")
    site.declare("a", kind="File", path="new", content="x\n")
    wait_until(lambda: _contents(root) == {"new": "x\n"}, "the move")
    assert daemon.stop().code == 0


@pytest.mark.parametrize("fault", ["empty-file", "typo", "renamed", "new-and-empty"])
def test_c10_what_cannot_be_read_removes_nothing(site: Site, fault: str) -> None:
    """C10.3-5: an empty file, a typo, a directory that is gone or another: all stays."""
    root = _files(site)
    names = {f"f{number}" for number in range(8)}
    for name in names:
        site.declare(name, kind="File", path=name, content="x\n")
    daemon = site.started()
    for name in names:
        daemon.wait_for("reconcile.done", key=f"c/{name}")
    gone = site.root / "gone"
    if fault == "empty-file":
        (site.resources / "f0.yaml").write_bytes(b"")
        (site.resources / "f1.yaml").unlink()
        daemon.wait_for("source.incomplete")
    elif fault == "typo":
        (site.resources / "f0.yaml").write_text("kind: File\nmetdata: {name: f0}\nspec: {}\n")
        (site.resources / "f1.yaml").unlink()
        problem = daemon.wait_for("manifest.invalid")
        assert problem["at"] == f"{site.resources}/f0.yaml:2:1"
        assert "did you mean metadata" in problem["reason"]
    else:
        site.resources.rename(gone)
        if fault == "new-and-empty":
            site.resources.mkdir()
        daemon.wait_for("source.unavailable")
    # A change that is seen after the fault: the listing before it has been acted on.
    if fault in ("empty-file", "typo"):
        site.declare("later", kind="File", path="later", content="x\n")
        daemon.wait_for("reconcile.done", key="c/later")
        names.add("later")
    assert daemon.stop().code == 0
    assert daemon.all("reconcile.removed") == []
    assert set(_contents(root)) == names


def test_c10_2_a_mass_deletion_is_held_until_it_is_allowed(site: Site) -> None:
    """C10.2: more removals than the share are held and announced; ``allow`` permits them, once."""
    root = _files(site)
    manifests = [
        site.declare(f"f{number}", kind="File", path=f"f{number}", content="x\n")
        for number in range(8)
    ]
    daemon = site.started()
    for number in range(8):
        daemon.wait_for("reconcile.done", key=f"c/f{number}")
    for manifest in manifests[:7]:
        new = site.root / manifest.name
        manifest.rename(new)
    held = daemon.wait_for("removals.held", count=7, owned=8)
    assert held["commands"] == "reconciled allow c"
    daemon.stop()
    assert len(_contents(root)) == 8
    # Held across a restart too.
    daemon = site.started()
    daemon.wait_for("removals.held", count=7)
    allowed = site.verb("allow", "c")
    assert allowed.returncode == 0, allowed.stderr
    wait_until(lambda: set(_contents(root)) == {"f7"}, "the permitted removals")
    assert site.verb("allow", "c").returncode == 4
    assert daemon.stop().code == 0


def test_a_source_that_stalls_in_the_kernel_delays_no_stop(site: Site) -> None:
    """A directory that hangs in the kernel when it is opened holds up no stop."""
    site.configure(Limits(drain=5, critical=20, cleanup=1))
    site.declare("calm")
    with _held_up(site.resources) as asked:
        daemon = site.start()
        poll = select.poll()
        poll.register(asked, select.POLLIN)
        assert poll.poll(1000 * PATIENCE), f"nobody opened the directory:\n{daemon}"
        assert daemon.all("source.ready") == []
        stopped = daemon.stop()
    assert stopped.code == 0
    assert stopped.wall <= SLACK
    assert daemon.left() == []


@contextlib.contextmanager
def _held_up(path: Path) -> Iterator[int]:
    """Whoever opens the directory waits for an answer, which never comes: fanotify(7).

    Gives the descriptor that is readable once somebody waits. Not by strace, which now and
    then does not notice the end of a process one of whose threads it holds.
    """
    library = ctypes.CDLL(None, use_errno=True)
    content, cloexec, add, on_directory, open_permission = 0x4, 0x1, 0x1, 0x40000000, 0x10000
    listener = library.fanotify_init(content | cloexec, os.O_RDONLY)
    mask = ctypes.c_uint64(open_permission | on_directory)
    here = -100  # AT_FDCWD
    if listener < 0 or library.fanotify_mark(listener, add, mask, here, bytes(path)):
        pytest.skip(f"fanotify is not to be had: {os.strerror(ctypes.get_errno())}")
    try:
        yield listener
    finally:
        os.close(listener)
