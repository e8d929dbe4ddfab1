"""The state directory and its lock."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from reconciled.core.errors import StateLocked, StateRefused
from reconciled.journal import state_lock
from reconciled.journal.state_lock import StateLock

HOLDER = """
import sys
from pathlib import Path
from reconciled.journal.state_lock import StateLock
lock = StateLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    """A missing state directory is made with mode 0700, its lock with 0600, at any umask."""
    old = os.umask(0)
    try:
        held = StateLock.acquire(tmp_path / "deep" / "state")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "deep" / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep" / "state" / "lock").stat().st_mode) == 0o600
    assert (tmp_path / "deep" / "state" / "lock").read_text() == f"{os.getpid()}\n"
    assert not os.get_inheritable(held._handle)
    held.release()


@pytest.mark.processes
def test_another_holder_is_waited_for_and_reported(tmp_path: Path) -> None:
    """While another process holds the lock, it is refused after the wait, with that pid."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    times = iter([0.0, 1.0, 4.9, 5.0])
    naps: list[float] = []
    tmp_path.chmod(0o700)
    with pytest.raises(StateLocked, match=f"locked by process {child.pid}") as caught:
        StateLock.acquire(tmp_path, clock=lambda: next(times), sleep=naps.append)
    assert caught.value.pid == child.pid
    assert len(naps) == 2
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    StateLock.acquire(tmp_path, wait=0.0).release()


def test_a_holder_that_ends_in_time_is_succeeded(tmp_path: Path) -> None:
    """A restart that overlaps with the end of its predecessor gets the lock."""
    state = tmp_path / "state"
    first = StateLock.acquire(state)
    second = StateLock.acquire(state, sleep=lambda _seconds: first.release())
    second.release()


@pytest.mark.processes
def test_no_program_inherits_the_lock(tmp_path: Path) -> None:
    """A child that outlives the holder does not keep the lock, even where handles are passed on."""
    held = StateLock.acquire(tmp_path / "state")
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    held.release()
    StateLock.acquire(tmp_path / "state", wait=0.0).release()
    child.kill()
    child.wait()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """A state directory that other users can write is refused, with the command to fix it."""
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(mode)
    with pytest.raises(StateRefused, match=f"chmod 0700 {state}"):
        StateLock.acquire(state)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give directories away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """The state directory has to be owned by the user of the daemon."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 1234, 1234)
    with pytest.raises(StateRefused, match="is owned by uid 1234"):
        StateLock.acquire(state)


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    """A state directory that is a file, or is below one, is refused with the reason."""
    (tmp_path / "state").write_text("")
    with pytest.raises(StateRefused, match="is not a directory"):
        StateLock.acquire(tmp_path / "state")
    with pytest.raises(StateRefused, match="cannot create"):
        StateLock.acquire(tmp_path / "state" / "below")


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs", "fuse", "ceph"])
def test_unreliable_file_systems_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A network, 9p or FUSE file system is refused by name, and no lock file is made."""
    monkeypatch.setattr(state_lock, "file_system", lambda _handle: kind)
    with pytest.raises(StateRefused, match=f"is on {kind}"):
        StateLock.acquire(tmp_path / "state")
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        ("tmpfs", "lost at a reboot"),
        (None, "cannot be determined"),
        ("ext4", None),
        ("fuse.fuse-overlayfs", None),
    ],
)
def test_volatile_and_unknown_file_systems_cause_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, warning: str | None
) -> None:
    """A tmpfs gets one warning that its content is lost at a reboot; a local disk gets none."""
    monkeypatch.setattr(state_lock, "file_system", lambda _handle: kind)
    held = StateLock.acquire(tmp_path / "state")
    if warning is None:
        assert held.warnings == ()
    else:
        assert len(held.warnings) == 1
        assert warning in held.warnings[0]
    held.release()


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_mounted_file_system_is_recognised(tmp_path: Path) -> None:
    """The type is that of the topmost mount, not that of the directory below it."""
    mount = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        held = StateLock.acquire(tmp_path / "state")
        assert "on tmpfs" in held.warnings[0]
        held.release()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
