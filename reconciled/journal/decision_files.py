"""Decisions of people on their way to the daemon, as files: one format for both kinds.

``NAME`` with the suffix of its kind is a decision that can still be replaced or withdrawn. The
daemon claims it, by renaming it to ``NAME.taken``, before it acts, and removes it at the end.

1. A decision is written whole, and is durable when submit() returns.
2. A newer decision of the same name replaces the older one.
3. A claimed decision counts until its file is removed, even if the daemon is killed meanwhile.
4. Content is checked before it is used: the directory outlives the programs that write to it.

Every method reads or writes the disk: the daemon calls them in threads.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import attrs

from reconciled.durability import replace, sync

_TAKEN_SUFFIX = ".taken"
# Not blocking: a named pipe would otherwise keep the reader waiting for a writer.
_OPEN_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@attrs.frozen
class DecisionFiles:
    """The decisions of one kind.

    suffix     of a decision that is not claimed yet
    max_bytes  a longer file was not written by reconciled
    """

    directory: Path
    suffix: str
    max_bytes: int

    # -- for the verbs -----------------------------------------------------------------------

    def submit(self, name: str, data: bytes) -> None:
        """Write the decision *name*; durable when this returns. Raises OSError."""
        self.make_directory()
        replace(self._pending(name), data)

    def withdraw(self, name: str) -> bool:
        """Remove the decision *name*; False if the daemon has claimed it. Raises OSError."""
        try:
            self._pending(name).unlink()
        except FileNotFoundError:
            return False
        sync(self.directory)
        return True

    def find(self, name: str) -> Path | None:
        """The file of the decision *name* that the daemon has not finished; None: none."""
        files = (self._pending(name), self._taken(name))
        return next((file for file in files if file.exists()), None)

    # -- for the daemon ----------------------------------------------------------------------

    def make_directory(self) -> None:
        """Make the directory if it is missing. Raises OSError."""
        if not self.directory.is_dir():
            self.directory.mkdir(mode=0o700, exist_ok=True)
            sync(self.directory.parent)

    def claim(self, name: str = "") -> list[Path]:
        """Claim every decision, or the one *name*; all claimed files. Raises OSError.

        Includes those that an earlier daemon claimed and did not finish.
        """
        for file in self._list(name, self.suffix):
            with contextlib.suppress(FileNotFoundError):  # withdrawn in this instant
                file.replace(self._taken(file.stem))
        return self._list(name, _TAKEN_SUFFIX)

    def finish(self, file: Path) -> None:
        """Remove a claimed decision; durable when this returns. Raises OSError."""
        file.unlink(missing_ok=True)
        sync(self.directory)

    # ----------------------------------------------------------------------------------------

    def read(self, file: Path) -> dict[str, Any]:
        """The JSON object in *file*. Raises OSError, or ValueError for any other content."""
        content = _read_regular(file, self.max_bytes)
        try:
            data = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise not_ours(file) from error
        if not isinstance(data, dict):
            raise not_ours(file)
        return data

    def _pending(self, name: str) -> Path:
        return self.directory / f"{name}{self.suffix}"

    def _taken(self, name: str) -> Path:
        return self.directory / f"{name}{_TAKEN_SUFFIX}"

    def _list(self, name: str, suffix: str) -> list[Path]:
        # Not Path.glob(): from Python 3.13 on it gives nothing where it cannot read the directory.
        try:
            found = list(self.directory.iterdir())
        except FileNotFoundError:
            return []
        return sorted(
            file
            for file in found
            if file.suffix == suffix and not file.name.startswith(".") and name in ("", file.stem)
        )


def not_ours(file: Path) -> ValueError:
    """The error for a *file* with content that reconciled does not write."""
    return ValueError(f"{file} was not written by reconciled: remove it")


def _read_regular(file: Path, max_bytes: int) -> bytes:
    try:
        handle = os.open(file, _OPEN_READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{file} is a symbolic link: remove it") from error
        if error.errno == errno.ENXIO:  # a socket
            raise _not_regular(file) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise _not_regular(file)
        # Not before: for a directory, fdopen() raises OSError.
        with os.fdopen(handle, "rb", closefd=False) as opened:
            content = opened.read(max_bytes + 1)
    finally:
        os.close(handle)
    if len(content) > max_bytes:
        raise ValueError(f"{file} is longer than {max_bytes} bytes: remove it")
    return content


def _not_regular(file: Path) -> ValueError:
    return ValueError(f"{file} is not a regular file: remove it")
