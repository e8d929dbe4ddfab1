"""Room that is kept for a full disk, so that what is open can still be closed."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

SIZE = 16 << 20


@attrs.frozen
class Reserve:
    """One file whose blocks are allocated; it goes when the disk is full."""

    file: Path
    size: int = SIZE

    def make(self) -> None:
        """Allocate it if it is not there whole. Raises OSError, and leaves nothing then."""
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
        """Give its room to whoever needs it; harmless where it is gone."""
        self.file.unlink(missing_ok=True)
