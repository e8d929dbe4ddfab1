"""One run, and the critical sections inside it.

A critical section is a shielded cancel scope whose deadline is always finite: the least of
entry + budget, the enclosing section's deadline, and the hard limit of the stop. Because the
budget counts from *entry*, a section is bounded to "at most N seconds" whatever cancels its
surroundings: a stop, a crashed sibling, a caller's timeout. Rejected: a shield that gets its
deadline only when a stop begins (until then it ignores every other cancellation), and moving
the body to a task elsewhere (the caller's locks are released while the body still runs).

Invariants
1. Every shield has a finite deadline, and a section's deadline only ever goes down.
2. A section ends no later than the enclosing section, and no later than the hard limit.
3. A section starts only before STOPPING, or inside another one.
4. Time inside critical sections does not count against the run's timeout.
5. A cleanup gets its allowance even after the hard limit: the allowance counts from the
   cancellation.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, Self

import attrs
import trio

from reconciled.core.errors import CriticalRefused, Overrun
from reconciled.core.stages import OWN_BUDGET, Cut, Stage, StopLimits
from reconciled.stop.registry import Registry, current_registry
from reconciled.stop.section import Section

if TYPE_CHECKING:
    from types import TracebackType

DEFAULT_CLEANUP = 5.0  # seconds, where no Work is around (a plugin's own unit tests)


class SurroundingStop(Protocol):
    """What work needs of the stop around it; a ``Stop``, which lies above this module."""

    limits: StopLimits
    # Set when this stop or one around it begins.
    began: trio.Event
    registry: Registry[Work]

    @property
    def stage(self) -> Stage:
        """The furthest stage of this stop and those around it."""

    @property
    def hard_at(self) -> float:
        """When critical sections are cut at the latest, in trio's time."""

    @property
    def stopping_at(self) -> float:
        """When ordinary work was cancelled, in trio's time; inf before."""

    @property
    def reason(self) -> str:
        """Why this stop, or the outermost one around it, began; empty before."""

    @property
    def is_requested(self) -> bool:
        """Whether it began on request, and not because of a crash."""

    def enter(self, work: Work) -> None:
        """*work* begins, in the current task."""

    def leave(self, work: Work) -> None:
        """*work* has ended."""


@attrs.define(eq=False)
class Work:
    """A unit of work that a stop knows by name: one run of one key.

    Used as a context manager around the run, in the task that does it. Its scope is the
    innermost of the nested stops; a timeout is that scope's deadline.
    """

    name: str
    stop: SurroundingStop
    key: str = ""
    timeout: float = math.inf
    began_at: float = attrs.field(default=0.0, init=False)
    scope: trio.CancelScope = attrs.field(init=False)
    task: trio.lowlevel.Task = attrs.field(init=False)
    sections: list[Section] = attrs.field(factory=list, init=False)
    # When the last critical section closed: a cleanup's allowance counts from there.
    closed_at: float = attrs.field(default=-math.inf, init=False)
    # The last section, open or not, and whether one was cut: for the report.
    last_section: Section | None = attrs.field(default=None, init=False)
    cut: Cut | None = attrs.field(default=None, init=False)
    # What was left of the timeout when the first section opened.
    _timeout_left: float = attrs.field(default=math.inf, init=False)

    def __repr__(self) -> str:
        return f"<Work {self.name}: {self.stop.stage.name}, {len(self.sections)} critical>"

    def __enter__(self) -> Self:
        self.began_at = now = trio.current_time()
        self.scope = scope = trio.CancelScope(deadline=now + self.timeout)
        self.task = trio.lowlevel.current_task()
        self.stop.enter(self)
        scope.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.stop.leave(self)
        # mypy types CancelScope.__exit__ as bool; True swallows our own cancellation only.
        return self.scope.__exit__(kind, error, trace)

    @asynccontextmanager
    async def critical(self, name: str, *, budget: float) -> AsyncIterator[Section]:
        """Run the body to its end, or for *budget* seconds, cancelled or not.

        Raises trio.Cancelled at entry if work here is already cancelled or the stop has
        reached STOPPING (unless a section encloses this one). Raises Overrun if the body was
        cut off. The budget includes waiting: take locks and limiters before.

        A cancellation that arrived meanwhile is delivered at the next checkpoint *after* the
        block, as usual in trio. Rejected: delivering it on leaving. It would interrupt a run
        whose effect is complete before the run can return that, and the effect would be
        repeated; a step that begins something new is checked by admit() in any case.
        """
        await self.admit(name)
        section = self._open(name, budget)
        failed = True
        try:
            with section.scope:
                yield section
                failed = False
        finally:
            cut = self._close(section, failed=failed or section.scope.cancelled_caught)
        if cut is not None:
            raise Overrun(cut)

    async def admit(self, name: str) -> None:
        """Refuse to start *name* once the stop has reached STOPPING, by cancelling this work.

        Raises trio.Cancelled, or CriticalRefused inside a shield that is not a section's.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.stop.stage < Stage.STOPPING or self.stop.registry.covering_section() is not None:
            return
        # A retry loop would catch an exception type of our own; it does not catch a cancellation.
        self.scope.cancel(reason=f"stop: {name!r} refused")
        await trio.lowlevel.checkpoint_if_cancelled()
        raise CriticalRefused(f"{self.name}: {name!r} cannot start: stop in progress")

    def _open(self, name: str, budget: float) -> Section:
        if not 0 < budget < math.inf:
            raise ValueError(f"a budget must be positive and finite, got {budget!r}")
        now = trio.current_time()
        parent = self.stop.registry.covering_section()
        limit = min(self.stop.hard_at, math.inf if parent is None else parent.deadline)
        section = Section(
            name,
            self.name,
            self.key,
            budget,
            now,
            parent,
            trio.CancelScope(deadline=min(now + budget, limit), shield=True),
            len(trio.lowlevel.current_task().child_nurseries),
        )
        self.stop.registry.open_section(section)
        if not self.sections:
            # A deadline that passes inside a shield is irrevocable in trio: the timeout is lifted.
            self._timeout_left = self.scope.deadline - now
            self.scope.deadline = math.inf
        self.sections.append(section)
        self.last_section = section
        return section

    def _close(self, section: Section, *, failed: bool) -> Cut | None:
        """Unregister. The clock decides on a cut: a body may turn Cancelled into its own error."""
        now = trio.current_time()
        self.sections.remove(section)
        self.stop.registry.close_section(section)
        # Not *now*: a cleanup inside the section has used up the allowance already.
        self.closed_at = min(now, section.deadline)
        if not self.sections:
            self.scope.deadline = now + self._timeout_left
        if not failed or now < section.deadline:
            return None
        by = section.cut_reason or self._deadline_reason(section)
        spent = now - section.opened_at
        cut = Cut(section.name, self.name, spent, section.budget, by, self.key)
        self.cut = cut
        self.stop.registry.record_cut(cut)
        return cut

    def _deadline_reason(self, section: Section) -> str:
        if section.deadline >= self.stop.hard_at:
            return "the hard limit of the stop"
        if section.deadline < section.opened_at + section.budget:
            return "the enclosing section"
        return OWN_BUDGET

    @asynccontextmanager
    async def cleanup(self, name: str) -> AsyncIterator[bool]:
        """A small shielded budget for awaiting in ``finally`` blocks: always admitted.

        Raises nothing of its own: the exception that led to the cleanup matters more. An overrun
        is reported to the registry, and the daemon logs it.
        """
        opened_at = trio.current_time()
        with cleanup_scope() as scope:
            yield True
        if scope.cancelled_caught:
            now = trio.current_time()
            # Negative where earlier cleanups of this work have used up the allowance.
            allowed = max(0.0, scope.deadline - opened_at)
            self.stop.registry.record_cleanup_cut(
                Cut(
                    f"cleanup {name}",
                    self.name,
                    now - opened_at,
                    allowed,
                    "its allowance",
                    self.key,
                )
            )

    def cleanup_deadline(self, section: Section | None = None) -> float:
        """When the cleanup allowance of code under *section*, or of the whole run, ends."""
        now = trio.current_time()
        since = now
        if section is not None:
            since = min(now, section.deadline)
        elif self.stop.stage >= Stage.STOPPING:
            since = min(now, max(self.stop.stopping_at, self.closed_at))
        elif self.scope.deadline <= now:
            since = max(self.scope.deadline, self.closed_at)
        return since + self.stop.limits.cleanup


def cleanup_scope(default: float = DEFAULT_CLEANUP) -> trio.CancelScope:
    """A shielded scope with what the current work has left of its cleanup allowance.

    *default* seconds where no work is around. Enter it at once: its deadline is absolute.
    """
    registry: Registry[Work] | None = current_registry.get(None)
    work = None if registry is None else registry.current_work()
    if registry is None or work is None:
        return trio.CancelScope(deadline=trio.current_time() + default, shield=True)
    return trio.CancelScope(
        deadline=work.cleanup_deadline(registry.covering_section()), shield=True
    )
