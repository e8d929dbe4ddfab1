"""Decisions about held operations, as files: ``STATE/resolutions/ID.json``."""

from __future__ import annotations

import json
from pathlib import Path

import attrs

from reconciled.journal.decision_files import DecisionFiles, not_ours
from reconciled.journal.operation_record import Resolution

DIRECTORY = "resolutions"
ALL_OPERATIONS = "ALL"  # in place of an id: every operation that a damaged store left in doubt
MAX_BYTES = 65536  # a reason is a sentence


@attrs.frozen
class ResolutionRequest:
    """What a person decided about one operation.

    operation  its id, or ALL_OPERATIONS
    at         wall time in seconds
    """

    operation: str
    resolution: Resolution
    who: str
    why: str
    at: float


def resolution_files(state: Path) -> DecisionFiles:
    """The decisions about operations below *state*, each named after its operation's id."""
    return DecisionFiles(state / DIRECTORY, ".json", MAX_BYTES)


def submit(state: Path, request: ResolutionRequest) -> None:
    """Write *request* for the daemon; durable when this returns. Raises OSError."""
    data = {
        "decision": request.resolution.value,
        "why": request.why,
        "who": request.who,
        "at": request.at,
    }
    resolution_files(state).submit(request.operation, json.dumps(data).encode() + b"\n")


def read_pending(state: Path, operation: str) -> ResolutionRequest | None:
    """The decision about *operation* that the daemon has not finished.

    Raises OSError, or ValueError for content that reconciled does not write.
    """
    files = resolution_files(state)
    # The daemon may claim or finish it between the check and the read.
    for _ in range(3):
        file = files.find(operation)
        if file is None:
            return None
        try:
            return read_resolution(files, file)
        except FileNotFoundError:
            continue
    return None


def read_resolution(files: DecisionFiles, file: Path) -> ResolutionRequest:
    """The decision in *file*.

    Raises OSError, or ValueError for content that reconciled does not write.
    """
    data = files.read(file)
    try:
        who, why, at = data["who"], data["why"], data["at"]
        resolution = Resolution(data["decision"])
    except (ValueError, KeyError, TypeError) as error:
        raise not_ours(file) from error
    if not (isinstance(who, str) and who and isinstance(why, str) and isinstance(at, int | float)):
        raise ValueError(f"{file} lacks who decided, why or when: remove it")
    try:
        return ResolutionRequest(file.stem, resolution, who, why, float(at))
    except OverflowError as error:
        raise not_ours(file) from error
