"""Records of an operation's programs in ``STATE/operations/ID/``: which one ran, how it ended.

The small parent writes ``child`` and ``end``, each atomically and durably: a reader sees the old
or the new one. A record that cannot be read is damaged; it never means that no program runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

from reconciled.core.errors import RecordDamaged
from reconciled.durability import replace_at
from reconciled.programs.attempt_fence import lock_directory

CHILD, END = "child", "end"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@attrs.frozen
class Identity:
    """A process, identified among all of its boot by pid and start time."""

    pid: int
    started: int  # clock ticks after boot


@attrs.frozen
class Assignment:
    """The attempt and action that a program is started for.

    deadline  end of its critical section, in monotonic seconds of this boot; None without one
    key       the key of its operation; empty: unknown, of an older version
    """

    boot_id: str
    attempt: int
    action: str
    critical: bool
    deadline: float | None
    key: str = ""

    def to_json_prefix(self) -> bytes:
        """The beginning of a JSON object, which the small parent completes."""
        return json.dumps(attrs.asdict(self)).encode().removesuffix(b"}") + b", "


@attrs.frozen
class Directory:
    """A directory, identified among all of one boot; 0: unknown, of an older version."""

    inode: int = 0
    device: int = 0


@attrs.frozen
class ChildRecord:
    """``child``: the last program that the operation started, and its small parent.

    state  the state directory in which it was written
    """

    assignment: Assignment
    program: Identity
    parent: Identity
    state: Directory = Directory()


@attrs.frozen
class EndRecord:
    """``end``: how a program ended; *by* is "reap" if ``reap`` ended it and recorded the end."""

    assignment: Assignment
    program: Identity
    code: int | None
    signal: int | None
    at: float  # wall seconds
    by: str = ""

    def matches(self, child: ChildRecord) -> bool:
        """Whether this is the end of the program in *child*."""
        return self.assignment == child.assignment and self.program == child.program


def boot_id() -> str:
    """The id of the machine's current boot; empty if the kernel provides none."""
    try:
        return _BOOT.read_text("ascii").strip()
    except OSError:
        return ""


def read_child(directory: Path) -> ChildRecord | None:
    """The last program that was started, or None. Raises RecordDamaged, OSError."""
    file = directory / CHILD
    data = _read(file)
    if data is None:
        return None
    try:
        return ChildRecord(
            _assignment(data),
            Identity(**data["program"]),
            Identity(**data["parent"]),
            Directory(**data.get("state", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damage(file, error) from error


def read_end(directory: Path) -> EndRecord | None:
    """The end of the last program that ended, or None. Raises RecordDamaged, OSError."""
    file = directory / END
    data = _read(file)
    if data is None:
        return None
    try:
        return EndRecord(
            _assignment(data),
            Identity(**data["program"]),
            data["code"],
            data["signal"],
            data["at"],
            data.get("by", ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damage(file, error) from error


def write_end(directory: Path, end: EndRecord) -> None:
    """Record *end* durably, as a small parent that was killed would have. Raises OSError."""
    data = attrs.asdict(end)
    data.update(data.pop("assignment"))
    with lock_directory(directory) as handle:
        replace_at(handle, END, json.dumps(data).encode() + b"\n")
        os.fsync(handle)


def _assignment(data: dict[str, Any]) -> Assignment:
    names = (field.name for field in attrs.fields(Assignment))
    return Assignment(**{name: data[name] for name in names if name != "key" or name in data})


def _read(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damage(file, error) from error
    if not isinstance(data, dict):
        raise RecordDamaged(f"{file} is damaged: not a JSON object")
    return data


def _damage(file: Path, error: Exception) -> RecordDamaged:
    return RecordDamaged(f"{file} is damaged: not a valid record ({error!r})")
