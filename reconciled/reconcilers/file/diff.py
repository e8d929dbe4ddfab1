"""A file's change as a plan shows it: a bounded diff that does not reveal private content."""

from __future__ import annotations

import difflib
import hashlib

MAX_BYTES = 64 * 1024  # a diff's time grows with the square of its length
MAX_LINES = 200
_READABLE = 0o044  # by group or others


def is_private(*modes: int | None) -> bool:
    """Whether one of *modes*, before or after the change, denies group and others to read."""
    return any(mode is not None and not mode & _READABLE for mode in modes)


def describe_change(path: str, old: bytes, new: bytes, *, private: bool) -> str:
    """A unified diff from *old* to *new*; sizes and hashes where it is private, long or binary."""
    if old == new:
        return ""
    texts = None if private else _texts(old, new)
    if texts is None:
        return f"{_summary(old)} → {_summary(new)}"
    lines = list(
        difflib.unified_diff(texts[0].splitlines(), texts[1].splitlines(), path, path, lineterm="")
    )
    shown = [_printable(line) for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"… {len(lines) - MAX_LINES} more lines")
    return "\n".join(shown) or "only line endings differ"


def _texts(old: bytes, new: bytes) -> tuple[str, str] | None:
    if max(len(old), len(new)) > MAX_BYTES or b"\0" in old + new:
        return None
    try:
        return old.decode(), new.decode()
    except UnicodeDecodeError:
        return None


def _summary(content: bytes) -> str:
    if not content:
        return "empty"
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()[:12]}"


def _printable(line: str) -> str:
    """*line* without control characters, which would control the terminal that shows it."""
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)
