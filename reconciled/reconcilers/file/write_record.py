"""What the file reconciler wrote for one key, noted in the key's memory.

The state of a file does not tell who wrote it, whether the action after a replacement ran, or
what an interrupted replacement left behind. The note does:

1. It is durable before the first effect, so that no content of ours is without it.
2. It may name content that never came into place; it never lacks content that did.
3. A note that is missing or unreadable means "nothing of it is ours": files are left then.
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

# With a dot in front it is no name of a resource, whose directory may stand here as well.
FILE_NAME = ".written"
# One name each time, so that what a kill leaves behind is what the next save() replaces.
_TEMPORARY = f".{FILE_NAME}.reconciled-thenext1"
_DIGESTS = 2  # the new content and the one before, which stays in place if the new one fails


@attrs.frozen
class WriteRecord:
    """The note of one key.

    files      path → digests of content that we put there, newest first
    temporary  path and name of a new file that may have been left beside it
    owed       a file was replaced, or was about to be, and the action after it has not yet run
               to its end: once too often is harmless, once too rarely is not
    """

    files: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    temporary: tuple[str, str] | None = None
    after_pending: bool = False

    def begin(self, path: str, digest: str, temporary: str, *, after_pending: bool) -> WriteRecord:
        """The note to save before *path* is replaced."""
        digests = (digest, *(old for old in self.files.get(path, ()) if old != digest))
        files = {**self.files, path: digests[:_DIGESTS]}
        return WriteRecord(files, (path, temporary), after_pending=after_pending)

    def finish(self) -> WriteRecord:
        """The note to save once everything is done."""
        return attrs.evolve(self, temporary=None, after_pending=False)

    def without(self, path: str) -> WriteRecord:
        """The note without *path*."""
        return attrs.evolve(self, files={p: d for p, d in self.files.items() if p != path})

    def former_paths(self, path: str) -> list[str]:
        """The paths besides *path*: the spec named them once."""
        return [other for other in self.files if other != path]

    @classmethod
    async def read(cls, directory: Path) -> WriteRecord:
        """The note in *directory*, or an empty one. Raises OSError."""
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
        """Note it durably, making *directory* where it lacks. Raises OSError."""
        await make_directory(directory)
        note = json.dumps(attrs.asdict(self))
        await replace_file(FILE_NAME, note, mode=0o600, root=directory, temporary=_TEMPORARY)

    @staticmethod
    async def erase(directory: Path) -> None:
        """Remove the note."""
        with contextlib.suppress(FileNotFoundError):
            await trio.Path(directory, FILE_NAME).unlink()
