"""Steps that a program records with ``reconciled step``: one checksummed line each.

1. A line counts only if it is complete. A crash may tear the last one: readers ignore it, and the
   next record replaces it. Any other bad line is damage, and the file is refused.
2. Recording a step again is as durable as the first time: the file is synced then, too.

This module imports nothing heavy: ``reconciled step`` has 50 ms in total.
"""

from __future__ import annotations

import os
import zlib

from reconciled.core.errors import StaleAttempt, StepsDamaged
from reconciled.programs.attempt_fence import CLOSED, lock_directory, read_attempt

STEPS = "steps"
MAX_NAME_LENGTH = 200  # characters
_MAX_BYTES = 16 * 1024 * 1024  # bytes read at most: some hundred thousand steps


class RecordedStep:
    """One recorded step: its name, and the attempt that recorded it."""

    __slots__ = ("attempt", "name")

    def __init__(self, attempt: int, name: str) -> None:
        self.attempt = attempt
        self.name = name

    def __repr__(self) -> str:
        return f"<step {self.name} of attempt {self.attempt}>"


def format_handle(directory: str | os.PathLike[str], attempt: int) -> str:
    """The value of RECONCILED_HANDLE, opaque to the program."""
    return f"{attempt}:{os.fspath(directory)}"


def parse_handle(handle: str) -> tuple[str, int]:
    """Directory and attempt in *handle*. Raises ValueError."""
    attempt, _, directory = handle.partition(":")
    if not attempt.isdecimal() or not directory.startswith("/"):
        raise ValueError(
            f"RECONCILED_HANDLE is {handle!r}, not a handle of an operation: pass it on unchanged"
        )
    return directory, int(attempt)


def check_name(name: str) -> None:
    """Raise ValueError unless *name* is a valid step name."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(
            f"{name!r} is not a step name: write 1 to {MAX_NAME_LENGTH} printable characters"
        )


def record_step(directory: str, attempt: int, name: str) -> None:
    """Record step *name* as done by *attempt*, durably.

    Raises StaleAttempt, StepsDamaged, ValueError for the name, and OSError: then the step may be
    recorded or not.
    """
    check_name(name)
    try:
        with lock_directory(directory) as handle:
            current = read_attempt(handle)
            if current != str(attempt):
                raise StaleAttempt(_stale_text(attempt, current))
            _append(handle, directory, attempt, name)
    except FileNotFoundError as error:
        # The directory is removed some time after the operation has ended.
        raise StaleAttempt(f"the operation of {directory} has ended") from error


def _stale_text(attempt: int, current: str) -> str:
    state = f"is at attempt {current}" if current.isdecimal() else "has no current attempt"
    if current == CLOSED:
        state = "has ended"
    return f"attempt {attempt} is not current: the operation {state}"


def read_steps(directory: str | os.PathLike[str]) -> list[RecordedStep]:
    """The durable steps in their order; each name once.

    Takes no lock: a line that is being written is not durable yet and is ignored like a torn one.
    Raises StepsDamaged, OSError.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return []
    try:
        file = os.open(STEPS, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=handle)
    except FileNotFoundError:
        return []
    finally:
        os.close(handle)
    try:
        return _parse(_contents(file), directory)[0]
    finally:
        os.close(file)


def _append(handle: int, directory: str, attempt: int, name: str) -> None:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    file = os.open(STEPS, flags, 0o600, dir_fd=handle)
    try:
        data = _contents(file)
        recorded, whole = _parse(data, directory)
        if all(step.name != name for step in recorded):
            os.ftruncate(file, whole)
            _write_all(file, _line(attempt, name), whole)
        # Also for a repeated name: its writer may have been killed before the sync.
        os.fsync(file)
    finally:
        os.close(file)
    if not data:
        os.fsync(handle)


def _line(attempt: int, name: str) -> bytes:
    text = f"{attempt} {name}".encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(data: bytes, directory: str | os.PathLike[str]) -> tuple[list[RecordedStep], int]:
    """The steps in *data*, and how many bytes of it are complete lines."""
    recorded: list[RecordedStep] = []
    whole = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        step = _step(line)
        if step is None:
            if whole + len(line) < len(data):
                file = os.path.join(directory, STEPS)  # noqa: PTH118 pathlib takes 5 ms
                raise StepsDamaged(f"{file}:{number}:1: damaged line before the last one")
            break
        whole += len(line)
        if all(other.name != step.name for other in recorded):
            recorded.append(step)
    return recorded, whole


def _step(line: bytes) -> RecordedStep | None:
    """The step in *line*; None if the line is incomplete or damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    attempt, _, name = text.partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    return RecordedStep(int(attempt), name.decode())


def _contents(file: int) -> bytes:
    return os.pread(file, _MAX_BYTES, 0)


def _write_all(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
