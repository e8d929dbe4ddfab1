"""What is wrong with something a person wrote, and where."""

from __future__ import annotations

import attrs

from reconciled.core.resources import Origin


@attrs.frozen(order=True)
class Problem:
    """One fault: its origin, what is wrong, and what to write instead."""

    origin: Origin = attrs.field(order=lambda origin: (origin.file, origin.line, origin.column))
    message: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"
