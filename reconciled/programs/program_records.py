"""What stands in ``STATE/operations/ID/`` about programs: who runs, and how it ended.

``child`` and ``end`` are written by the small parent, each as a whole and durably: a reader
sees the old or the new one. What cannot be read is damage, and never means "nobody".
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

from reconciled.core.errors import RecordDamaged
from reconciled.durability import replace_at
from reconciled.programs.attempts import lock_directory

CHILD, END = "child", "end"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@attrs.frozen
class Identity:
    """A process, told from every other of its boot by number and start time."""

    pid: int
    started: int  # clock ticks after boot


@attrs.frozen
class Assignment:
    """What a program is started for.

    deadline  monotonic seconds of this boot at which its critical part is over; None: none is
    """

    boot_id: str
    attempt: int
    action: str
    critical: bool
    deadline: float | None

    def to_json_prefix(self) -> bytes:
        """A JSON object without its end, for the small parent to complete."""
        return json.dumps(attrs.asdict(self)).encode().removesuffix(b"}") + b", "


@attrs.frozen
class ChildRecord:
    """``child``: the program of an operation that was started last."""

    assignment: Assignment
    program: Identity
    parent: Identity


@attrs.frozen
class EndRecord:
    """``end``: how a program ended; by "reap" where that ended it and nobody else took note."""

    assignment: Assignment
    program: Identity
    code: int | None
    signal: int | None
    at: float  # wall seconds
    by: str = ""

    def matches(self, child: ChildRecord) -> bool:
        """Whether it is the end of that very program."""
        return self.assignment == child.assignment and self.program == child.program


def boot_id() -> str:
    """What tells this boot of the machine from every other; empty where nothing does."""
    try:
        return _BOOT.read_text("ascii").strip()
    except OSError:
        return ""


def read_child(directory: Path) -> ChildRecord | None:
    """The program that was started last; None where none was. Raises Damaged, OSError."""
    file = directory / CHILD
    data = _read(file)
    if data is None:
        return None
    try:
        return ChildRecord(
            _assignment(data), Identity(**data["program"]), Identity(**data["parent"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damage(file, error) from error


def read_end(directory: Path) -> EndRecord | None:
    """How the program that ended last did; None where none has. Raises Damaged, OSError."""
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
    """Record an end in the place of a small parent that is gone. Raises OSError."""
    data = attrs.asdict(end)
    data.update(data.pop("assignment"))
    with lock_directory(directory) as handle:
        replace_at(handle, END, json.dumps(data).encode() + b"\n")
        os.fsync(handle)


def _assignment(data: dict[str, Any]) -> Assignment:
    return Assignment(**{field.name: data[field.name] for field in attrs.fields(Assignment)})


def _read(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damage(file, error) from error
    if not isinstance(data, dict):
        raise RecordDamaged(f"{file} is no record: it was damaged")
    return data


def _damage(file: Path, error: Exception) -> RecordDamaged:
    return RecordDamaged(f"{file} is no record ({error!r}): it was damaged")
