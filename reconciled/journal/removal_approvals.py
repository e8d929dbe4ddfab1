"""Held removals and their approval, as two files for each controller below ``STATE/removals``.

``NAME.held``, written by the daemon, lists the removals that wait. ``NAME.allow``, written by
``reconciled allow`` with the daemon up or down, approves exactly the keys in it, once. Each side
has a file of its own: neither overwrites what the other one wrote, and no socket is needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from reconciled.core.resources import Key
from reconciled.durability import replace
from reconciled.journal.decision_files import DecisionFiles, not_ours

DIRECTORY = "removals"
MAX_BYTES = 16 * 1024 * 1024  # room for every key that a controller may own


@attrs.frozen
class PendingApproval:
    """The removals of one controller that wait for a person's decision."""

    controller: str
    keys: tuple[Key, ...]
    owned: int


def approval_files(state: Path) -> DecisionFiles:
    """The approvals below *state*, each named after its controller."""
    return DecisionFiles(state / DIRECTORY, ".allow", MAX_BYTES)


def write_approval(state: Path, held: PendingApproval) -> None:
    """Approve exactly the keys of *held*; durable when this returns. Raises OSError."""
    data = json.dumps({"keys": list(held.keys)}).encode()
    approval_files(state).submit(held.controller, data)


def read_approval(files: DecisionFiles, file: Path) -> frozenset[Key]:
    """The keys that *file* approves.

    Raises OSError, or ValueError for content that reconciled does not write.
    """
    return frozenset(_keys(files.read(file), file))


def write_held(state: Path, held: PendingApproval) -> None:
    """Replace NAME.held; durable when this returns. Raises OSError."""
    data = json.dumps({"keys": list(held.keys), "owned": held.owned}).encode()
    approval_files(state).make_directory()
    replace(_held_file(state, held.controller), data)


def remove_held(state: Path, controller: str) -> bool:
    """Remove NAME.held; False if there was none. Raises OSError."""
    try:
        _held_file(state, controller).unlink()
    except FileNotFoundError:
        return False
    return True


def read_pending(state: Path, controller: str) -> PendingApproval | None:
    """The removals of *controller* that wait, as the daemon wrote them; None: none wait.

    Raises OSError, or ValueError for content that the daemon does not write.
    """
    file = _held_file(state, controller)
    try:
        data = approval_files(state).read(file)
    except FileNotFoundError:
        return None
    owned = data.get("owned")
    if not isinstance(owned, int):
        raise not_ours(file)
    return PendingApproval(controller, tuple(_keys(data, file)), owned)


def _held_file(state: Path, controller: str) -> Path:
    return state / DIRECTORY / f"{controller}.held"


def _keys(data: dict[str, Any], file: Path) -> list[Key]:
    keys = data.get("keys")
    if isinstance(keys, list) and all(isinstance(key, str) for key in keys):
        return [Key(key) for key in keys]
    raise not_ours(file)
