"""One complete read of a directory of manifests. It blocks, and runs in a thread.

1. The listing is authoritative. A file that has not changed since the last one is not read again.
2. No directory entry can block it: it waits for no FIFO, opens no device, reads no endless file.
   A stalled file system can, which is why it runs in a thread.
3. A file counts as unchanged by its status only if that is old enough for any later write to
   change it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs

from reconciled.core.errors import DeviceChanged
from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest, Origin

Parse = Callable[[bytes, str], tuple[list[Manifest], list[Problem]]]
Signature = tuple[int, int, int, int, int]

MAX_FILE_BYTES = 1 << 20  # as objects of the Kubernetes API; parsed in well under a second
# The times of a file have the granularity of the kernel's tick, or of seconds on old file
# systems: a second write within it does not change them.
_TIMESTAMP_GRANULARITY_NS = 2_000_000_000
# ioctl_iflags(2), FS_IOC_GETVERSION: ext4 reuses the inode number of a removed directory at
# once; the generation distinguishes the two.
_GET_GENERATION = 0x80087601
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class _FileRefused(Exception):
    """A file that is not read; str() is the reason."""


@attrs.frozen(eq=False)
class ReadFile:
    """What one file declared when it was last read."""

    signature: Signature | None  # None: not reliable, so it is read at each listing
    digest: bytes
    modified: float  # seconds since the epoch
    manifests: tuple[Manifest, ...] = ()
    problems: tuple[Problem, ...] = ()


@attrs.frozen(eq=False)
class Listing:
    """The manifest files of a directory, by name."""

    files: Mapping[str, ReadFile]
    identity: str  # "device:inode", with ":generation" where the file system has one
    device: int
    torn: bool  # a file vanished during the listing: its new name may be missing


def is_manifest(name: str) -> bool:
    """Whether a file of this name is read: hidden files and backups of editors are not."""
    return name.endswith((".yaml", ".yml")) and not name.startswith(".")


def read_listing(
    path: Path, known: Mapping[str, ReadFile], parse: Parse, device: int | None = None
) -> Listing:
    """List *path* now, reading what differs from *known*.

    Raises OSError if it cannot be listed, and DeviceChanged if it is not on *device*.
    Blocks as long as the file system does.
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(directory)
        if device not in (None, status.st_dev):
            raise DeviceChanged(f"is on another device ({status.st_dev}) than before ({device})")
        reader = _Reader(path, directory, known, parse)
        with os.scandir(directory) as entries:
            for entry in entries:
                if is_manifest(entry.name):
                    reader.scan_entry(entry)
        return Listing(reader.files, _identity(directory, status), status.st_dev, reader.torn)
    finally:
        os.close(directory)


def _identity(directory: int, status: os.stat_result) -> str:
    identity = f"{status.st_dev}:{status.st_ino}"
    generation = bytearray(8)
    try:
        fcntl.ioctl(directory, _GET_GENERATION, generation)
    except OSError:
        return identity
    return f"{identity}:{struct.unpack('@L', generation)[0]}"


@attrs.define(eq=False)
class _Reader:
    path: Path
    directory: int
    known: Mapping[str, ReadFile]
    parse: Parse
    files: dict[str, ReadFile] = attrs.field(init=False, factory=dict)
    torn: bool = attrs.field(init=False, default=False)

    def scan_entry(self, entry: os.DirEntry[str]) -> None:
        """Reuse what is known of *entry*, or read it."""
        name = entry.name
        try:
            status = entry.stat()
            before = self.known.get(name)
            if before is not None and before.signature == _signature(status):
                self.files[name] = before
                return
            self.files[name] = self._read(name, status, before)
        except FileNotFoundError as error:
            if not entry.is_symlink():
                self.torn = True
                return
            self._add_fault(
                name, f"cannot be read: its symbolic link has no target ({error.strerror})"
            )
        except OSError as error:
            self._add_fault(name, f"cannot be read: {error.strerror}")
        except _FileRefused as error:
            self._add_fault(name, str(error))

    def _read(self, name: str, status: os.stat_result, before: ReadFile | None) -> ReadFile:
        now = time.time_ns()
        _require_regular(status)  # before it is opened: opening some devices has effects
        descriptor = os.open(name, _FLAGS, dir_fd=self.directory)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            status = os.fstat(descriptor)
            _require_regular(status)
            data = file.read(MAX_FILE_BYTES + 1)
            after = os.fstat(descriptor)
        if len(data) > MAX_FILE_BYTES:
            raise _FileRefused(
                f"is larger than {MAX_FILE_BYTES >> 20} MiB: split it into several files"
            )
        # A writer may not have finished: its last write is not in a status taken before.
        steady = _signature(status) == _signature(after)
        old = now - after.st_ctime_ns > _TIMESTAMP_GRANULARITY_NS
        signature = _signature(after) if steady and old else None
        digest = hashlib.sha256(data).digest()
        modified = after.st_mtime
        if before is not None and before.digest == digest:
            return attrs.evolve(before, signature=signature, modified=modified)
        manifests, problems = self._parse_file(data, name)
        return ReadFile(signature, digest, modified, tuple(manifests), tuple(problems))

    def _parse_file(self, data: bytes, name: str) -> tuple[list[Manifest], list[Problem]]:
        shown = self._display_name(name)
        try:
            return self.parse(data, shown)
        except Exception as error:  # noqa: BLE001 - a file that the parser fails on affects only itself
            message = f"cannot be parsed: {type(error).__name__}: {error}"
            return [], [Problem(Origin(shown), message)]

    def _add_fault(self, name: str, message: str) -> None:
        problem = Problem(Origin(self._display_name(name)), message)
        self.files[name] = ReadFile(None, b"", 0.0, (), (problem,))

    def _display_name(self, name: str) -> str:
        # Names need not be UTF-8; logs and JSON must be.
        return os.fsencode(self.path / name).decode("utf-8", "backslashreplace")


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _FileRefused("is not a regular file: move it elsewhere or rename it")


def _signature(status: os.stat_result) -> Signature:
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )
