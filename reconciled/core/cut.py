"""A critical section that was cut off: a value for messages and the stop report."""

from __future__ import annotations

import attrs

from reconciled.core.durations import format_duration

OWN_BUDGET = "its own budget"


@attrs.frozen
class Cut:
    """A critical section that did not get to its end."""

    section: str
    owner: str
    after: float
    budget: float
    reason: str
    key: str = ""

    def __str__(self) -> str:
        # Its milliseconds say how fast the loop was, and nothing about the section.
        after = round(self.after, 1) if self.after >= 1 else self.after
        budget = format_duration(self.budget)
        whose = (
            f"{self.reason} of {budget}"
            if self.reason == OWN_BUDGET
            else f"{self.reason} (budget {budget})"
        )
        return f"{self.section} was cut off after {format_duration(after)} by {whose}"
