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

from reconciled.durability import sync
from reconciled.journal.sqlite import wal
from reconciled.journal.sqlite.schema import FILE

MARK = "opening"
LOG = f"{FILE}-wal"
ASIDE = ".damaged-"


class StoreDamaged(Exception):
    """The store is not what was written. str() says in what, in words for a person."""


@attrs.frozen
class Condition:
    """What an opening found.

    warning  a torn tail: what was not yet durable when the process ended is not there
    damage   why the store was set aside and a fresh one made; empty: it was not
    aside    where the damaged one is now
    """

    warning: str = ""
    damage: str = ""
    aside: Path | None = None


@attrs.frozen
class Mark:
    """The last opening by its number, and whether it was closed."""

    number: int
    closed: bool


def read_mark(directory: Path) -> Mark | None:
    """The mark of the store in *directory*; None if it has none. Raises StoreDamaged, OSError."""
    try:
        words = (directory / MARK).read_bytes().split()
    except FileNotFoundError:
        return None
    state, number = words if len(words) == 2 else (b"", b"")  # noqa: PLR2004 - state and number
    if state not in (b"open", b"closed") or not number.isdigit():
        raise StoreDamaged(f"{MARK} does not say what it has to")
    return Mark(int(number), state == b"closed")


def write_mark(directory: Path, mark: Mark) -> None:
    """Replace the mark, durably. Raises OSError, and the one before stays."""
    state = "closed" if mark.closed else "open"
    temporary = directory / f"{MARK}.new"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, f"{state} {mark.number}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)
    temporary.replace(directory / MARK)
    sync(directory)


@attrs.frozen
class Left:
    """What the last process left in the log.

    warning  a torn tail; empty: there is none
    cut      where to cut it off, in bytes; 0: nowhere, SQLite begins the log anew by itself
    lost     the log is empty although the mark says "open"
    """

    warning: str = ""
    cut: int = 0
    lost: bool = False


def judge_files(directory: Path, mark: Mark | None) -> Left:
    """Look at the files before SQLite does, and change nothing. Raises StoreDamaged, OSError."""
    file = directory / FILE
    if mark is not None and not (file.exists() and file.stat().st_size):
        raise StoreDamaged("the database is empty or gone")
    log = directory / LOG
    content = log.read_bytes() if log.exists() else b""
    found = wal.walk(content)
    if found.damage:
        raise StoreDamaged(found.damage)
    lost = mark is not None and not mark.closed and len(content) <= wal.HEADER + wal.FRAME
    if not found.torn or lost:
        return Left(lost=lost)
    warning = f"{found.torn}: what was not yet durable when the process ended is not there"
    return Left(warning, found.end if found.transactions else 0)


def cut_tail(directory: Path, left: Left) -> None:
    """Cut a torn tail off, lest the next one seem to follow whole wal. Raises OSError."""
    if left.cut:
        with (directory / LOG).open("r+b") as stream:
            stream.truncate(left.cut)
            os.fsync(stream.fileno())


def judge_numbers(mark: Mark | None, opened: int, closed: int, *, lost: bool) -> None:
    """Compare the mark with the database's own numbers. Raises StoreDamaged.

    *lost*: as Left has it.
    """
    if mark is None:
        if opened > 1:
            raise StoreDamaged(f"{MARK} is gone")
        return
    if mark.closed:
        if closed != mark.number:
            raise StoreDamaged(f"the database knows of closing {closed}, and {mark.number} was")
    elif lost and closed < mark.number:
        raise StoreDamaged("the log is empty or gone, and the store was not closed")
    elif opened not in (mark.number, mark.number + 1):
        raise StoreDamaged(f"the database knows of opening {opened}, and {mark.number} was")


def set_aside(directory: Path, why: str) -> Path:
    """Move the damaged store away, whole and by one rename; where it is now.

    What was found is written beside the files, if that can be written. Raises OSError where the
    rename fails.
    """
    with contextlib.suppress(OSError):
        facts = {"at": time.time(), "damage": why, "files": _sizes(directory)}
        (directory / "damage.json").write_text(json.dumps(facts, indent=1) + "\n")
    base = f"{directory.name}{ASIDE}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    target, count = directory.with_name(base), 1
    while target.exists():
        count += 1
        target = directory.with_name(f"{base}-{count}")
    directory.rename(target)
    sync(directory.parent)
    return target


def damaged_before(directory: Path) -> bool:
    """Whether a damaged store lies beside *directory*: a fresh one does not know everything."""
    return any(directory.parent.glob(f"{directory.name}{ASIDE}*"))


def _sizes(directory: Path) -> dict[str, int]:
    return {each.name: each.stat().st_size for each in directory.iterdir() if each.is_file()}
