"""The condition of a store at its opening: intact, with a torn tail, or damaged and set aside.

Each opening of the store is a *generation* with a number. The *marker* is a small file beside the
database: the number of the last generation, and whether it was closed. The database contains the
numbers too. The order of the writes distinguishes a crash from a loss:

1. The marker says "open N" only after the first commit of generation N is durable: from then on
   the log is not empty, until a commit in the log itself says "closed N".
2. The marker says "closed N" only after that commit has reached the database file.

Therefore an empty log beside an open marker, a database with lower numbers than the marker, or a
marker without a database are damage, although SQLite would open each of them without an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import attrs

from reconciled.core.errors import StoreDamaged
from reconciled.durability import replace, sync
from reconciled.journal.sqlite import wal
from reconciled.journal.sqlite.schema import FILE

MARKER = "opening"
WAL = f"{FILE}-wal"
ASIDE_SUFFIX = ".damaged-"


@attrs.frozen
class IntegrityReport:
    """What an opening found.

    warning         a torn tail: writes that were not durable when the process ended are lost
    damage          why the store was set aside and a new one made; empty: it was not
    set_aside_path  where the damaged store is now
    """

    warning: str = ""
    damage: str = ""
    set_aside_path: Path | None = None


@attrs.frozen
class Marker:
    """The number of the last generation, and whether it was closed."""

    number: int
    closed: bool


def read_marker(directory: Path) -> Marker | None:
    """The marker in *directory*; None: there is none. Raises StoreDamaged, OSError."""
    try:
        words = (directory / MARKER).read_bytes().split()
    except FileNotFoundError:
        return None
    state, number = words if len(words) == 2 else (b"", b"")  # noqa: PLR2004 - state and number
    if state not in (b"open", b"closed") or not number.isdigit():
        raise StoreDamaged(f"the marker {MARKER} is malformed")
    return Marker(int(number), state == b"closed")


def write_marker(directory: Path, marker: Marker) -> None:
    """Replace the marker, durably. Raises OSError, and leaves the earlier one."""
    state = "closed" if marker.closed else "open"
    replace(directory / MARKER, f"{state} {marker.number}\n".encode())


@attrs.frozen
class WalState:
    """The condition of the log.

    warning      a torn tail; empty: none
    truncate_at  where the torn tail begins, in bytes; 0: do not truncate, SQLite restarts the log
    lost         the log is empty although the marker says "open"
    """

    warning: str = ""
    truncate_at: int = 0
    lost: bool = False


def check_files(directory: Path, marker: Marker | None) -> WalState:
    """Check the files before SQLite opens them; read-only. Raises StoreDamaged, OSError."""
    file = directory / FILE
    if marker is not None and not (file.exists() and file.stat().st_size):
        raise StoreDamaged("the database is empty or missing")
    log = directory / WAL
    content = log.read_bytes() if log.exists() else b""
    found = wal.scan(content)
    if found.damage:
        raise StoreDamaged(found.damage)
    lost = (
        marker is not None
        and not marker.closed
        and len(content) <= wal.WAL_HEADER_SIZE + wal.FRAME_HEADER_SIZE
    )
    if not found.torn or lost:
        return WalState(lost=lost)
    warning = f"{found.torn}: writes that were not durable when the process ended are lost"
    return WalState(warning, found.end if found.transactions else 0)


def truncate_tail(directory: Path, wal_state: WalState) -> None:
    """Truncate a torn tail, so that no later frame follows a damaged one. Raises OSError."""
    if wal_state.truncate_at:
        with (directory / WAL).open("r+b") as stream:
            stream.truncate(wal_state.truncate_at)
            os.fsync(stream.fileno())


def check_numbers(marker: Marker | None, opened: int, closed: int, *, lost: bool) -> None:
    """Compare the marker with the numbers in the database. Raises StoreDamaged.

    *lost*: see WalState.
    """
    if marker is None:
        if opened > 1:
            raise StoreDamaged(f"the marker {MARKER} is missing")
        return
    if marker.closed:
        if closed != marker.number:
            raise StoreDamaged(
                f"closed generation mismatch: database {closed}, marker {marker.number}"
            )
    elif lost and closed < marker.number:
        raise StoreDamaged("the log is empty or missing, and the store was not closed")
    elif opened not in (marker.number, marker.number + 1):
        raise StoreDamaged(f"generation mismatch: database {opened}, marker {marker.number}")


def set_aside(directory: Path, why: str) -> Path:
    """Move the damaged store aside, whole and by one rename; returns its new path.

    Writes the finding to damage.json beside the files, if possible. Raises OSError if the rename
    fails.
    """
    with contextlib.suppress(OSError):
        facts = {"at": time.time(), "damage": why, "files": _sizes(directory)}
        (directory / "damage.json").write_text(json.dumps(facts, indent=1) + "\n")
    base = f"{directory.name}{ASIDE_SUFFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target, count = directory.with_name(base), 1
    while target.exists():
        count += 1
        target = directory.with_name(f"{base}-{count}")
    directory.rename(target)
    sync(directory.parent)
    return target


def has_set_aside_store(directory: Path) -> bool:
    """Whether a damaged store was set aside from *directory*: a new one lacks its content."""
    return any(directory.parent.glob(f"{directory.name}{ASIDE_SUFFIX}*"))


def _sizes(directory: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in directory.iterdir() if each.is_file()}
