"""Comparing and atomically replacing one file: the new file is durable before the rename.

1. At each instant the name refers to the complete old file or the complete new one (invariant 16).
2. The new file is written in the same directory, under a name chosen beforehand, and only the
   daemon can read it until it has its owner and mode.
3. If a step before the rename fails, the old file is unchanged and the new one is removed.
4. Properties that the caller does not set are copied from the old file: mode, owner, group, ACL,
   the SELinux label and ``user.*`` attributes. File capabilities and integrity signatures are not
   copied: they certify the old content.

All functions block; async_files.py runs them in threads. Rejected: O_TMPFILE, because linkat()
cannot replace an existing name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

import attrs

from reconciled.files.path_resolution import FileRefused, Location

NEW_MODE = 0o644  # of a new file: the umask is not used, since it differs between units
ACL = "system.posix_acl_access"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symlink",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_REMEDIES = {
    errno.ENOSPC: "no space left: make room; the old file is untouched",
    errno.EDQUOT: "the quota is used up; the old file is untouched",
    errno.EIO: "the device failed: see the kernel's log; the old file is untouched",
    errno.EROFS: "the file system is read-only: see ReadWritePaths= of the unit",
    errno.EACCES: "permission denied: see User= and ReadWritePaths= of the unit",
    errno.EPERM: "not permitted: see lsattr and the capabilities of the unit",
}


@attrs.frozen
class DesiredFile:
    """The desired file; None keeps the present mode, owner or group."""

    content: bytes
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None


@attrs.frozen
class Comparison:
    """How a file differs from the desired one, and its present mode.

    differences  a subset of missing, content, mode, owner, group; empty: as desired
    mode         None if the file is missing
    """

    differences: tuple[str, ...]
    mode: int | None


def open_regular(location: Location) -> int:
    """A descriptor to read the regular file at *location*. Raises FileRefused, OSError."""
    try:
        handle = os.open(location.name, _READ, dir_fd=location.directory)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a symlink; a socket
            refuse_irregular(location, location.status())
        raise type(exc)(exc.errno, exc.strerror, location.path) from exc
    try:
        refuse_irregular(location, os.fstat(handle))
    except FileRefused:
        os.close(handle)
        raise
    return handle


def refuse_irregular(location: Location, status: os.stat_result | None) -> None:
    """Raise FileRefused unless *status* is that of a regular file, or None."""
    if status is None or stat.S_ISREG(status.st_mode):
        return
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
    remedy = "write the path of its target" if kind == "a symlink" else "write another path"
    raise FileRefused(
        f"{location.path} is {kind}, and only regular files are replaced: {remedy}, or remove it"
    )


def read_all(handle: int, limit: int, path: str) -> bytes:
    """The content of *handle*; raises FileRefused if it is larger than *limit* bytes."""
    pieces, size = [], 0
    while piece := os.read(handle, min(1 << 20, limit + 1 - size)):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise FileRefused(f"{path} is larger than the limit of {limit} bytes")
    return b"".join(pieces)


def compare(location: Location, desired: DesiredFile) -> Comparison:
    """Compare the file at *location*; its content is read only if the size is equal."""
    status = location.status()
    if status is None:
        return Comparison(("missing",), None)
    refuse_irregular(location, status)
    found = []
    if status.st_size != len(desired.content) or not _has_content(location, desired.content):
        found.append("content")
    if desired.mode is not None and stat.S_IMODE(status.st_mode) != desired.mode:
        found.append("mode")
    if desired.uid is not None and status.st_uid != desired.uid:
        found.append("owner")
    if desired.gid is not None and status.st_gid != desired.gid:
        found.append("group")
    return Comparison(tuple(found), stat.S_IMODE(status.st_mode))


def _has_content(location: Location, content: bytes) -> bool:
    handle = open_regular(location)
    try:
        return read_all(handle, len(content) + 1, location.path) == content
    except FileRefused:  # it grew meanwhile
        return False
    finally:
        os.close(handle)


@contextlib.contextmanager
def explain_errors(location: Location, action: str) -> Iterator[None]:
    """Add the declared path and a remedy to an OSError; type and errno are kept."""
    try:
        yield
    except OSError as exc:
        remedy = _REMEDIES.get(exc.errno or 0, exc.strerror)
        raise type(exc)(exc.errno, f"cannot {action}: {remedy}", location.path) from exc


@attrs.define(eq=False)
class Replacement:
    """One replacement: prepare(), optionally validate ``staged``, commit(), always discard()."""

    location: Location
    desired: DesiredFile
    temporary: str
    lost: tuple[str, ...] = ()  # attributes of the old file that could not be kept
    _created: bool = False

    @property
    def staged(self) -> str:
        """The path of the new file between prepare() and commit()."""
        return self.location.beside(self.temporary)

    def prepare(self) -> None:
        """Write the new file with its owner, mode and attributes, and sync it."""
        old = self.location.status()
        refuse_irregular(self.location, old)
        if old is not None and old.st_nlink > 1:
            raise FileRefused(
                f"{self.location.path} has {old.st_nlink} hard links, and a replacement would"
                " change one of them only: replace it by a copy with one link first"
            )
        with explain_errors(self.location, "write the new file"):
            handle = self._create()
            try:
                view = memoryview(self.desired.content)
                while view:
                    view = view[os.write(handle, view) :]
                self._set_owner(handle, old)
                if old is not None:
                    self._keep_attributes(handle)
                # After fchown, which clears set-id bits, and after the ACL, whose mask is the
                # mode's group part.
                os.fchmod(handle, self._mode(old))
                os.fsync(handle)
            finally:
                os.close(handle)

    def commit(self) -> None:
        """Give the new file its name, durably.

        If the sync of the directory fails, the new content is in place, but a power cut may
        revert it; the error states that.
        """
        directory = self.location.directory
        with explain_errors(self.location, "rename the new file"):
            os.rename(
                self.temporary, self.location.name, src_dir_fd=directory, dst_dir_fd=directory
            )
        self._created = False
        try:
            os.fsync(directory)
        except OSError as exc:
            message = "was replaced, but not durably: its directory could not be synced"
            raise type(exc)(exc.errno, message, self.location.path) from exc

    def discard(self) -> None:
        """Remove the new file unless it was committed. Never raises; may be repeated."""
        if self._created:
            self._created = False
            with contextlib.suppress(OSError):
                os.unlink(self.temporary, dir_fd=self.location.directory)

    def _create(self) -> int:
        location = self.location
        try:
            handle = os.open(self.temporary, _CREATE, 0o600, dir_fd=location.directory)
        except FileExistsError:
            # Only this package makes such names, and they are unpredictable: an earlier attempt
            # at the same operation was killed after making the file.
            os.unlink(self.temporary, dir_fd=location.directory)
            handle = os.open(self.temporary, _CREATE, 0o600, dir_fd=location.directory)
        self._created = True
        return handle

    def _mode(self, old: os.stat_result | None) -> int:
        if self.desired.mode is not None:
            return self.desired.mode
        return NEW_MODE if old is None else stat.S_IMODE(old.st_mode)

    def _set_owner(self, handle: int, old: os.stat_result | None) -> None:
        """Set owner and group if they differ.

        A unit's system call filter may refuse fchown() even to the present owner, so no call is
        made to keep it.
        """
        now = os.fstat(handle)
        uid, gid = self.desired.uid, self.desired.gid
        if old is not None:
            uid = old.st_uid if uid is None else uid
            gid = old.st_gid if gid is None else gid
        uid = now.st_uid if uid is None else uid
        gid = now.st_gid if gid is None else gid
        if (uid, gid) == (now.st_uid, now.st_gid):
            return
        try:
            os.fchown(handle, uid, gid)
        except OSError as exc:
            if exc.errno not in (errno.EPERM, errno.EINVAL):
                raise
            raise FileRefused(
                f"{self.location.path}: uid {os.geteuid()} cannot set the owner {uid}:{gid}: "
                f"run with CAP_CHOWN (and SystemCallFilter=@chown), or declare another owner"
            ) from exc

    def _keep_attributes(self, handle: int) -> None:
        old = open_regular(self.location)
        lost = []
        try:
            for name in _attributes(old):
                try:
                    os.setxattr(handle, name, os.getxattr(old, name))
                except OSError as exc:
                    # An ACL must be kept: without it the mode's group bits, which are its mask,
                    # would become the group's permissions.
                    if name == ACL or exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                        raise
                    lost.append(name)
        finally:
            os.close(old)
        self.lost = tuple(lost)


def _attributes(handle: int) -> list[str]:
    """The names of the extended attributes that a replacement keeps."""
    try:
        names = os.listxattr(handle)
    except OSError as exc:
        if exc.errno in (errno.ENOTSUP, errno.ENOSYS):
            return []
        raise
    return sorted(
        name for name in names if name in (ACL, "security.selinux") or name.startswith("user.")
    )
