"""EIO and ENOSPC from calls of the running daemon: it says so, goes on, and returns by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness import Daemon
from test_powercuts import need_strace
from world import PATIENCE, World

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@contextmanager
def failing(daemon: Daemon, what: str, *paths: str) -> Iterator[None]:
    """Have calls of the daemon fail, and not those of its programs; *paths* alone if there are."""
    command = ["strace", "-f", "-b", "execve", "-o", "/dev/null"]
    command += [*(f"--trace-path={path}" for path in paths), f"--inject={what}"]
    strace = subprocess.Popen([*command, "-p", str(daemon.pid)], stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    try:
        said = ""
        for line in strace.stderr:
            said += line
            if "attached" in line:
                break
        else:
            pytest.fail(said)
        yield
    finally:
        # SIGKILL lets go of the daemon at once; SIGTERM waits for each of its threads to stop.
        strace.kill()
        strace.stderr.close()
        strace.wait(PATIENCE)


@pytest.mark.parametrize(
    "what", ["fdatasync:error=EIO", "pwrite64:error=ENOSPC", "pwrite64:error=EIO"]
)
def test_a_store_that_cannot_be_written(world: World, what: str) -> None:
    """No operation starts without its intent; other work goes on, and all of it returns."""
    need_strace()
    world.declare()
    daemon = world.site.started()
    world.wait_for(daemon)
    before = len(world.effects())
    store = world.site.state / "store"
    with failing(daemon, what, f"{store}/store.sqlite-wal", f"{store}/store.sqlite"):
        world.declare()
        daemon.wait_for("journal.unwritable", within=PATIENCE)
        # Reading goes on: a manifest with a mistake is found, and told.
        world.site.write(world.site.resources / "x/bad.yaml", "kind: Nothing\n")
        daemon.wait_for("manifest.invalid", within=PATIENCE)
        (world.site.resources / "x/bad.yaml").unlink()
        began = [each for each in world.effects()[before:] if each.what == "begin"]
        assert began == []
    daemon.wait_for("journal.writable", within=PATIENCE)
    world.wait_for(daemon)
    assert daemon.stop(within=PATIENCE).code == 0
    world.check()


@pytest.mark.parametrize(
    "what",
    [
        "fsync,fdatasync:error=EIO:when=1+3",
        "fsync,fdatasync:error=ENOSPC:when=2+3",
        "rename,renameat,renameat2:error=EIO",
        "renameat,renameat2:error=ENOSPC:when=1+2",
        "pwrite64,ftruncate:error=ENOSPC:when=2+5",
        "pwrite64,ftruncate:error=EIO:when=3+4",
    ],
)
def test_a_call_that_fails_now_and_then(world: World, what: str) -> None:
    """Whatever call fails, and at whatever time: afterwards everything becomes as desired."""
    need_strace()
    # An attempt that could not be made durable is no word of its own, and some are needed here.
    world.configure(max_recoveries=100)
    world.declare()
    daemon = world.site.started()
    world.wait_for(daemon)
    with failing(daemon, what):
        world.declare()
        daemon.wait_for("reconcile.failed", within=PATIENCE)
    world.wait_for(daemon)
    assert daemon.stop(within=PATIENCE).code == 0
    world.check()
