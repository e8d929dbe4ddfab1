"""Files beneath a root: compared, read, replaced and removed without ever being half there.

The work is done in threads of a limiter of its own, which are never abandoned: a call that was
cancelled returns only when its thread has ended, with nothing left behind. A device that hangs
holds it; no cancellation reaches into the kernel. Paths follow the policy of roots.py,
replacements the invariants of replacement.py.
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

READ_LIMIT = 16 * 1024 * 1024  # bytes; a file is held in memory as a whole
_MARKER = ".reconciled-"
_SUFFIX = re.compile(re.escape(_MARKER) + r"[a-z0-9]{8}\Z")
_MAX_NAME_LENGTH = 255
_LIMITER: trio.lowlevel.RunVar[trio.CapacityLimiter] = trio.lowlevel.RunVar("files limiter")
_MAX_MODE = 0o7777
_THREADS = 8  # so that a slow disk takes no thread from anything else

T = TypeVar("T")


@attrs.frozen
class Replaced:
    """What replace_file() did.

    changed      False: everything was as wanted, and nothing was written
    differences  what was not: missing, content, mode, owner, group
    lost         extended attributes of the old file that could not be kept
    """

    changed: bool
    differences: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Removed(enum.Enum):
    """What remove_file() found."""

    REMOVED = "removed"
    ABSENT = "absent"
    UNMANAGED = "foreign"  # other content than was given: left as it is


def digest_of(content: bytes) -> str:
    """The SHA-256 of *content*, as remove_file() compares it."""
    return hashlib.sha256(content).hexdigest()


def temporary_name(path: str) -> str:
    """A fresh name for the new file beside *path*: ``.NAME.reconciled-XXXXXXXX``.

    Made beforehand, so that it can be recorded before the file exists: what an interruption
    leaves is removed by its recorded name, never by a pattern.
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
    """Make *path* hold *content*, atomically and durably; do nothing where it does already.

    Mode, owner and group are kept where not given; a new file gets 0644 and the daemon's owner.
    *validate* is awaited with the path of the complete new file before it takes the name; if it
    raises, the old file stays. *temporary* is the new file's name, made by temporary_name().

    Raises FileRefused for what no repetition will cure: a path that leads out of *root*; a
    target that is a symlink, a directory, a special file or has hard links; an owner that does
    not exist or cannot be set. Raises OSError, path and remedy in its text, for the rest. Then,
    and on cancellation, the old file is untouched and the new one is removed.
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
    stack: contextlib.ExitStack, root: str, path: str, wanted: DesiredFile, name: str
) -> tuple[tuple[str, ...], Replacement | None]:
    """Compare, and prepare the replacement if one is needed; *stack* clears up after it."""
    place = stack.enter_context(resolve_beneath(root, path))
    found = compare(place, wanted).differences
    if not found:
        return found, None
    work = Replacement(place, wanted, name)
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
    """What replace_file() with these arguments would change. Only reads; raises as it does."""

    def look() -> Comparison:
        wanted = _desired_file(content, mode, owner, group)
        with resolve_beneath(os.fspath(root), path) as place:
            return compare(place, wanted)

    return await _in_thread(look)


async def read_file(
    path: str,
    *,
    root: str | os.PathLike[str] = "/",
    limit: int = READ_LIMIT,
    follow: bool = False,
) -> bytes:
    """The content of the regular file *path* beneath *root*, up to *limit* bytes.

    *follow*: the file itself may be a symlink that stays beneath the root. Raises FileRefused
    for one that leads out, for anything but a regular file and for a longer one; OSError for
    the rest.
    """

    def read() -> bytes:
        with resolve_beneath(os.fspath(root), path, follow=follow) as place:
            handle = open_regular(place)
            try:
                return read_all(handle, limit, place.path)
            finally:
                os.close(handle)

    return await _in_thread(read)


async def remove_file(
    path: str, digests: Collection[str], *, root: str | os.PathLike[str] = "/"
) -> Removed:
    """Remove *path*, durably, if the digest of its content is one of *digests*.

    Anything else that stands there is FOREIGN and stays. Between the look and the removal
    somebody may still write: the kernel has no conditional unlink.
    """

    def remove() -> Removed:
        with resolve_beneath(os.fspath(root), path) as place:
            return _remove(place, digests)

    try:
        return await _in_thread(remove)
    except FileNotFoundError:  # its directory is gone
        return Removed.ABSENT


def _remove(place: Location, digests: Collection[str]) -> Removed:
    try:
        handle = open_regular(place)
    except FileNotFoundError:
        return Removed.ABSENT
    except FileRefused:
        return Removed.UNMANAGED
    try:
        content = read_all(handle, READ_LIMIT, place.path)
    except FileRefused:
        return Removed.UNMANAGED
    finally:
        os.close(handle)
    if digest_of(content) not in digests:
        return Removed.UNMANAGED
    _unlink(place)
    return Removed.REMOVED


async def remove_temporary(
    path: str, temporary: str, *, root: str | os.PathLike[str] = "/"
) -> bool:
    """Remove what an interrupted replacement of *path* left under its recorded name.

    True if something was there. Raises ValueError for a name that temporary_name() never makes.
    """
    name = _checked_temporary(temporary)

    def remove() -> bool:
        with resolve_beneath(os.fspath(root), path) as place:
            left = attrs.evolve(place, name=name, path=place.beside(name))
            if left.status() is None:
                return False
            _unlink(left)
            return True

    return await _in_thread(remove)


async def make_directory(path: str | os.PathLike[str]) -> None:
    """Make *path*, and what lacks above it, durably. Raises OSError.

    Without this a file that is durable is lost with the directory it stands in.
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
    # Also where it was there: whoever made it may have been killed before this.
    above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(above)
    finally:
        os.close(above)


def _unlink(place: Location) -> None:
    with explain_errors(place, "remove it"):
        os.unlink(place.name, dir_fd=place.directory)
        os.fsync(place.directory)


def _checked_temporary(temporary: str) -> str:
    if "/" in temporary or not temporary.startswith(".") or not _SUFFIX.search(temporary):
        raise ValueError(f"{temporary!r} was not made by temporary_name()")
    return temporary


def _desired_file(
    content: bytes, mode: int | None, owner: str | int | None, group: str | int | None
) -> DesiredFile:
    if mode is not None and not 0 <= mode <= _MAX_MODE:
        raise FileRefused(f"mode {mode:o} is not one of a file: write 0000 to 7777, in octal")
    uid = _resolve_id(owner, "user", lambda name: pwd.getpwnam(name).pw_uid)
    gid = _resolve_id(group, "group", lambda name: grp.getgrnam(name).gr_gid)
    return DesiredFile(content, mode, uid, gid)


def _resolve_id(name: str | int | None, what: str, look_up: Callable[[str], int]) -> int | None:
    """The id of a user or group given by name or number; names are looked up first."""
    if name is None or isinstance(name, int):
        return name
    try:
        return look_up(name)
    except KeyError:
        if re.fullmatch(r"[0-9]{1,10}", name):
            return int(name)
        raise FileRefused(f"there is no {what} {name!r}: make it, or write another one") from None


async def _in_thread(function: Callable[[], T]) -> T:
    """Run *function* in a thread. A cancellation acts before it starts or after it ended."""
    try:
        limiter = _LIMITER.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_THREADS)
        _LIMITER.set(limiter)
    return await in_thread(function, limiter=limiter)
