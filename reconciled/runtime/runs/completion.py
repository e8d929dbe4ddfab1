"""Completion of a run: its outcome takes effect on the queue, the status, the log and loops.

finish_run() is synchronous: no cancellation can come between the outcome and its effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from reconciled.core.durations import format_duration
from reconciled.core.loop_detector import LoopBegan, LoopEnded, RunFacts
from reconciled.core.queue.lane import Job
from reconciled.core.queue.states import Priority
from reconciled.core.resources import Key
from reconciled.core.results import Outcome, Result
from reconciled.runtime.controllers.status import Status
from reconciled.runtime.runs.reconciler_calls import SUCCESSES

if TYPE_CHECKING:
    from reconciled.runtime.context import RuntimeContext
    from reconciled.runtime.controllers.controller import Controller

# A run that is requeued sooner than this, in seconds, counts as requeued at once for the loop
# detector.
SOON = 1.0


class FinishedRun(NamedTuple):
    """One run with its result.

    acted      it opened an operation
    recovered  it recovered an interrupted operation, with the pinned inputs
    began      when it started, in trio's time
    """

    controller: Controller
    job: Job
    number: int
    result: Result
    acted: bool
    removal: bool
    recovered: bool
    began: float


def finish_run(run: FinishedRun) -> None:
    """Return the job to the queue, and update status, log and loop detector by the outcome."""
    outcome = run.result.outcome
    now = trio.current_time()
    if outcome is Outcome.DONE or outcome is Outcome.AFTER:
        _succeeded(run, now)
    elif outcome is Outcome.RETRY:
        _failed(run, now)
    elif outcome is Outcome.TERMINAL:
        run.controller.lane.terminal(run.job, now)
        _update_status(run, now)
        _log_outcome(run, now, "error", "reconcile.terminal", reason=run.result.reason)
    elif outcome is Outcome.HELD:
        # The hold was logged when it was imposed. Only a person's resolution or a changed spec
        # queues the key again.
        run.controller.lane.terminal(run.job, now)
        _update_status(run, now)
    else:
        _interrupted(run, now)
    if run.recovered and outcome is Outcome.DONE:
        return  # the key is queued again for its present declaration, whose outcome counts
    if (on_outcome := run.controller.context.on_outcome) is not None:
        on_outcome(run.job.key, run.result, run.job.failures)


def _succeeded(run: FinishedRun, now: float) -> None:
    controller, job, result = run.controller, run.job, run.result
    context = controller.context
    if run.recovered and result.outcome is Outcome.DONE:
        # The recovery used the pinned inputs: the present declaration is applied after it.
        controller.lane.add(job.key, now, "recovered", Priority.CHANGED)
    backoff = _loop_backoff(run, now)
    if result.outcome is Outcome.AFTER:
        cause = f"after {format_duration(result.delay)}"
        controller.lane.done_after(job, now, result.delay, cause, backoff=backoff)
    else:
        controller.lane.done(job, now, backoff)
    if _update_status(run, now):
        context.logs.report_recovery(job.key)
    if run.removal and result.outcome is Outcome.DONE:
        _log_outcome(run, now, "info", "reconcile.removed", message=result.reason or None)
        finish_removal(controller, job.key, now)
    elif run.recovered:
        _log_outcome(run, now, "info", "recovery.done", message=result.reason or None)
    elif run.acted or result.reason:
        _log_outcome(run, now, "info", "reconcile.done", message=result.reason or None)
    elif context.debugging:
        _log_outcome(run, now, "debug", "reconcile.done")


def finish_removal(controller: Controller, key: Key, now: float) -> None:
    """End the removal of *key*: forget the key, or queue it where it is declared again."""
    controller.forget(key)
    if controller.desired.finish_removal(key):
        controller.lane.add(key, now, "declared again", Priority.CHANGED)
    elif not controller.stop.began.is_set():
        # At a reload the lane belongs to the successor, which finishes its own removal of the key.
        controller.lane.forget(key)


def _failed(run: FinishedRun, now: float) -> None:
    delay = run.controller.lane.failed(run.job, now)
    if run.controller.context.stopping:
        delay = None  # the retry happens after the next start, at an unknown time
    _update_status(run, now)
    _log_outcome(
        run,
        now,
        "warning",
        "reconcile.failed",
        reason=run.result.reason,
        failures=run.job.failures + 1,
        retry_in_s=None if delay is None else round(delay, 1),
    )


def _interrupted(run: FinishedRun, now: float) -> None:
    controller = run.controller
    controller.lane.interrupted(run.job, now)
    controller.context.stop_recorder.record_interrupted(run.job.key)
    reason = controller.context.stop.reason or controller.stop.reason or "its manifest was removed"
    work = "removal" if run.removal else None
    _log_outcome(run, now, "info", "reconcile.interrupted", reason=reason, work=work)


def _loop_backoff(run: FinishedRun, now: float) -> float:
    """Seconds by which the loop detector delays the next run; a loop is logged."""
    job, controller = run.job, run.controller
    context = controller.context
    # A key's own write of its manifest is noticed after its run; it counts as a request to run
    # again at once.
    again = run.result.outcome is Outcome.AFTER and run.result.delay < SOON
    at_once = job.dirty or again or controller.is_self_triggered(job.key)
    if run.recovered or (not (run.acted or at_once) and not context.loops):
        return 0.0
    facts = RunFacts(
        acted=run.acted,
        requeued=at_once,
        spec_changed=job.priority <= Priority.CHANGED and job.key not in controller.self_triggers,
        only_scheduled=controller.scheduled(job.causes),
    )
    verdict = context.loops.record_run(job.key, now, facts)
    if verdict.notice is not None:
        log_loop(context, verdict.notice)
    return verdict.backoff


def _update_status(run: FinishedRun, now: float) -> bool:
    """Update the key's status; whether the key was failing before."""
    controller, key = run.controller, run.job.key
    if key not in controller.manifests and not run.removal:
        # The key is not declared any more: there is no status to keep.
        return False
    status = controller.statuses.get(key)
    if status is None:
        status = controller.statuses[key] = Status()
    was_failing = bool(status.reason)
    outcome = run.result.outcome
    status.outcome = outcome
    status.reason = "" if outcome in SUCCESSES else run.result.reason
    status.ended = now
    return was_failing


def _log_outcome(run: FinishedRun, now: float, level: str, event: str, **fields: object) -> None:
    job = run.job
    shown = {name: value for name, value in fields.items() if value is not None}
    getattr(run.controller.context.log, level)(
        event,
        key=job.key,
        run=run.number,
        cause=job.causes[0] if job.causes else "",
        duration_s=round(now - run.began, 3),
        **shown,
    )


def log_loop(context: RuntimeContext, notice: LoopBegan | LoopEnded) -> None:
    """Log once that a key is in a hot loop, and once that the loop has ended."""
    seconds = round(notice.seconds, 1)
    if isinstance(notice, LoopBegan):
        context.log.warning(
            "reconcile.looping",
            key=notice.key,
            runs=notice.runs,
            window_s=seconds,
            reason="the key runs repeatedly without a change of its spec, and is slowed down:"
            " check whether its reconciler writes what it watches, or never matches its spec",
        )
    else:
        context.log.info("reconcile.loop_ended", key=notice.key, runs=notice.runs, window_s=seconds)
