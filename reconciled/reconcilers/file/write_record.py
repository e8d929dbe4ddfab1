"""The record of what the file reconciler wrote for one key, in the key's memory directory.

The state of a file does not show who wrote it, whether ``after`` ran after a replacement, or which
temporary file an interruption left. The record does:

1. It is durable before the first effect, so each file that the reconciler wrote is recorded.
2. It may name content that was never put in place; it never lacks content that was.
3. A missing or unreadable record means that nothing was written: existing files are kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.api import make_directory, read_file, replace_file

# The leading dot rules out a resource's name, whose directory may be here as well.
FILE_NAME = ".written"
# A fixed name, so that the next save() replaces what a killed process left.
_TEMPORARY = f".{FILE_NAME}.reconciled-thenext1"
_DIGESTS = 2  # of the new content and the one before, which is kept if the replacement fails


@attrs.frozen
class WriteRecord:
    """The record of one key.

    files          path → digests of content that the reconciler put there, newest first
    temporary      path, and name of a new file that an interruption may have left beside it
    after_pending  a file was or may have been replaced, and ``after`` has not completed since: it
                   may run once too often, never once too rarely
    """

    files: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    temporary: tuple[str, str] | None = None
    after_pending: bool = False

    def begin(self, path: str, digest: str, temporary: str, *, after_pending: bool) -> WriteRecord:
        """The record to save before *path* is replaced."""
        digests = (digest, *(old for old in self.files.get(path, ()) if old != digest))
        files = {**self.files, path: digests[:_DIGESTS]}
        return WriteRecord(files, (path, temporary), after_pending=after_pending)

    def finish(self) -> WriteRecord:
        """The record to save after all steps are done."""
        return attrs.evolve(self, temporary=None, after_pending=False)

    def without(self, path: str) -> WriteRecord:
        """The record without *path*."""
        return attrs.evolve(self, files={p: d for p, d in self.files.items() if p != path})

    def former_paths(self, path: str) -> list[str]:
        """The recorded paths other than *path*: an earlier spec named them."""
        return [other for other in self.files if other != path]

    @classmethod
    async def read(cls, directory: Path) -> WriteRecord:
        """The record in *directory*, or an empty one. Raises OSError."""
        try:
            data = json.loads(await read_file(FILE_NAME, root=directory))
            return cls._structure(data)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            return cls()

    @classmethod
    def _structure(cls, data: dict[str, Any]) -> WriteRecord:
        files = {str(path): tuple(map(str, digests)) for path, digests in data["files"].items()}
        left = data["temporary"]
        return cls(
            files, None if left is None else (str(left[0]), str(left[1])), data["after_pending"]
        )

    async def save(self, directory: Path) -> None:
        """Write it durably, making *directory* if missing. Raises OSError."""
        await make_directory(directory)
        text = json.dumps(attrs.asdict(self))
        await replace_file(FILE_NAME, text, mode=0o600, root=directory, temporary=_TEMPORARY)

    @staticmethod
    async def erase(directory: Path) -> None:
        """Remove the record, if it exists. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            await trio.Path(directory, FILE_NAME).unlink()
