"""Resolving a path beneath a root to an open directory and a name, never outside the root.

1. Each component is opened separately, from the handle of its parent, without following symlinks.
   This module expands symlinks itself. A concurrent rename can change *which* location beneath
   the root is reached, but never lead outside it.
2. ``..`` in a path is refused. In a symlink it returns along the handles already held, and never
   above the root.
3. A symlink in the directory part is followed if its target is beneath the root and it belongs to
   root, to the daemon's user, or to the owner of the root: any other user could redirect a
   privileged write.
4. The last component is never followed for a write. For a read it may be followed under the same
   rules (mounted ConfigMaps consist of such links).

Rejected: openat2(RESOLVE_BENEATH), which does most of this in the kernel. It has no rule 3,
refuses every absolute symlink even below ``/`` (``/var/run``), has no wrapper in Python, and
common seccomp profiles block it, so this walk would be needed as a fallback anyway.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

import attrs

from reconciled.core.errors import Terminal

MAX_SYMLINKS = 40  # as the kernel's own limit
_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileRefused(Terminal):
    """Policy or privileges rule out a path, a file or an owner. str() states what to change."""


@attrs.frozen
class Location:
    """A name in an open directory. Valid only inside ``with resolve_beneath(…)``.

    directory  a readable handle, so that it can be synced
    path       as declared, made absolute: for messages and programs, never for opening
    """

    directory: int
    name: str
    path: str

    def status(self) -> os.stat_result | None:
        """The status of the file, of a symlink itself; None if it does not exist."""
        try:
            return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def beside(self, name: str) -> str:
        """The path of *name* in the same directory, for messages and programs."""
        return os.path.join(os.path.dirname(self.path), name)  # noqa: PTH118, PTH120 - text, not a file


def parts_beneath(root: str, path: str) -> list[str]:
    """The components of *path* below *root*, or FileRefused.

    An absolute path has to be beneath the root as written or as resolved; a relative one starts at
    the root.
    """
    if not path or "\0" in path:
        raise FileRefused(f"{path!r} is not a path: write one like /etc/motd")
    pieces = path.split("/")
    if ".." in pieces:
        raise FileRefused(f"{path} contains '..': write the path without it")
    if pieces[-1] in ("", "."):
        raise FileRefused(f"{path} names a directory: write the path of a file")
    parts = [piece for piece in pieces if piece not in ("", ".")]
    if not path.startswith("/"):
        return parts
    for base in (os.path.abspath(root), os.path.realpath(root)):  # noqa: PTH100 - Path keeps '..'
        above = [piece for piece in base.split("/") if piece]
        if parts[: len(above)] == above and len(parts) > len(above):
            return parts[len(above) :]
    raise FileRefused(
        f"{path} is not beneath the root {root}: write a path below it, or set options.root"
    )


@contextlib.contextmanager
def resolve_beneath(root: str, path: str, *, follow: bool = False) -> Iterator[Location]:
    """The location of *path*, with its directory held open.

    *follow*: a symlink as last component is followed, too. Blocks; call it in a thread. Raises
    FileRefused by policy, OSError if a directory is missing or cannot be opened.
    """
    parts = parts_beneath(root, path)
    shown = path if path.startswith("/") else "/".join((root.rstrip("/"), *parts))
    with contextlib.ExitStack() as stack:
        walk = _PathWalk(root=root, shown=shown, remaining=parts[::-1])
        stack.callback(walk.close)
        walk.run(follow=follow)
        directory = walk.readable()
        stack.callback(os.close, directory)
        yield Location(directory, walk.remaining[0], shown)


@attrs.define(eq=False)
class _PathWalk:
    """handles[0] is the root and the last one the current directory: ``..`` is a pop."""

    root: str
    shown: str
    remaining: list[str]  # components not walked yet, the next one last
    handles: list[int] = attrs.field(factory=list)
    names: list[str] = attrs.field(factory=list)
    links: int = 0

    def run(self, *, follow: bool) -> None:
        """Walk until only the last component remains."""
        self.handles.append(os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        while True:
            while len(self.remaining) > 1:
                self._enter(self.remaining.pop())
            if self.remaining and self.remaining[0] == "..":
                self._enter(self.remaining.pop())
            if not self.remaining:
                raise IsADirectoryError(
                    errno.EISDIR, "leads to a directory, not to a file", self.shown
                )
            if not (follow and self._follow_last()):
                return

    def readable(self) -> int:
        """The current directory, opened for reading and syncing."""
        with self._explain_errors():
            return os.open(".", _DIRECTORY, dir_fd=self.handles[-1])

    def close(self) -> None:
        """Close every handle of the walk."""
        while self.handles:
            os.close(self.handles.pop())

    def _enter(self, name: str) -> None:
        if name == "..":
            self._ascend()
            return
        with self._explain_errors(name):
            handle = os.open(name, _STEP, dir_fd=self.handles[-1])
        self.handles.append(handle)
        self.names.append(name)
        kind = os.fstat(handle)
        if stat.S_ISLNK(kind.st_mode):
            self._expand(kind)
        elif not stat.S_ISDIR(kind.st_mode):
            raise NotADirectoryError(
                errno.ENOTDIR, f"{self._current_path()} is not a directory", self.shown
            )

    def _follow_last(self) -> bool:
        """Replace the last component by its target; False if it is not a symlink."""
        try:
            handle = os.open(self.remaining[0], _STEP, dir_fd=self.handles[-1])
        except FileNotFoundError:
            return False  # the caller's open reports it
        kind = os.fstat(handle)
        if not stat.S_ISLNK(kind.st_mode):
            os.close(handle)
            return False
        self.names.append(self.remaining.pop())
        self.handles.append(handle)
        self._expand(kind)
        return True

    def _ascend(self) -> None:
        if len(self.handles) == 1:
            raise FileRefused(f"{self.shown}: a symlink in it leads out of the root {self.root}")
        os.close(self.handles.pop())
        self.names.pop()

    def _expand(self, link: os.stat_result) -> None:
        """Put the target of the link just entered before the remaining components."""
        here = self._current_path()
        self.links += 1
        if self.links > MAX_SYMLINKS:
            raise FileRefused(f"{self.shown}: more than {MAX_SYMLINKS} symlinks at {here}")
        if link.st_uid not in (0, os.geteuid(), os.fstat(self.handles[0]).st_uid):
            raise FileRefused(
                f"{self.shown}: the symlink {here} belongs to uid {link.st_uid}, who could "
                "redirect it: write the path without the link, or make root the link's owner"
            )
        target = os.readlink("", dir_fd=self.handles[-1])
        self._ascend()
        if target.startswith("/"):
            target = self._below_root(target, here)
        self.remaining.extend(piece for piece in target.split("/")[::-1] if piece not in ("", "."))

    def _below_root(self, target: str, here: str) -> str:
        """An absolute *target* relative to the root, to which the walk returns."""
        above = [piece for piece in os.path.realpath(self.root).split("/") if piece]
        parts = [piece for piece in target.split("/") if piece not in ("", ".")]
        if parts[: len(above)] != above:
            raise FileRefused(
                f"{self.shown}: the symlink {here} leads to {target}, out of the root {self.root}"
            )
        while len(self.handles) > 1:
            self._ascend()
        return "/".join(parts[len(above) :])

    def _current_path(self) -> str:
        return "/".join((self.root.rstrip("/"), *self.names))

    @contextlib.contextmanager
    def _explain_errors(self, name: str | None = None) -> Iterator[None]:
        """Name the directory in errors, not only the component that was opened."""
        try:
            yield
        except FileNotFoundError as exc:
            raise FileNotFoundError(
                exc.errno,
                f"directory {self._current_path()}/{name} does not exist: create it",
                self.shown,
            ) from exc
        except PermissionError as exc:
            raise PermissionError(
                exc.errno,
                f"cannot open {self._current_path()}/{name or ''}: permission denied",
                self.shown,
            ) from exc
