"""In what condition a store was left: whole, with a torn tail, or damaged and set aside.

The *mark* is a small file beside the database that says whether the last opening was closed,
and its number; the database has the numbers too. The order in which they are written makes
each crash look different from a loss:

1. The mark says "open N" from after the first commit of opening N is durable: the log is not
   empty then, and stays so until a commit in the log itself says "closed N".
2. The mark says "closed N" from after that commit has reached the database file.

So an empty log beside an open mark, a database that knows less than the mark, or no database
at all beside any mark are damage, although SQLite would open each without a word.
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

    warning  a torn tail: what was not yet durable when the process ended is not there
    damage   why the store was set aside and a fresh one made; empty: it was not
    aside    where the damaged one is now
    """

    warning: str = ""
    damage: str = ""
    set_aside_path: Path | None = None


@attrs.frozen
class Marker:
    """The last opening by its number, and whether it was closed."""

    number: int
    closed: bool


def read_marker(directory: Path) -> Marker | None:
    """The mark of the store in *directory*; None if it has none. Raises StoreDamaged, OSError."""
    try:
        words = (directory / MARKER).read_bytes().split()
    except FileNotFoundError:
        return None
    state, number = words if len(words) == 2 else (b"", b"")  # noqa: PLR2004 - state and number
    if state not in (b"open", b"closed") or not number.isdigit():
        raise StoreDamaged(f"{MARKER} does not say what it has to")
    return Marker(int(number), state == b"closed")


def write_marker(directory: Path, marker: Marker) -> None:
    """Replace the mark, durably. Raises OSError, and the one before stays."""
    state = "closed" if marker.closed else "open"
    replace(directory / MARKER, f"{state} {marker.number}\n".encode())


@attrs.frozen
class WalState:
    """What the last process left in the log.

    warning  a torn tail; empty: there is none
    cut      where to cut it off, in bytes; 0: nowhere, SQLite begins the log anew by itself
    lost     the log is empty although the mark says "open"
    """

    warning: str = ""
    truncate_at: int = 0
    lost: bool = False


def check_files(directory: Path, marker: Marker | None) -> WalState:
    """Look at the files before SQLite does, and change nothing. Raises StoreDamaged, OSError."""
    file = directory / FILE
    if marker is not None and not (file.exists() and file.stat().st_size):
        raise StoreDamaged("the database is empty or gone")
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
    warning = f"{found.torn}: what was not yet durable when the process ended is not there"
    return WalState(warning, found.end if found.transactions else 0)


def truncate_tail(directory: Path, wal_state: WalState) -> None:
    """Cut a torn tail off, lest the next one seem to follow whole wal. Raises OSError."""
    if wal_state.truncate_at:
        with (directory / WAL).open("r+b") as stream:
            stream.truncate(wal_state.truncate_at)
            os.fsync(stream.fileno())


def check_numbers(marker: Marker | None, opened: int, closed: int, *, lost: bool) -> None:
    """Compare the mark with the database's own numbers. Raises StoreDamaged.

    *lost*: as Left has it.
    """
    if marker is None:
        if opened > 1:
            raise StoreDamaged(f"{MARKER} is gone")
        return
    if marker.closed:
        if closed != marker.number:
            raise StoreDamaged(f"the database knows of closing {closed}, and {marker.number} was")
    elif lost and closed < marker.number:
        raise StoreDamaged("the log is empty or gone, and the store was not closed")
    elif opened not in (marker.number, marker.number + 1):
        raise StoreDamaged(f"the database knows of opening {opened}, and {marker.number} was")


def set_aside(directory: Path, why: str) -> Path:
    """Move the damaged store away, whole and by one rename; where it is now.

    What was found is written beside the files, if that can be written. Raises OSError where the
    rename fails.
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
    """Whether a damaged store lies beside *directory*: a fresh one does not know everything."""
    return any(directory.parent.glob(f"{directory.name}{ASIDE_SUFFIX}*"))


def _sizes(directory: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in directory.iterdir() if each.is_file()}
