"""Disk space reserved for a full disk, so that open operations can still be closed."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

SIZE = 16 << 20  # bytes


@attrs.frozen
class Reserve:
    """One file with allocated blocks; it is removed when the disk is full."""

    file: Path
    size: int = SIZE

    def make(self) -> None:
        """Allocate the file unless it is complete. Raises OSError, after removing the file."""
        handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(handle).st_size < self.size:
                os.posix_fallocate(handle, 0, self.size)
        except BaseException:
            self.release()
            raise
        finally:
            os.close(handle)

    def release(self) -> None:
        """Free its space; harmless if the file does not exist. Raises OSError."""
        self.file.unlink(missing_ok=True)
