"""A stop in stages, in three sizes: the daemon, one controller, one key.

    RUNNING --begin--> DRAINING --drain over--> STOPPING --hard limit--> HARD

Stops nest like the tree they stop. For a piece of work the furthest stage and the earliest hard
limit of the stops around it count; each stop cancels one scope, its own.

Invariants
1. Stages only go forward; every transition is one of the methods of ``Stop`` below.
2. A crash moves a stop to STOPPING at least, and never to HARD: one failed task must not cut
   the critical operations of others. Only people, the clock and abort() reach HARD.
3. No stage is longer than what it waits for: the owner of the tree leaves it when it is empty.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator

import attrs
import trio

from reconciled.core.stages import Stage, StopLimits
from reconciled.stop.registry import Registry, current_registry
from reconciled.stop.section import Section
from reconciled.stop.work import Work

# Seconds that a task needs beyond its cleanup until it has ended: reaping, unwinding, load.
UNWINDING = 0.5
# Seconds that tasks get to end where the stages woke late, in a process that was halted: more
# than UNWINDING, since everything that became due in the halt runs first, and less than the time
# of the last resort.
LATE_UNWINDING = 1.5


@attrs.define(eq=False)
class Stop:
    """The stage of one size of the tree, and the work that runs under it.

    scope encloses all work of this size, intake what brings it work; the owner of that part of
    the tree enters both.
    """

    name: str
    limits: StopLimits
    parent: Stop | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    intake: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    # What is open in the whole daemon; shared with the stops around this one.
    registry: Registry[Work] = attrs.field(init=False)
    # Set when this stop or one around it begins.
    began: trio.Event = attrs.field(factory=trio.Event, init=False)
    began_at: float = attrs.field(default=math.inf, init=False)
    works: set[Work] = attrs.field(factory=set, init=False)
    children: set[Stop] = attrs.field(factory=set, init=False)
    # Stages with the time at which they were reached, for the report.
    history: list[tuple[Stage, float]] = attrs.field(factory=list, init=False)
    # Called when this stop begins, whatever began it, before anything is cancelled.
    on_begin: Callable[[], None] | None = attrs.field(default=None, init=False)
    # Called when a stage is reached, before anything is cancelled: the report reads the tree then.
    on_stage: Callable[[Stage], None] | None = attrs.field(default=None, init=False)
    # Called when the only run under a key's stop has ended.
    on_empty: Callable[[], None] | None = attrs.field(default=None, init=False)

    _reason: str = attrs.field(default="", init=False)
    _crashed: bool = attrs.field(default=False, init=False)
    _stage: Stage = attrs.field(default=Stage.RUNNING, init=False)
    _hard_at: float = attrs.field(default=math.inf, init=False)
    _stopping_at: float = attrs.field(default=math.inf, init=False)
    # After a late wake-up of the stages: until then the tasks may still end.
    _excused_until: float = attrs.field(default=-math.inf, init=False)
    _stage_changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.registry = Registry() if self.parent is None else self.parent.registry
        if self.parent is not None:
            self.parent.children.add(self)
            if self.parent.began.is_set():
                self.began.set()

    def __repr__(self) -> str:
        return f"<Stop {self.name}: {self.stage.name}, {len(list(self.all_works()))} running>"

    # -- its state ---------------------------------------------------------

    @property
    def stage(self) -> Stage:
        """The furthest stage of this stop and those around it."""
        if self.parent is None:
            return self._stage
        return max(self._stage, self.parent.stage)

    @property
    def hard_at(self) -> float:
        """When critical sections are cut at the latest, in trio's time."""
        if self.parent is None:
            return self._hard_at
        return min(self._hard_at, self.parent.hard_at)

    @property
    def stopping_at(self) -> float:
        """When ordinary work was cancelled, in trio's time; inf before."""
        if self.parent is None:
            return self._stopping_at
        return min(self._stopping_at, self.parent.stopping_at)

    def iter_tree(self) -> Iterator[Stop]:
        """This stop and those inside it."""
        yield self
        for child in self.children:
            yield from child.iter_tree()

    def all_works(self) -> Iterator[Work]:
        """The work under this stop and those inside it."""
        for stop in self.iter_tree():
            yield from stop.works

    def all_sections(self) -> Iterator[Section]:
        """The open critical sections under this stop and those inside it."""
        for work in self.all_works():
            yield from work.sections

    @property
    def reason(self) -> str:
        """Why the outermost stop that has begun, this one or one around it, did; empty before."""
        return (self.parent is not None and self.parent.reason) or self._reason

    @property
    def crashed(self) -> bool:
        """Whether this stop or one around it began because of a crash."""
        return self._crashed or (self.parent is not None and self.parent.crashed)

    @property
    def is_requested(self) -> bool:
        """Whether this stop or one around it began on request, and not because of a crash."""
        around = self.parent is not None and self.parent.is_requested
        return around or (self.began.is_set() and not self.crashed)

    # -- transitions -------------------------------------------------------

    def begin(self, reason: str, *, at: float | None = None) -> None:
        """End the intake, and let running work finish within its drain. Later calls do nothing.

        *at* is when the stop was requested, in trio's time: the limits count from there.
        """
        if self._stage > Stage.RUNNING:
            return
        self._reason = reason
        self.began_at = trio.current_time() if at is None else at
        self._hard_at = self.began_at + self.limits.critical
        if self.parent is None:
            self.registry.stopping = True
        if self.on_begin is not None:
            self.on_begin()
        self._enter_stage(Stage.DRAINING)
        self.intake.cancel(reason=f"stop: {reason}")
        for section in self.all_sections():
            section.clamp(self._hard_at)
        for stop in self.iter_tree():
            stop.began.set()
        if self.limits.drain <= 0:
            self.end_drain("no drain configured")

    def end_drain(self, reason: str) -> None:
        """Cancel ordinary work now. Does nothing except in DRAINING."""
        if self._stage is not Stage.DRAINING:
            return
        self._stopping_at = trio.current_time()
        self._enter_stage(Stage.STOPPING)
        self.scope.cancel(reason=f"stop: {self._reason}, {reason}")

    def cut(self, reason: str) -> None:
        """Cut open critical sections now; their cleanups still get their allowance."""
        if self._stage is not Stage.STOPPING:
            return
        self._hard_at = min(self._hard_at, trio.current_time())
        self._enter_stage(Stage.HARD)
        for section in list(self.all_sections()):
            section.cut(reason)

    def escalate(self, reason: str) -> None:
        """Go one stage on, at a person's request."""
        if self._stage is Stage.RUNNING:
            self.begin(reason)
        elif self._stage is Stage.DRAINING:
            self.end_drain(reason)
        else:
            self.cut(reason)

    def crash(self, reason: str) -> None:
        """A part of the tree failed: go to STOPPING, and not beyond it."""
        self._crashed = True
        self.begin(reason)
        self.end_drain(reason)

    def abort(self, reason: str) -> None:
        """Go to HARD at once: this process has lost the right to work, critical or not.

        Each task still gets its cleanup.
        """
        self.begin(reason)
        self.end_drain(reason)
        self.cut(reason)

    def _enter_stage(self, stage: Stage) -> None:
        self._stage = stage
        if self.on_stage is not None:
            self.on_stage(stage)
        self.history.append((stage, trio.current_time()))
        self._stage_changed.set()
        self._stage_changed = trio.Event()

    # -- running -----------------------------------------------------------

    async def guard(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        """Run ``function(*args)``; if it fails, begin the stop before siblings are cancelled.

        A nursery that cancels its children for a failed sibling gives no reason: here a crash
        becomes a stop with a reason and a hard limit. A cancellation does not count as a crash.
        """
        try:
            await function(*args)
        except BaseException as error:
            others = BaseExceptionGroup("", [error]).split(trio.Cancelled)[1]
            if others is not None:
                self.crash(f"crash: {first_error(others)!r}")
            raise

    async def run_stages(self, on_stragglers: Callable[[list[Work]], None]) -> None:
        """Move the stop from stage to stage by the clock; cancelled when the tree is empty.

        *on_stragglers* is called with the work that is still running after its cleanup: trio
        cannot abandon a task, so the daemon exits without it.
        """
        while self._stage is Stage.RUNNING:
            await self._stage_changed.wait()
        drain = min(self.limits.drain, self.limits.critical)
        await self._wait_until(self.began_at + drain, Stage.STOPPING)
        self.end_drain("drain over")
        while self.stage < Stage.HARD and (late := self._latest_end()) > trio.current_time():
            await self._wait_until(min(late, self.hard_at), Stage.HARD)
            if trio.current_time() >= self.hard_at:
                self.cut("the hard limit of the stop")
        while (late := self._latest_end()) > trio.current_time():
            await self._wait_until(late, None)
        if works := list(self.all_works()):
            on_stragglers(works)

    async def _wait_until(self, when: float, stage: Stage | None) -> None:
        """Wait until *when*, or until this stop has reached *stage*."""
        with trio.CancelScope(deadline=when):
            while stage is None or self._stage < stage:
                await self._stage_changed.wait()
        # The process was halted, or its loop blocked: the tasks could not run in time, either.
        if (now := trio.current_time()) > when + UNWINDING:
            self._excused_until = now + LATE_UNWINDING

    def _latest_end(self) -> float:
        """When the last of the work has to have ended: its deadlines, cleanup and unwinding."""
        latest = self.stopping_at
        for work in self.all_works():
            if work.sections:
                latest = max(latest, *(section.deadline for section in work.sections))
            latest = max(latest, work.closed_at)
        return max(latest + self.limits.cleanup + UNWINDING, self._excused_until)

    # -- bookkeeping, called by Work ---------------------------------------

    def enter(self, work: Work) -> None:
        """*work* begins, in the current task."""
        self.works.add(work)
        self.registry.add_work(work.task, work)

    def leave(self, work: Work) -> None:
        """*work* has ended."""
        self.works.discard(work)
        self.registry.remove_work(work.task, work)
        if self.scope is work.scope:
            self.detach()
            if self.on_empty is not None:
                self.on_empty()

    def nest(self, work: Work, limits: StopLimits) -> Stop:
        """Create a stop for one running *work* alone, inside this one."""
        stop = Stop(work.name, limits, parent=self, scope=work.scope)
        self.works.discard(work)
        stop.works.add(work)
        work.stop = stop
        return stop

    def detach(self) -> None:
        """Remove this stop from the one around it: everything under it has ended."""
        if self.parent is not None:
            self.parent.children.discard(self)

    def install(self) -> None:
        """Make its registry the one that free functions find in the current trio run."""
        current_registry.set(self.registry)


def first_error(error: BaseException) -> BaseException:
    """The first exception in *error* that is not a group; *error* itself if it is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
