"""The epoch outside the store, in ``STATE/epoch``: a damaged store must not set it back.

It is written after the commit that begins an epoch and before any program learns that epoch: a
crash in between only skips a number.
"""

from __future__ import annotations

from pathlib import Path

from reconciled.durability import replace

NAME = "epoch"


def read_epoch(state: Path) -> int:
    """The last epoch that was begun in *state*; 0: none, or the file is damaged. Raises OSError."""
    try:
        content = (state / NAME).read_bytes().strip()
    except FileNotFoundError:
        return 0
    return int(content) if content.isdigit() else 0


def write_epoch(state: Path, epoch: int) -> None:
    """Record *epoch* durably. Raises OSError."""
    replace(state / NAME, f"{epoch}\n".encode())
