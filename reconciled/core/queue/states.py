"""The vocabulary of the work queue: how urgent an entry is, and which state it is in.

Imports nothing of the queue, so that each of its modules can import this one.
"""

from __future__ import annotations

import enum


class Priority(enum.IntEnum):
    """How urgent an enqueue is; smaller runs first, and no key waits for ever (see ``fifo``)."""

    RECOVERY = 0  # an interrupted operation: before any other work on its key
    ASKED = 1  # requested by a person
    CHANGED = 2  # the spec changed
    RETRY = 3  # the next attempt after a failed run
    RESYNC = 4  # ticks, own writes, an unchanged spec


# An enqueue of this priority or a more urgent one opens a closed gate (see ``delays``).
OPENS_GATE = Priority.CHANGED


class EntryState(enum.Enum):
    """The state of one entry."""

    WAITING = "waiting"
    DELAYED = "delayed"  # until its due time, or until an enqueue that its gate admits
    RUNNING = "running"
    FORGOTTEN = "forgotten"  # running; nothing of it is kept when the run ends
    REMOVED = "removed"  # taken out while waiting; its slot in the fifo is left behind


class KeyState(enum.Enum):
    """The state of a key as a person sees it."""

    WAITING = "waiting"
    RUNNING = "running"
    DIRTY = "dirty"  # running, and another run was requested meanwhile
    DELAYED = "delayed"
    RETRYING = "retrying"  # failed; until its backoff has passed
    TERMINAL = "terminal"  # failed permanently, until its spec changes or a person requests a run
    THROTTLED = "throttled"  # as desired; only its gate is remembered
