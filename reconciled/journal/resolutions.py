"""Decisions about held operations on their way to the daemon: ``STATE/resolutions``.

``ID.json`` is a decision that can still be replaced or taken back. The daemon renames it to
``ID.taken`` before it acts: from then on it counts, whoever is killed, until the file is gone.

1. A decision is written as a whole, and durable when put() returns.
2. A newer one for the same operation takes the place of the older one.
3. What stands in a file is judged before it is believed: the directory outlives its writers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs

from reconciled.durability import replace, sync
from reconciled.journal.operation_record import Resolution

DIRECTORY = "resolutions"
ALL_OPERATIONS = "ALL"  # in the place of an id: all that a damaged store has left in doubt
MAX_BYTES = 65536  # bytes; a reason is a sentence
_PENDING_SUFFIX, _TAKEN_SUFFIX = ".json", ".taken"


@attrs.frozen
class ResolutionRequest:
    """What a person decided about the operation with the id *operation*, or about EVERYTHING.

    at is wall time in seconds.
    """

    operation: str
    resolution: Resolution
    who: str
    why: str
    at: float


# -- for the verb ----------------------------------------------------------------------------


def submit(state: Path, request: ResolutionRequest) -> None:
    """Leave *decided* for the daemon that runs or comes; durable when this returns.

    Raises OSError.
    """
    directory = make_directory(state)
    file = directory / f"{request.operation}{_PENDING_SUFFIX}"
    data = {
        "decision": request.resolution.value,
        "why": request.why,
        "who": request.who,
        "at": request.at,
    }
    replace(file, json.dumps(data).encode() + b"\n")


def withdraw(state: Path, operation: str) -> bool:
    """Take back the decision about *operation*; False where the daemon has it already.

    Raises OSError.
    """
    try:
        (state / DIRECTORY / f"{operation}{_PENDING_SUFFIX}").unlink()
    except FileNotFoundError:
        return False
    sync(state / DIRECTORY)
    return True


def is_pending(state: Path, operation: str) -> bool:
    """Whether a decision about *operation* is there that nobody has settled yet."""
    directory = state / DIRECTORY
    return any(
        (directory / f"{operation}{suffix}").exists() for suffix in (_PENDING_SUFFIX, _TAKEN_SUFFIX)
    )


def read_pending(state: Path, operation: str) -> ResolutionRequest | None:
    """The decision about *operation* that nobody has settled yet.

    Raises OSError, and ValueError for what was not written here.
    """
    for suffix in (_PENDING_SUFFIX, _TAKEN_SUFFIX):
        try:
            return read(state / DIRECTORY / f"{operation}{suffix}")
        except FileNotFoundError:
            continue
    return None


# -- for the daemon --------------------------------------------------------------------------


def make_directory(state: Path) -> Path:
    """The directory, made if it is missing. Raises OSError."""
    directory = state / DIRECTORY
    if not directory.is_dir():
        directory.mkdir(mode=0o700, exist_ok=True)
        sync(state)
    return directory


def take_all(state: Path) -> list[Path]:
    """Take every decision that is there; the files of all that are taken. Raises OSError.

    Those that an earlier daemon has taken and not settled are among them.
    """
    directory = state / DIRECTORY
    for file in directory.glob(f"*{_PENDING_SUFFIX}"):
        if not file.name.startswith("."):
            file.replace(file.with_suffix(_TAKEN_SUFFIX))
    return sorted(directory.glob(f"*{_TAKEN_SUFFIX}"))


def read(file: Path) -> ResolutionRequest:
    """The decision in *file*. Raises OSError, and ValueError for what was not written here."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as opened:
        text = opened.read(MAX_BYTES)
    try:
        data: Any = json.loads(text)
        who, why, at = data["who"], data["why"], data["at"]
        what = Resolution(data["decision"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no decision that reconciled wrote") from error
    if not (isinstance(who, str) and who and isinstance(why, str) and isinstance(at, int | float)):
        raise ValueError(f"{file} does not say who decided, why and when")
    return ResolutionRequest(file.stem, what, who, why, float(at))


def remove_finished(file: Path) -> None:
    """Remove the file of a decision that has been acted on. Raises OSError."""
    file.unlink(missing_ok=True)
    sync(file.parent)
