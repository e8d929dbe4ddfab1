"""Making durable what was written: of a file its content, of a directory the names in it."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when *place*, a file or a directory, is as it is now after a power cut too.

    Blocks. Raises OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
