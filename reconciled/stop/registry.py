"""What is open in one daemon: work and critical sections by task, and what a stop has cut.

One per daemon: the daemon's stop creates it, and the stops inside share it.

Invariants
1. A task is registered from the entry of its work or section until the exit; in between the
   lookups find it from every task below.
2. Written in the event loop only; ``section_deadlines`` may be read from another thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs
import trio

from reconciled.core.stages import Cut
from reconciled.stop.section import Section

# So many cuts are kept for the report; all are counted.
MAX_CUTS = 100

# The type of the work, which lies above this module: the registry only carries it.
W = TypeVar("W")


@attrs.define(eq=False)
class Registry(Generic[W]):
    """See the module."""

    # Open sections by the task that opened them, outermost first.
    sections: dict[trio.lowlevel.Task, list[Section]] = attrs.field(factory=dict, init=False)
    # Work by the task that runs it.
    works: dict[trio.lowlevel.Task, W] = attrs.field(factory=dict, init=False)
    # Whether the daemon's stop has begun. Before, a cut is the failure of one run, and its alone.
    stopping: bool = attrs.field(default=False, init=False)
    # Critical sections cut during the daemon's stop.
    cuts: list[Cut] = attrs.field(factory=list, init=False)
    cut_count: int = attrs.field(default=0, init=False)
    # Called with work that ends during the daemon's stop.
    on_work_ended: Callable[[W], None] | None = attrs.field(default=None, init=False)
    # Called with each cleanup that overran its allowance, at any time; the daemon logs it.
    on_cleanup_cut: Callable[[Cut], None] | None = attrs.field(default=None, init=False)

    # -- registration --------------------------------------------------------

    def add_work(self, task: trio.lowlevel.Task, work: W) -> None:
        """*work* begins in *task*."""
        self.works[task] = work

    def remove_work(self, task: trio.lowlevel.Task, work: W) -> None:
        """*work* has ended."""
        self.works.pop(task, None)
        if self.on_work_ended is not None and self.stopping:
            self.on_work_ended(work)

    def open_section(self, section: Section) -> None:
        """The current task has opened *section*."""
        self.sections.setdefault(trio.lowlevel.current_task(), []).append(section)

    def close_section(self, section: Section) -> None:
        """The current task closes *section*. Raises RuntimeError if that is not its innermost."""
        task = trio.lowlevel.current_task()
        stack = self.sections[task]
        if stack.pop() is not section:
            raise RuntimeError(f"{section.owner}: critical sections were not closed in order")
        if not stack:
            del self.sections[task]

    def record_cut(self, cut: Cut) -> None:
        """A critical section was cut: during the daemon's stop this changes the exit code."""
        if self.stopping:
            self.cut_count += 1
            if len(self.cuts) < MAX_CUTS:
                self.cuts.append(cut)

    def record_cleanup_cut(self, cut: Cut) -> None:
        """A cleanup did not complete within its allowance."""
        if self.on_cleanup_cut is not None:
            self.on_cleanup_cut(cut)

    # -- lookups -------------------------------------------------------------

    def covering_section(self) -> Section | None:
        """The innermost open section whose shield covers the current task.

        Not a ContextVar: a task started from inside a section into a nursery outside it
        would inherit the variable, but not the shield.
        """
        task = trio.lowlevel.current_task()
        depth: float = math.inf
        while True:
            for section in reversed(self.sections.get(task, ())):
                if section.depth <= depth:
                    return section
            nursery = task.parent_nursery
            if nursery is None:
                return None
            task = nursery.parent_task
            depth = task.child_nurseries.index(nursery)

    def current_work(self) -> W | None:
        """The work that the current task belongs to."""
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        while task is not None:
            if (work := self.works.get(task)) is not None:
                return work
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return None

    def section_deadlines(self) -> list[float]:
        """The deadlines of all open sections, in trio's time; safe in any thread."""
        # Copies, each made in one call: the loop may be changing the originals.
        return [section.deadline for each in list(self.sections.values()) for section in list(each)]


def covering_section() -> Section | None:
    """The innermost open critical section whose shield covers the current task, if any."""
    registry = current_registry.get(None)
    return None if registry is None else registry.covering_section()


# Per run of trio, not per process: several daemons in one test process stay apart.
current_registry: trio.lowlevel.RunVar[Registry[Any] | None] = trio.lowlevel.RunVar(
    "reconciled.stop"
)
