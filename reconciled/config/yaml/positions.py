"""The location of each value of a document, for messages.

1. A path is a tuple of mapping keys and sequence indices from the top of the document.
2. A path that is deeper than what is written gives the location of its deepest written part:
   a missing key is reported at the mapping that lacks it.
3. A value that an alias or a merge key brings in has the location at which it is written.
"""

from __future__ import annotations

import attrs

from reconciled.core.problems import Problem
from reconciled.core.resources import Origin

Path = tuple[str | int, ...]


@attrs.define(eq=False)
class Location:
    """The location of one value, with the locations of its parts if it has any."""

    line: int
    column: int
    # By key or index: line and column of the key (in a sequence: of the element), and the value.
    parts: dict[str | int, tuple[int, int, Location]] | None = None


@attrs.frozen(eq=False)
class Positions:
    """The locations of all values of one document in *file*."""

    file: str
    top: Location

    def value_origin(self, path: Path = ()) -> Origin:
        """Where the value at *path* begins."""
        return self._find(path, key=False)

    def key_origin(self, path: Path) -> Origin:
        """Where the key of the value at *path* begins."""
        return self._find(path, key=True)

    def problem(self, path: Path, message: str) -> Problem:
        """A problem with the value at *path*; the message begins with the path."""
        return Problem(self.value_origin(path), f"{dotted(path)}: {message}" if path else message)

    def problem_at_key(self, path: Path, message: str) -> Problem:
        """A problem with the key at *path* itself."""
        return Problem(self.key_origin(path), message)

    def _find(self, path: Path, *, key: bool) -> Origin:
        location = self.top
        line, column = location.line, location.column
        for step in path:
            part = location.parts.get(step) if location.parts is not None else None
            if part is None:
                return Origin(self.file, location.line, location.column)
            line, column, location = part
        if not key:
            line, column = location.line, location.column
        return Origin(self.file, line, column)


def dotted(path: Path) -> str:
    """*path* as text: ``controllers.site.watch[0]``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text
