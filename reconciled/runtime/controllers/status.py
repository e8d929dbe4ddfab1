"""What the daemon knows about one key: the conditions that ``status`` and the log speak of."""

from __future__ import annotations

from reconciled.core.results import Outcome


class Status:
    """How the last run of a key ended. One object a key, changed in place (memory: 100 k keys).

    outcome   of the last run that ended by itself; None before the first
    reason    why it is not as desired; empty when it is
    ended     when, on the loop's clock
    """

    __slots__ = ("ended", "outcome", "reason")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.reason = ""
        self.ended = 0.0

    def __repr__(self) -> str:
        outcome = self.outcome.value if self.outcome else "not run yet"
        return f"<Status {outcome}{': ' + self.reason if self.reason else ''}>"
