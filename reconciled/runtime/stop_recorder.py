"""Records a stop while it happens, for the report at its end.

Each run that is still active when the stop begins is named, with its stage, its age and its
innermost frames. The last resort calls report() from its thread, with the loop blocked.
"""

from __future__ import annotations

import datetime as dt
import signal
import time
from collections.abc import Sequence

import attrs
import trio

from reconciled.core.stages import Stage
from reconciled.journal.operation_record import OperationRecord
from reconciled.observe.stop_report import (
    RunningProgram,
    StopOutcome,
    StopReport,
    Straggler,
    UnfinishedOperation,
)
from reconciled.observe.task_tree import frames_of
from reconciled.programs.children import RemainingProcess
from reconciled.stop import Stop, Work

# Frames cost 20 µs for each run: they are read for this many when ordinary work is cancelled.
MAX_WITH_FRAMES = 100
# Runs that are recorded one by one; of the others only the key is recorded.
MAX_NAMED = 2000


@attrs.define(eq=False)
class StopRecorder:
    """Observes the daemon's stop; report() may be called at any time."""

    stop: Stop
    # The signal that began the stop; set by Shutdown.
    signal: int | None = attrs.field(default=None, init=False)
    not_served: int = attrs.field(default=0, init=False)
    _began: dt.datetime | None = attrs.field(default=None, init=False)
    _began_at: float = attrs.field(default=0.0, init=False)  # monotonic
    _running: set[Work] = attrs.field(factory=set, init=False)
    _frames: dict[Work, tuple[str, ...]] = attrs.field(factory=dict, init=False)
    _ended: list[Straggler] = attrs.field(factory=list, init=False)
    _interrupted: set[str] = attrs.field(factory=set, init=False)
    _critical_finished: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.stop.on_stage = self._reached
        self.stop.registry.on_work_ended = self._on_work_ended

    def record_signal(self, number: int, at: float) -> None:
        """Record signal *number*, received at *at* (monotonic), which a hung loop cannot handle."""
        if self._began is None:
            self.signal = number
            self._began = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=time.monotonic() - at)
            self._began_at = at

    def record_interrupted(self, key: str) -> None:
        """The run of *key* was interrupted."""
        self._interrupted.add(key)

    def _reached(self, stage: Stage) -> None:
        if stage is Stage.DRAINING:
            # From the request, which is earlier than now if the loop was busy.
            waited = max(0.0, trio.current_time() - self.stop.began_at)
            self._began = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=waited)
            self._began_at = time.monotonic() - waited
            self._running = set(self.stop.all_works())
            return
        works = sorted(self.stop.all_works(), key=lambda work: not work.sections)
        for work in works[:MAX_WITH_FRAMES]:
            self._frames[work] = tuple(frames_of(work.task))

    def _on_work_ended(self, work: Work) -> None:
        stage = self.stop.stage
        section = work.last_section
        if section is not None and work.cut is None:
            self._critical_finished += 1
        if work.cut is not None:
            outcome = StopOutcome.CUT
        elif stage >= Stage.STOPPING and section is None:
            outcome = StopOutcome.CANCELLED
        else:
            outcome = StopOutcome.FINISHED
        if len(self._ended) < MAX_NAMED:
            self._ended.append(self._straggler(work, stage, outcome))
        self._running.discard(work)
        self._frames.pop(work, None)

    def _straggler(self, work: Work, stage: Stage, outcome: StopOutcome) -> Straggler:
        section = work.last_section
        return Straggler(
            work.name,
            stage,
            max(0.0, time.monotonic() - self._began_at),
            outcome,
            key=work.key,
            operation=section.name if section else "",
            budget_s=section.budget if section else None,
            where=self._frames.get(work, ()),
        )

    def report(  # noqa: PLR0913 - one argument a fact that only the end knows
        self,
        exit_code: int,
        *,
        operations: Sequence[OperationRecord] = (),
        left: Sequence[RemainingProcess] = (),
        killed: frozenset[int] = frozenset(),
        stacks: Sequence[str] = (),
        drops: int = 0,
    ) -> StopReport:
        """The report as of now; runs that are still active count as left behind."""
        stage = self.stop.stage
        behind = [
            self._straggler(work, stage, StopOutcome.LEFT_BEHIND) for work in self.stop.all_works()
        ]
        return StopReport(
            self.stop.reason or "the event loop was blocked",
            (self._began or dt.datetime.now(dt.UTC)).isoformat(timespec="milliseconds"),
            max(0.0, time.monotonic() - self._began_at) if self._began else 0.0,
            exit_code,
            signal=signal.Signals(self.signal).name if self.signal else "",
            stages=tuple((s, max(0.0, at - self.stop.began_at)) for s, at in self.stop.history),
            critical_finished=self._critical_finished,
            stragglers=(*behind, *self._ended),
            interrupted=tuple(sorted(self._interrupted)),
            operations=tuple(
                UnfinishedOperation(each.id, each.key, each.name, each.hold is not None)
                for each in operations
            ),
            not_served=self.not_served,
            children=tuple(_child(each, killed) for each in left),
            stacks=tuple(stacks),
            log_lines_dropped=drops,
        )


def _child(left: RemainingProcess, killed: frozenset[int]) -> RunningProgram:
    process = left.process
    # Programs and their members alike: all are killed.
    if left.child is not None and left.child.pid in killed:
        outcome = StopOutcome.KILLED
    else:
        outcome = StopOutcome.DETACHED if left.detached else StopOutcome.LEFT_BEHIND
    key = left.child.owner.removeprefix("reconcile ") if left.child else ""
    return RunningProgram(process.pid, process.name, outcome, key=key)
