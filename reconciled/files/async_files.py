"""Async calls that compare, read, atomically replace and remove files beneath a root.

1. The work runs in threads of a separate limiter, which are never abandoned: a cancelled call
   returns after its thread has ended and cleaned up. A device that hangs blocks the call, since
   no cancellation ends a system call.
2. Paths follow the policy of path_resolution.py, replacements the invariants of replacement.py.
"""

from __future__ import annotations

import contextlib
import enum
import grp
import hashlib
import os
import pwd
import re
import secrets
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from reconciled.files.path_resolution import FileRefused, Location, resolve_beneath
from reconciled.files.replacement import (
    Comparison,
    DesiredFile,
    Replacement,
    compare,
    explain_errors,
    open_regular,
    read_all,
)
from reconciled.threads import in_thread

__all__ = [
    "Comparison",
    "FileRefused",
    "Removed",
    "Replaced",
    "compare_file",
    "digest_of",
    "make_directory",
    "read_file",
    "remove_file",
    "remove_temporary",
    "replace_file",
    "temporary_name",
]

READ_LIMIT = 16 * 1024 * 1024  # bytes; a whole file is held in memory
_MARKER = ".reconciled-"
_SUFFIX = re.compile(re.escape(_MARKER) + r"[a-z0-9]{8}\Z")
_MAX_NAME_LENGTH = 255
_LIMITER: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("files limiter")
_MAX_MODE = 0o7777
_THREADS = 8  # a separate limit: a slow disk takes no threads from other work

T = TypeVar("T")


@attrs.frozen
class Replaced:
    """What replace_file() did.

    changed      False: the file was as desired, and nothing was written
    differences  what differed: missing, content, mode, owner, group
    lost         extended attributes of the old file that could not be kept
    """

    changed: bool
    differences: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Removed(enum.Enum):
    """What remove_file() found."""

    REMOVED = "removed"
    ABSENT = "absent"
    UNMANAGED = "unmanaged"  # its content has another digest: it is kept


def digest_of(content: bytes) -> str:
    """The SHA-256 of *content* in hexadecimal, as remove_file() compares it."""
    return hashlib.sha256(content).hexdigest()


def temporary_name(path: str) -> str:
    """A fresh name for the new file in the directory of *path*: ``.NAME.reconciled-XXXXXXXX``.

    The caller records it before the file exists, so that a file which an interruption left is
    removed by its recorded name, never by a pattern.
    """
    alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
    suffix = _MARKER + "".join(secrets.choice(alphabet) for _ in range(8))
    name = os.fsencode(path.rpartition("/")[2])[: _MAX_NAME_LENGTH - len(suffix) - 1]
    return "." + name.decode("utf-8", "ignore") + suffix


async def replace_file(  # noqa: PLR0913 - each is one property of the file
    path: str,
    content: str | bytes,
    *,
    mode: int | None = None,
    owner: str | int | None = None,
    group: str | int | None = None,
    root: str | os.PathLike[str] = "/",
    validate: Callable[[str], Awaitable[object]] | None = None,
    temporary: str | None = None,
) -> Replaced:
    """Give *path* the *content*, atomically and durably; does nothing if it has it already.

    A mode, owner or group of None is kept; a new file gets 0644 and the daemon's owner.
    *validate* is awaited with the path of the complete new file before the rename; if it raises,
    the old file is kept. *temporary* is the new file's name, made by temporary_name().

    Raises FileRefused for errors that a retry cannot fix: a path that leads out of *root*; a
    target that is a symlink, a directory, a special file or has several hard links; an owner that
    does not exist or cannot be set. Raises OSError with path and remedy for all others. After an
    error or a cancellation the old file is unchanged and the new one is removed.
    """
    data = content.encode() if isinstance(content, str) else content
    name = temporary_name(path) if temporary is None else _checked_temporary(temporary)
    with contextlib.ExitStack() as stack:
        found, work = await _in_thread(
            lambda: _prepare(
                stack, os.fspath(root), path, _desired_file(data, mode, owner, group), name
            )
        )
        if work is None:
            return Replaced(changed=False)
        if validate is not None:
            await validate(work.staged)
        await _in_thread(work.commit)
        return Replaced(changed=True, differences=found, lost=work.lost)


def _prepare(
    stack: contextlib.ExitStack, root: str, path: str, desired: DesiredFile, name: str
) -> tuple[tuple[str, ...], Replacement | None]:
    """Compare, and prepare the replacement if one is needed; *stack* gets its cleanup."""
    location = stack.enter_context(resolve_beneath(root, path))
    found = compare(location, desired).differences
    if not found:
        return found, None
    work = Replacement(location, desired, name)
    stack.callback(work.discard)
    work.prepare()
    return found, work


async def compare_file(  # noqa: PLR0913 - as replace_file
    path: str,
    content: bytes,
    *,
    mode: int | None = None,
    owner: str | int | None = None,
    group: str | int | None = None,
    root: str | os.PathLike[str] = "/",
) -> Comparison:
    """What replace_file() with these arguments would change. Only reads; raises the same."""

    def compare_in_thread() -> Comparison:
        desired = _desired_file(content, mode, owner, group)
        with resolve_beneath(os.fspath(root), path) as location:
            return compare(location, desired)

    return await _in_thread(compare_in_thread)


async def read_file(
    path: str,
    *,
    root: str | os.PathLike[str] = "/",
    limit: int = READ_LIMIT,
    follow: bool = False,
) -> bytes:
    """The content of the regular file *path* beneath *root*, up to *limit* bytes.

    *follow*: the file itself may be a symlink that leads to a file beneath the root. Raises
    FileRefused for a symlink that leads out, a file that is not regular and a larger one; OSError
    for all other errors.
    """

    def read() -> bytes:
        with resolve_beneath(os.fspath(root), path, follow=follow) as location:
            handle = open_regular(location)
            try:
                return read_all(handle, limit, location.path)
            finally:
                os.close(handle)

    return await _in_thread(read)


async def remove_file(
    path: str, digests: Collection[str], *, root: str | os.PathLike[str] = "/"
) -> Removed:
    """Remove *path*, durably, if the digest of its content is one of *digests*.

    Anything else is UNMANAGED and kept. Another process may write to the file between the
    comparison and the removal: the kernel has no conditional unlink.
    """

    def remove() -> Removed:
        with resolve_beneath(os.fspath(root), path) as location:
            return _remove(location, digests)

    try:
        return await _in_thread(remove)
    except FileNotFoundError:  # its directory does not exist
        return Removed.ABSENT


def _remove(location: Location, digests: Collection[str]) -> Removed:
    try:
        handle = open_regular(location)
    except FileNotFoundError:
        return Removed.ABSENT
    except FileRefused:
        return Removed.UNMANAGED
    try:
        content = read_all(handle, READ_LIMIT, location.path)
    except FileRefused:
        return Removed.UNMANAGED
    finally:
        os.close(handle)
    if digest_of(content) not in digests:
        return Removed.UNMANAGED
    _unlink(location)
    return Removed.REMOVED


async def remove_temporary(
    path: str, temporary: str, *, root: str | os.PathLike[str] = "/"
) -> bool:
    """Remove the new file that an interrupted replacement of *path* left, by its recorded name.

    True if it existed. Raises ValueError for a name that temporary_name() never makes.
    """
    name = _checked_temporary(temporary)

    def remove() -> bool:
        with resolve_beneath(os.fspath(root), path) as location:
            left = attrs.evolve(location, name=name, path=location.beside(name))
            if left.status() is None:
                return False
            _unlink(left)
            return True

    return await _in_thread(remove)


async def make_directory(path: str | os.PathLike[str]) -> None:
    """Make *path* and its missing parents, durably. Raises OSError.

    A durable file is lost in a power cut if its directory is not durable.
    """
    await _in_thread(lambda: _make_directory(Path(path)))


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        _make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not path.is_dir():
            raise
    # Also if it existed: its maker may have been killed before the sync.
    above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def _unlink(location: Location) -> None:
    with explain_errors(location, "remove it"):
        os.unlink(location.name, dir_fd=location.directory)
        os.fsync(location.directory)


def _checked_temporary(temporary: str) -> str:
    if "/" in temporary or not temporary.startswith(".") or not _SUFFIX.search(temporary):
        raise ValueError(f"{temporary!r} is not a name that temporary_name() makes")
    return temporary


def _desired_file(
    content: bytes, mode: int | None, owner: str | int | None, group: str | int | None
) -> DesiredFile:
    if mode is not None and not 0 <= mode <= _MAX_MODE:
        raise FileRefused(f"mode {mode:o} is out of range: write 0000 to 7777, in octal")
    uid = _resolve_id(owner, "user", lambda name: pwd.getpwnam(name).pw_uid)
    gid = _resolve_id(group, "group", lambda name: grp.getgrnam(name).gr_gid)
    return DesiredFile(content, mode, uid, gid)


def _resolve_id(name: str | int | None, what: str, look_up: Callable[[str], int]) -> int | None:
    """The id of a user or group given by name or number; a name takes precedence."""
    if name is None or isinstance(name, int):
        return name
    try:
        return look_up(name)
    except KeyError:
        if re.fullmatch(r"[0-9]{1,10}", name):
            return int(name)
        raise FileRefused(f"{what} {name!r} does not exist: create it, or name another") from None


async def _in_thread(function: Callable[[], T]) -> T:
    """Run *function* in a thread. A cancellation acts before it starts or after it has ended."""
    try:
        limiter = _LIMITER.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_THREADS)
        _LIMITER.set(limiter)
    return await in_thread(function, limiter=limiter)
