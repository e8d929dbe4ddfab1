"""How a run ended: what a reconciler returns, and what the host made of it."""

from __future__ import annotations

import enum
import math

import attrs

from reconciled.core.durations import parse_duration


class Outcome(enum.Enum):
    """How one run ended. INTERRUPTED is neither success nor failure (invariant 8)."""

    DONE = "done"
    AFTER = "after"
    RETRY = "retry"
    TERMINAL = "terminal"
    INTERRUPTED = "interrupted"
    HELD = "held"


@attrs.frozen
class Result:
    """What a reconciler answers. Made by done(), after(), retry() and terminal()."""

    outcome: Outcome
    reason: str = ""
    delay: float = 0.0  # seconds, for AFTER


_DONE = Result(Outcome.DONE)


def done(message: str = "") -> Result:
    """As desired now. *message* says what was done, for the log; empty where nothing was."""
    return Result(Outcome.DONE, message) if message else _DONE


def after(delay: float | str, message: str = "") -> Result:
    """As desired now, but look again in *delay* (seconds, or a duration like ``"90s"``)."""
    seconds = parse_duration(delay) if isinstance(delay, str) else float(delay)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"after() takes a finite delay of at least 0 s, got {delay!r}")
    return Result(Outcome.AFTER, message, seconds)


def retry(reason: str) -> Result:
    """Not as desired, and worth trying again with backoff."""
    return Result(Outcome.RETRY, reason)


def terminal(reason: str) -> Result:
    """Not as desired, and never will be with this spec: tried again only when it changes."""
    return Result(Outcome.TERMINAL, reason)
