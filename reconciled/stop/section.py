"""One open critical section: a shield whose deadline is finite and only goes down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio


@attrs.define(eq=False)
class Section:
    """Opened by ``Work.critical()``.

    owner is the name of the work that opened it, key the key that this work runs for.
    """

    name: str
    owner: str
    key: str
    budget: float
    opened_at: float
    parent: Section | None
    scope: trio.CancelScope
    # Nurseries that the task had open at entry: distinguishes a child inside from one outside.
    depth: int
    cut_reason: str = ""
    _early_scopes: list[tuple[trio.CancelScope, float]] = attrs.field(factory=list, init=False)

    def __repr__(self) -> str:
        return f"<Section {self.name} of {self.owner}: {self.remaining:.1f}s left>"

    @property
    def deadline(self) -> float:
        """When it is cut, in trio's time."""
        return self.scope.deadline

    @property
    def remaining(self) -> float:
        """Seconds until it is cut; a stop can only lower it."""
        return self.scope.deadline - trio.current_time()

    def clamp(self, limit: float) -> None:
        """Lower the deadline to *limit*; a deadline is never raised."""
        if limit < self.scope.deadline:
            self.scope.deadline = limit
            for scope, lead in self._early_scopes:
                scope.deadline = min(scope.deadline, limit - lead)

    def cut(self, reason: str) -> None:
        """End it now; *reason* is what the log and the report name."""
        self.cut_reason = reason
        self.clamp(trio.current_time())

    @contextmanager
    def scope_before_deadline(self, lead: float) -> Iterator[trio.CancelScope]:
        """A scope that ends *lead* seconds before the section, also if that is moved down."""
        with trio.CancelScope(deadline=self.deadline - lead) as scope:
            entry = (scope, lead)
            self._early_scopes.append(entry)
            try:
                yield scope
            finally:
                self._early_scopes.remove(entry)
