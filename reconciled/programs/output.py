"""The output file of a program: bounded in size, keeping the newest part.

1. Programs append to the file directly: nothing that the daemon does, its death included, breaks
   their output or makes them wait. A pipe would do both.
2. Above the limit the oldest part is removed. A program is never killed or refused a write for
   its output (RLIMIT_FSIZE would do that, to its other files too), so the file may exceed its
   limit between two checks.
3. The newest bytes up to the limit are never lost. While the program runs, a hole replaces the
   oldest part and offsets do not change; after it has ended, the file is rewritten without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

_BLOCK = 4096
_KEEP_SIZE = 0x01  # linux/falloc.h
_PUNCH_HOLE = 0x02

_TAIL = 8192  # bytes read for the last lines
_TAIL_LINES = 20
_TAIL_WIDTH = 300

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")


def printable_tail(data: bytes, redact: Callable[[str], str] = str) -> tuple[str, ...]:
    """The last lines of *data*, bounded and without control codes, for a log or a terminal.

    *redact* is applied before lines are cut: it could not recognise a part of a secret.
    """
    text = redact(_ESCAPES.sub("", data.decode("utf-8", "replace"))).expandtabs(4)
    lines = (
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line).rstrip()
        for line in text.splitlines()
    )
    return tuple(line[:_TAIL_WIDTH] for line in lines if line)[-_TAIL_LINES:]


def make_private_directory(directory: Path) -> None:
    """Make *directory* and its missing parents with mode 0700. Raises OSError."""
    if directory.is_dir():
        return
    make_private_directory(directory.parent)
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if not directory.is_dir():  # otherwise another thread made it first
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(directory)) from None


@attrs.define(eq=False)
class Output:
    """The output file of one program, open to keep it bounded; made by Output.open()."""

    path: Path
    limit: int  # bytes
    _file: int  # not opened for append: with O_APPEND, pwrite() would append as well
    _start: int  # where this program's own output begins
    _freed: int = 0  # everything before this offset is a hole

    @classmethod
    def open(cls, path: Path, limit: int) -> Output:
        """Make the file (0600) and its directories (0700). Raises OSError."""
        make_private_directory(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
        return cls(path, limit, file, os.fstat(file).st_size)

    def close(self) -> None:
        """Close this descriptor; the program's own is not affected."""
        os.close(self._file)

    @contextmanager
    def writer(self) -> Iterator[int]:
        """A descriptor for the program that appends to the file."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        writer = os.open(self.path, flags)
        try:
            yield writer
        finally:
            os.close(writer)

    @property
    def is_over_limit(self) -> bool:
        """Whether trim() would free anything."""
        return os.fstat(self._file).st_size - self._freed > self.limit + _BLOCK

    def trim(self) -> None:
        """Free the oldest part while the program continues to write.

        If that fails, the file remains too large, and the program is not affected.
        """
        end = (os.fstat(self._file).st_size - self.limit) // _BLOCK * _BLOCK
        try:
            _punch_hole(self._file, self._freed, end - self._freed)
        except OSError:
            # The file system has no holes. What the program writes during the copy is lost,
            # which is better than a full disk.
            self.compact()
        else:
            self._freed = end

    def compact(self) -> None:
        """Rewrite the file with its newest part alone, after the program has ended."""
        size = os.fstat(self._file).st_size
        if size <= self.limit:
            return
        with contextlib.suppress(OSError):
            newest = os.pread(self._file, self.limit, size - self.limit)
            newest = newest[newest.find(b"\n") + 1 :]  # begin with a complete line, if there is one
            _write_all(self._file, newest)
            os.ftruncate(self._file, len(newest))
            self._start = max(0, self._start - (size - len(newest)))
            self._freed = 0

    def tail(self, redact: Callable[[str], str] = str) -> tuple[str, ...]:
        """The last lines that this program wrote, for a log; *redact* hides secrets."""
        size = os.fstat(self._file).st_size
        start = max(self._start, size - min(_TAIL, self.limit))
        data = os.pread(self._file, max(0, size - start), start)
        if start > self._start:
            data = data[data.find(b"\n") + 1 :]  # begin with a complete line, if there is one
        return printable_tail(data, redact)


def _punch_hole(file: int, offset: int, length: int) -> None:
    """Free a part of *file*: it reads as zeros, and offsets do not change. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _write_all(file: int, data: bytes) -> None:
    offset = 0
    while offset < len(data):
        offset += os.pwrite(file, data[offset:], offset)
