"""Rules of reconciled.files: comparing, replacing, reading and removing files."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from reconciled.files import (
    FileRefused,
    Removed,
    compare_file,
    digest_of,
    read_file,
    remove_file,
    remove_temporary,
    replace_file,
    temporary_name,
)


def names_in(directory: Path) -> list[str]:
    """The names in *directory*, sorted."""
    return sorted(entry.name for entry in directory.iterdir())


def open_handles() -> int:
    """The number of open descriptors of this process."""
    return len(names_in(Path("/proc/self/fd")))


def text_of(file: Path) -> str:
    """The content of *file*."""
    return file.read_text()


def left_over(directory: Path) -> list[str]:
    """Names of temporary files that were left in *directory*."""
    return [name for name in names_in(directory) if ".reconciled-" in name]


async def test_new_file_gets_content_and_the_default_mode(tmp_path: Path) -> None:
    """A new file has the content and mode 0644, whatever the umask is."""
    old = os.umask(0o077)
    try:
        replaced = await replace_file(str(tmp_path / "motd"), "hé\n")
    finally:
        os.umask(old)
    assert replaced.changed
    assert replaced.differences == ("missing",)
    assert (tmp_path / "motd").read_text() == "hé\n"
    assert stat.S_IMODE((tmp_path / "motd").stat().st_mode) == 0o644
    assert left_over(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
async def test_mode_owner_and_attributes_are_kept(tmp_path: Path) -> None:
    """Invariant 16: a replacement keeps mode, owner, group and user attributes."""
    file = tmp_path / "motd"
    file.write_text("old")
    os.chown(file, 1234, 4321)
    file.chmod(0o6751)
    os.setxattr(file, "user.note", b"kept")
    before = file.stat()
    replaced = await replace_file(str(file), "new")
    after = file.stat()
    assert (after.st_uid, after.st_gid) == (1234, 4321)
    assert stat.S_IMODE(after.st_mode) == 0o6751
    assert os.getxattr(file, "user.note") == b"kept"
    assert replaced.lost == ()
    assert after.st_ino != before.st_ino


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
async def test_mode_and_owner_are_set_where_asked(tmp_path: Path) -> None:
    """A given mode, owner and group are set."""
    file = tmp_path / "motd"
    file.write_text("same")
    replaced = await replace_file(str(file), "same", mode=0o640, owner=1234, group="4321")
    assert set(replaced.differences) >= {"owner", "group"}
    status = file.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o640)


async def test_nothing_is_written_without_a_difference(tmp_path: Path) -> None:
    """A file that is as desired keeps its inode and times."""
    file = tmp_path / "motd"
    file.write_text("same")
    file.chmod(0o600)
    before = file.stat()
    replaced = await replace_file(str(file), "same", mode=0o600, owner=os.geteuid())
    assert not replaced.changed
    assert (file.stat().st_ino, file.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)


async def test_unknown_owner_is_refused(tmp_path: Path) -> None:
    """An unknown user is refused by name, and nothing is written."""
    with pytest.raises(FileRefused, match="user 'no-such-user' does not exist: create it"):
        await replace_file(str(tmp_path / "motd"), "x", owner="no-such-user")
    assert names_in(tmp_path) == []


async def test_owner_that_cannot_be_set_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel refuses the owner, the old file is kept and the error names the remedy."""

    def refuse(*_arguments: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    file = tmp_path / "motd"
    file.write_text("old")
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(FileRefused, match="CAP_CHOWN"):
        await replace_file(str(file), "new", owner=4242)
    assert file.read_text() == "old"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("kind", ["directory", "symlink", "dangling", "fifo", "hard link"])
async def test_irregular_files_are_refused(tmp_path: Path, kind: str) -> None:
    """A directory, symlink, FIFO or file with several hard links is refused and unchanged."""
    target, other = tmp_path / "target", tmp_path / "other"
    other.write_text("other")
    makers: dict[str, Callable[[], object]] = {
        "directory": target.mkdir,
        "symlink": lambda: target.symlink_to("other"),
        "dangling": lambda: target.symlink_to("nowhere"),
        "fifo": lambda: os.mkfifo(target),
        "hard link": lambda: os.link(other, target),
    }
    makers[kind]()
    before = target.lstat()
    word = {"dangling": "symlink", "fifo": "FIFO"}.get(kind, kind)
    with pytest.raises(FileRefused, match=word):
        await replace_file(str(target), "new")
    assert target.lstat() == before
    assert other.read_text() == "other"
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../outside", r"contains '\.\.'"),
        ("sub/../../outside", r"contains '\.\.'"),
        ("/etc/outside", "not beneath the root"),
        ("sub/", "names a directory"),
        ("", "is not a path"),
        ("a\0b", "is not a path"),
    ],
)
async def test_paths_that_lead_out_are_refused(tmp_path: Path, path: str, why: str) -> None:
    """A path that leads out of the root is refused, and the error states the broken rule."""
    (tmp_path / "sub").mkdir()
    with pytest.raises(FileRefused, match=why):
        await replace_file(path, "x", root=tmp_path)


async def test_root_is_not_a_name_prefix(tmp_path: Path) -> None:
    """A path is beneath the root by its components, not by a common name prefix."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "root-2").mkdir()
    await replace_file(str(root / "a"), "x", root=root)
    await replace_file("b", "x", root=root)
    assert names_in(root) == ["a", "b"]
    with pytest.raises(FileRefused, match="not beneath"):
        await replace_file(str(tmp_path / "root-2" / "a"), "x", root=root)


async def test_directory_symlinks_inside_are_followed_and_outside_refused(tmp_path: Path) -> None:
    """A directory symlink is followed, relative or absolute, only if it stays beneath the root."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "real").mkdir(parents=True)
    outside.mkdir()
    (root / "relative").symlink_to("real")
    (root / "absolute").symlink_to(root / "real")
    (root / "real" / "back").symlink_to(root / "real")
    (root / "up").symlink_to("../outside")
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    await replace_file("relative/a", "x", root=root)
    await replace_file("absolute/b", "x", root=root)
    await replace_file("real/back/c", "x", root=root)
    assert names_in(root / "real") == ["a", "b", "back", "c"]
    for name, why in (("up", "leads out"), ("out", "out of the root"), ("loop", "more than 40")):
        with pytest.raises(FileRefused, match=why):
            await replace_file(f"{name}/c", "x", root=root)
    assert names_in(outside) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a symlink of another user")
async def test_symlink_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """A symlink that belongs to neither root, the daemon nor the root's owner is refused."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", 1234, 1234, follow_symlinks=False)
    with pytest.raises(FileRefused, match="belongs to uid 1234"):
        await replace_file("link/a", "x", root=tmp_path)


async def test_missing_directory_is_named(tmp_path: Path) -> None:
    """The error names the missing directory, and its type allows a retry."""
    with pytest.raises(FileNotFoundError, match=f"directory {tmp_path}/no does not exist"):
        await replace_file("no/way/file", "x", root=tmp_path)


names = st.sampled_from(["a", "b", "c"])
targets = st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=4)
entries = st.lists(
    st.tuples(
        st.lists(names, min_size=1, max_size=3),
        st.sampled_from(["directory", "link", "inner", "outer"]),
        targets,
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(entries=entries, paths=st.lists(targets, min_size=1, max_size=6))
def test_no_write_ever_lands_outside(
    entries: list[tuple[list[str], str, list[str]]], paths: list[list[str]]
) -> None:
    """Whatever symlinks a tree has, only files beneath the root change."""
    with tempfile.TemporaryDirectory() as text:
        base = Path(text).resolve()
        root, outside = base / "root", base / "outside"
        (root).mkdir()
        for name in ("a", "b", "c"):
            (outside / name).mkdir(parents=True)
        for parts, kind, target in entries:
            make_entry(root, outside, parts, kind, target)
        before = listing(base, root)
        landed = 0
        for path in paths:
            landed += trio.run(attempt, root, "/".join(path))
        assert listing(base, root) == before
        found = [Path(d, f) for d, _, fs in os.walk(root) for f in fs if f == "file"]
        assert all(file.resolve().is_relative_to(root) for file in found)
        assert (landed > 0) == (len(found) > 0)


def make_entry(root: Path, outside: Path, parts: list[str], kind: str, target: list[str]) -> None:
    """Make one entry of the random tree, unless its path is taken."""
    path = root.joinpath(*parts)
    try:
        if not path.parent.resolve().is_relative_to(root) or path.is_symlink():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "directory":
            path.mkdir(exist_ok=True)
        elif kind == "link":
            path.symlink_to("/".join(target))
        else:
            path.symlink_to((root if kind == "inner" else outside).joinpath(*target))
    except (OSError, RuntimeError):
        return


def listing(base: Path, root: Path) -> list[str]:
    """All names below *base* that are not below *root*."""
    found = [f"{d}/{n}" for d, ds, fs in os.walk(base) for n in (*ds, *fs)]
    return sorted(name for name in found if not name.startswith(f"{root}/"))


async def attempt(root: Path, path: str) -> bool:
    """Write ``file`` in *path*; False if that is refused."""
    try:
        await replace_file(f"{path}/file", "x", root=root)
    except (FileRefused, OSError):
        return False
    return True


async def test_validation_sees_the_complete_file_before_the_rename(tmp_path: Path) -> None:
    """The validator gets the complete new file in the same directory before the rename."""
    file = tmp_path / "motd"
    file.write_text("old")
    seen = []

    async def validate(staged: str) -> None:
        await trio.lowlevel.checkpoint()
        new = Path(staged)
        seen.append((new.parent, text_of(new), text_of(file)))

    await replace_file(str(file), "new", validate=validate)
    assert seen == [(tmp_path, "new", "old")]
    assert file.read_text() == "new"


async def test_failed_validation_leaves_the_old_file(tmp_path: Path) -> None:
    """The validator's exception is raised, and only the old file exists."""
    file = tmp_path / "motd"
    file.write_text("old")

    async def validate(_staged: str) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("not valid")

    with pytest.raises(ValueError, match="not valid"):
        await replace_file(str(file), "new", validate=validate)
    assert file.read_text() == "old"
    assert left_over(tmp_path) == []


async def test_cancellation_leaves_the_old_file(tmp_path: Path) -> None:
    """A cancellation during validation leaves the old file alone."""
    file = tmp_path / "motd"
    file.write_text("old")
    with trio.CancelScope() as scope:

        async def validate(_staged: str) -> None:
            scope.cancel(reason="test")
            await trio.sleep_forever()

        await replace_file(str(file), "new", validate=validate)
    assert scope.cancelled_caught
    assert file.read_text() == "old"
    assert left_over(tmp_path) == []


async def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    """Neither success nor refusal leaks a descriptor."""
    (tmp_path / "directory").mkdir()
    await replace_file("warm", "x", root=tmp_path)
    before = open_handles()
    for number in range(5):
        await replace_file("warm", f"{number}", root=tmp_path)
        for path in ("directory", "no/file", "warm/file"):
            with pytest.raises((FileRefused, OSError)):
                await replace_file(path, "x", root=tmp_path)
    assert open_handles() == before


@pytest.mark.parametrize("call", ["write", "fchmod", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_error_of_the_device_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Whichever call fails before the rename, the old file is complete and the new one removed."""

    def fail(*_arguments: object, **_named: object) -> None:
        raise OSError(number, os.strerror(number))

    file = tmp_path / "motd"
    file.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="old file is untouched") as caught:
            await replace_file(str(file), "new")
    assert caught.value.errno == number
    assert caught.value.filename == str(file)
    assert file.read_text() == "old"
    assert left_over(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.processes
async def test_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    """On a full file system the old file is kept, the new one removed, and its space freed."""
    file = small_disk / "motd"
    file.write_text("old")
    before = os.statvfs(small_disk).f_bfree
    with pytest.raises(OSError, match="no space left") as caught:
        await replace_file(str(file), b"x" * 1_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert names_in(small_disk) == ["motd"]
    assert file.read_text() == "old"
    assert os.statvfs(small_disk).f_bfree == before


async def test_temporary_names_are_recognisable_and_fit(tmp_path: Path) -> None:
    """A temporary name contains its target and marker, is unique and never too long."""
    first, second = temporary_name("/etc/motd"), temporary_name("/etc/motd")
    assert first.startswith(".motd.reconciled-")
    assert first != second
    long = tmp_path / ("é" * 127)
    await replace_file(str(long), "x")
    assert len(os.fsencode(temporary_name(str(long)))) <= 255


async def test_recorded_temporary_is_removed_by_its_name_alone(tmp_path: Path) -> None:
    """Only the recorded name is removed, and other forms of names are refused."""
    name, other = temporary_name("motd"), temporary_name("motd")
    for each in (name, other, "motd"):
        (tmp_path / each).write_text("x")
    assert await remove_temporary("motd", name, root=tmp_path)
    assert not await remove_temporary("motd", name, root=tmp_path)
    assert names_in(tmp_path) == sorted([other, "motd"])
    for bad in ("motd", "../.motd.reconciled-aaaaaaaa", "motd.reconciled-aaaaaaaa"):
        with pytest.raises(ValueError, match="temporary_name"):
            await remove_temporary("motd", bad, root=tmp_path)


async def test_temporary_of_an_earlier_attempt_is_replaced(tmp_path: Path) -> None:
    """A recorded name can be used again after the attempt that made it was killed."""
    name = temporary_name("motd")
    (tmp_path / name).write_text("half")
    await replace_file("motd", "new", root=tmp_path, temporary=name)
    assert (tmp_path / "motd").read_text() == "new"
    assert names_in(tmp_path) == ["motd"]


async def test_reading_follows_links_beneath_only(tmp_path: Path) -> None:
    """A read may follow a final symlink, as in a mounted ConfigMap, beneath the root only."""
    root = tmp_path / "root"
    (root / "..data").mkdir(parents=True)
    (root / "..data" / "file").write_text("data")
    (root / "file").symlink_to("..data/file")
    (tmp_path / "secret").write_text("secret")
    (root / "out").symlink_to("../secret")
    (root / "dots").symlink_to("..data/..")
    assert await read_file("file", root=root, follow=True) == b"data"
    with pytest.raises(FileRefused, match="symlink"):
        await read_file("file", root=root)
    with pytest.raises(FileRefused, match="leads out"):
        await read_file("out", root=root, follow=True)
    with pytest.raises(IsADirectoryError):
        await read_file("dots", root=root, follow=True)


async def test_reading_is_bounded(tmp_path: Path) -> None:
    """A file above the limit is refused, and no more than the limit is read."""
    (tmp_path / "file").write_bytes(b"12345")
    assert await read_file("file", root=tmp_path, limit=5) == b"12345"
    with pytest.raises(FileRefused, match="larger than the limit of 4 bytes"):
        await read_file("file", root=tmp_path, limit=4)


async def test_comparison_names_the_differences(tmp_path: Path) -> None:
    """Each difference is named, and a file of another size is not read."""
    file = tmp_path / "file"
    file.write_text("one")
    file.chmod(0o600)
    assert (await compare_file(str(file), b"one", mode=0o600)).differences == ()
    assert (await compare_file(str(file), b"two", mode=0o644)).differences == ("content", "mode")
    assert (await compare_file(str(file), b"one", owner=54321)).differences == ("owner",)
    assert (await compare_file(str(file) + "2", b"")).differences == ("missing",)


async def test_removal_is_limited_to_known_content(tmp_path: Path) -> None:
    """Content with another digest, and an irregular file, are kept."""
    file = tmp_path / "file"
    file.write_text("theirs")
    assert await remove_file(str(file), [digest_of(b"ours")]) is Removed.UNMANAGED
    assert file.read_text() == "theirs"
    assert await remove_file(str(file), [digest_of(b"ours"), digest_of(b"theirs")]) is (
        Removed.REMOVED
    )
    assert await remove_file(str(file), []) is Removed.ABSENT
    assert await remove_file(str(tmp_path / "no" / "file"), []) is Removed.ABSENT
    file.symlink_to("elsewhere")
    assert await remove_file(str(file), []) is Removed.UNMANAGED


CHILD = """
import sys, trio
from reconciled.files import replace_file
async def main():
    await replace_file(sys.argv[1], "new" * 1000, mode=0o640)
trio.run(main)
"""


def killed_at(call: str, when: int, file: Path) -> bool:
    """Run a replacement killed at the *when*-th *call*; False if that call never came."""
    ended = subprocess.run(
        ["strace", "-f", "-qq", "-o", str(file.parent.parent / "trace"),
         "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={when}",
         sys.executable, "-c", CHILD, str(file)],
        check=False, capture_output=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if ended.returncode not in (0, -9, 137):
        pytest.skip(f"strace cannot inject here: {ended.stderr.decode()[-200:]}")
    return ended.returncode != 0


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("call", "when"),
    [("rename,renameat,renameat2", 1), ("fsync", 1), ("fsync", 2), ("fchmod", 1)],
)
def test_kill_leaves_the_old_or_the_new_file(tmp_path: Path, call: str, when: int) -> None:
    """After a kill at any rename or sync the name refers to a complete file (invariant 16).

    A remaining temporary file has a recognisable name.
    """
    directory = tmp_path / "etc"
    directory.mkdir()
    file = directory / "motd"
    file.write_text("old")
    assert killed_at(call, when, file)
    # The kill takes effect when the call returns: the rename may have happened or not.
    assert file.read_text() in ("old", "new" * 1000)
    if call == "fsync":
        assert file.read_text() == ("old" if when == 1 else "new" * 1000)
    others = [name for name in names_in(directory) if name != "motd"]
    assert all(name.startswith(".motd.reconciled-") for name in others)
    assert len(others) <= 1
