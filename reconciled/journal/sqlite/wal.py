"""Scan of a write-ahead log of SQLite: which transactions it contains, and whether it is intact.

SQLite ignores everything after the first invalid frame: one flipped bit reverts every later
transaction without an error.

1. Each frame is checked on its own: its checksum continues the one recorded in the frame before.
2. A bad frame in the last transaction is the result of an interrupted write: a torn tail. If more
   than the end of that same transaction follows a bad frame, the log is damaged.
3. Frames with other salts after the last frame of this log are left over from an earlier log.
   Both salts have to differ: no checksum covers them, and every new log changes both.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import attrs

WAL_HEADER_SIZE = 32
FRAME_HEADER_SIZE = 24
_MAGIC_LITTLE, _MAGIC_BIG = 0x377F0682, 0x377F0683
_FORMAT = 3007000
_MASK = 0xFFFFFFFF


@attrs.frozen
class WalScan:
    """The content of a log.

    transactions  complete ones, which SQLite reads
    end           where the last of them ends, in bytes
    torn          why the rest is not a complete transaction; empty: nothing follows
    damage        why committed frames after ``end`` cannot be read; empty: none
    """

    transactions: int = 0
    end: int = WAL_HEADER_SIZE
    torn: str = ""
    damage: str = ""


@attrs.frozen
class _Frame:
    number: int  # from 1
    current: bool  # belongs to this log, by its salts
    whole: bool  # its checksum matches
    pages: int  # size of the database after the transaction that ends here; 0: none ends here

    @property
    def is_commit(self) -> bool:
        """Whether a transaction ends with this frame."""
        return self.pages != 0


def scan(log: bytes) -> WalScan:
    """Check *log*, the whole content of the file, which may be empty."""
    if len(log) < WAL_HEADER_SIZE:
        return WalScan(end=0, torn="the log ends inside its header" if log else "")
    order = _byte_order(log)
    if order is None:
        return WalScan(damage="the header of the log is damaged")
    size = _page_size(log)
    frames = list(_frames(log, order, size))
    good = list(itertools.takewhile(lambda frame: frame.current and frame.whole, frames))
    behind = frames[len(good) :]
    while behind and not behind[-1].current:
        behind.pop()  # of an earlier log: no frame of this one follows
    if behind:
        sizes = {frame.pages for frame in frames if frame.current and frame.whole}
        behind[0] = attrs.evolve(
            behind[0], pages=_intended_pages(log, order, size, behind[0], sizes)
        )
    ends = [frame.number for frame in good if frame.is_commit]
    end = WAL_HEADER_SIZE + (ends[-1] if ends else 0) * (FRAME_HEADER_SIZE + size)
    return _classify_tail(log, len(ends), end, behind, size)


def _classify_tail(
    log: bytes, transactions: int, end: int, behind: list[_Frame], size: int
) -> WalScan:
    """*behind*: the first bad frame and all later ones of this log."""
    if behind:
        first = behind[0]
        ends = [frame for frame in behind if frame.current and frame.is_commit]
        reason = f"frame {first.number} of the log is damaged"
        if len(ends) > 1 or (ends and ends[0] is not behind[-1]):
            return WalScan(transactions, end, damage=f"{reason}, and committed frames follow")
        return WalScan(transactions, end, torn=reason)
    # A part of a frame at the end is a write that was cut, or left over like whole frames.
    if (len(log) - WAL_HEADER_SIZE) % (FRAME_HEADER_SIZE + size):
        return WalScan(transactions, end, torn="the log ends inside a frame")
    whole = WAL_HEADER_SIZE + (len(log) - WAL_HEADER_SIZE) // (FRAME_HEADER_SIZE + size) * (
        FRAME_HEADER_SIZE + size
    )
    if end < whole and _is_current(log, end):
        return WalScan(transactions, end, torn="the last transaction of the log has no end")
    return WalScan(transactions, end)


def _is_current(log: bytes, offset: int) -> bool:
    """Whether the frame at *offset* is of this log, harmed or not."""
    salts = log[offset + 8 : offset + 16]
    return salts[:4] == log[16:20] or salts[4:] == log[20:24]


def _byte_order(log: bytes) -> str | None:
    """The byte order of the checksums, as in struct; None: the header is damaged."""
    magic, version = struct.unpack_from(">II", log)
    if magic not in (_MAGIC_LITTLE, _MAGIC_BIG) or version != _FORMAT:
        return None
    order = ">" if magic == _MAGIC_BIG else "<"
    found = struct.unpack_from(">II", log, 24)
    return order if _continue_checksum((0, 0), log[:24], order) == found else None


def _page_size(log: bytes) -> int:
    (size,) = struct.unpack_from(">I", log, 8)
    return 65536 if size == 1 else int(size)


def _frames(log: bytes, order: str, size: int) -> Iterator[_Frame]:
    before = struct.unpack_from(">II", log, 24)
    step = FRAME_HEADER_SIZE + size
    for number, offset in enumerate(range(WAL_HEADER_SIZE, len(log) - step + 1, step), start=1):
        _, pages, *_salts, first, second = struct.unpack_from(">6I", log, offset)
        current = _is_current(log, offset)
        whole = False
        if log[offset + 8 : offset + 16] == log[16:24]:
            checked = _continue_checksum(before, log[offset : offset + 8], order)
            body = log[offset + FRAME_HEADER_SIZE : offset + step]
            whole = _continue_checksum(checked, body, order) == (first, second)
        before = (first, second)
        yield _Frame(number, current, whole, pages)


def _intended_pages(log: bytes, order: str, size: int, frame: _Frame, sizes: set[int]) -> int:
    """The size field of a bad frame as it was written: that field may be what is damaged.

    If the checksum matches with 0 there, or with one of the *sizes* in other frames, that is the
    written value. Arbitrary values are not tried: the checksum does not detect every change.
    """
    offset = WAL_HEADER_SIZE + (frame.number - 1) * (FRAME_HEADER_SIZE + size)
    before = offset - FRAME_HEADER_SIZE - size + 16 if frame.number > 1 else 24
    start = struct.unpack_from(">II", log, before)
    page = log[offset : offset + 4]
    found = struct.unpack_from(">II", log, offset + 16)
    body = log[offset + FRAME_HEADER_SIZE : offset + FRAME_HEADER_SIZE + size]
    for pages in (frame.pages, 0, *sizes):
        checked = _continue_checksum(start, page + struct.pack(">I", pages), order)
        if _continue_checksum(checked, body, order) == found:
            return pages
    return frame.pages


def _continue_checksum(before: tuple[int, ...], data: bytes, order: str) -> tuple[int, int]:
    """SQLite's checksum of *data*, continued from the checksum *before* it."""
    s0, s1 = before
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for even, odd in zip(words, words, strict=True):
        s0 = (s0 + even + s1) & _MASK
        s1 = (s1 + odd + s0) & _MASK
    return s0, s1
