"""Steps that a program notes by itself, with ``reconciled step``: one checksummed line each.

1. A line counts only as a whole. The last one may be torn by a crash: it is dropped, and cut
   off before the next is written. Any other bad line is damage, and nothing is concluded.
2. Noting a step that is there already is as durable as noting a new one: it is synced too.

Nothing heavy is imported here: ``reconciled step`` has 50 ms for everything.
"""

from __future__ import annotations

import os
import zlib

from reconciled.core.errors import StaleAttempt, StepsDamaged
from reconciled.programs.attempts import lock_directory, read_attempt

STEPS = "steps"
MAX_NAME_LENGTH = 200  # characters
_MAX_BYTES = 16 * 1024 * 1024  # bytes read at most: some hundred thousand steps


class RecordedStep:
    """One step: by which attempt, and its name."""

    __slots__ = ("attempt", "name")

    def __init__(self, attempt: int, name: str) -> None:
        self.attempt = attempt
        self.name = name

    def __repr__(self) -> str:
        return f"<step {self.name} of attempt {self.attempt}>"


def format_handle(directory: str | os.PathLike[str], attempt: int) -> str:
    """What RECONCILED_HANDLE tells a program; opaque to it."""
    return f"{attempt}:{os.fspath(directory)}"


def parse_handle(handle: str) -> tuple[str, int]:
    """Directory and attempt in *handle*. Raises ValueError."""
    attempt, _, directory = handle.partition(":")
    if not attempt.isdecimal() or not directory.startswith("/"):
        raise ValueError(f"RECONCILED_HANDLE is {handle!r}, and no handle of an operation")
    return directory, int(attempt)


def check_name(name: str) -> None:
    """Raises ValueError for what is no name of a step."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise ValueError(
            f"{name!r} is no name of a step: write up to {MAX_NAME_LENGTH} printable characters"
        )


def record_step(directory: str, attempt: int, name: str) -> None:
    """Note step *name* as done by *attempt*: durable when this returns.

    Raises NotCurrent, StepsDamaged, ValueError for the name, and OSError: then it may be noted
    or not.
    """
    check_name(name)
    try:
        with lock_directory(directory) as handle:
            current = read_attempt(handle)
            if current != str(attempt):
                raise StaleAttempt(f"attempt {attempt} is over: the operation is at {current}")
            _append(handle, directory, attempt, name)
    except FileNotFoundError as error:
        # The whole directory goes some time after the operation's end.
        raise StaleAttempt(f"the operation of {directory} is over") from error


def read_steps(directory: str | os.PathLike[str]) -> list[RecordedStep]:
    """The steps that are durable, in their order; each name once.

    Reading takes no lock: a line that is just being written is not durable yet, and is taken
    for a torn one. Raises StepsDamaged, OSError.
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
        noted, whole = _parse(data, directory)
        if all(step.name != name for step in noted):
            os.ftruncate(file, whole)
            _write_all(file, _line(attempt, name), whole)
        # Also for a repeated name: whoever wrote the line may have died before its sync.
        os.fsync(file)
    finally:
        os.close(file)
    if not data:
        os.fsync(handle)


def _line(attempt: int, name: str) -> bytes:
    text = f"{attempt} {name}".encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(data: bytes, directory: str | os.PathLike[str]) -> tuple[list[RecordedStep], int]:
    """The steps in *data*, and how many bytes of it are whole lines."""
    noted: list[RecordedStep] = []
    whole = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        step = _step(line)
        if step is None:
            if whole + len(line) < len(data):
                file = os.path.join(directory, STEPS)  # noqa: PTH118 pathlib takes 5 ms
                raise StepsDamaged(f"{file}:{number}:1: the line is damaged, and not the last one")
            break
        whole += len(line)
        if all(other.name != step.name for other in noted):
            noted.append(step)
    return noted, whole


def _step(line: bytes) -> RecordedStep | None:
    """The step that *line* notes; None if it is no whole line."""
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
