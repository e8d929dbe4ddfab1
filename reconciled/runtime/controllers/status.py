"""The status of one key: the outcome of its last run."""

from __future__ import annotations

from reconciled.core.results import Outcome


class Status:
    """How the last run of a key ended. One object a key, changed in place (memory: 100 k keys).

    outcome  of the last run that was not interrupted; None before the first
    reason   why the key is not as desired; empty: it is
    ended    when that run ended, in trio's time
    """

    __slots__ = ("ended", "outcome", "reason")

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.reason = ""
        self.ended = 0.0

    def __repr__(self) -> str:
        outcome = self.outcome.value if self.outcome else "not run yet"
        return f"<Status {outcome}{': ' + self.reason if self.reason else ''}>"
