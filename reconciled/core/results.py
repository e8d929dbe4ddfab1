"""How a run ended: what a reconciler returns, and the outcome that the daemon records."""

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
    """What a reconciler returns. Made by done(), after(), retry() and terminal()."""

    outcome: Outcome
    reason: str = ""
    delay: float = 0.0  # seconds, for AFTER


_DONE = Result(Outcome.DONE)


def done(message: str = "") -> Result:
    """As desired now. *message* says what was done, for the log; empty: nothing was done."""
    return Result(Outcome.DONE, message) if message else _DONE


def after(delay: float | str, message: str = "") -> Result:
    """As desired now; run again in *delay* (seconds, or a duration like ``"90s"``)."""
    seconds = parse_duration(delay) if isinstance(delay, str) else float(delay)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"after() takes a finite delay of at least 0 s, got {delay!r}")
    return Result(Outcome.AFTER, message, seconds)


def retry(reason: str) -> Result:
    """Not as desired, and worth trying again with backoff."""
    return Result(Outcome.RETRY, reason)


def terminal(reason: str) -> Result:
    """Not as desired, and never will be with this spec: retried only when the spec changes."""
    return Result(Outcome.TERMINAL, reason)
