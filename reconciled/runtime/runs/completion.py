"""What follows from how a run ended: for the queue, the status, the log and the loop detector.

settle() is one synchronous function: nothing can come between an ending and its consequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from reconciled.core.durations import format_duration
from reconciled.core.loop_detector import LoopBegan, LoopEnded, RunFacts
from reconciled.core.queue.entry import Job, Priority
from reconciled.core.resources import Key
from reconciled.core.results import Outcome, Result
from reconciled.runtime.controllers.status import Status
from reconciled.runtime.runs.reconciler_calls import SUCCESSES

if TYPE_CHECKING:
    from reconciled.runtime.context import RuntimeContext
    from reconciled.runtime.controllers.controller import Controller

# Coming back sooner than this counts as "at once" for the loop detector.
SOON = 1.0


class FinishedRun(NamedTuple):
    """How one run ended.

    acted      it opened an operation
    recovered  it settled one that was interrupted, from its pinned inputs
    began      in trio's time
    """

    controller: Controller
    job: Job
    number: int
    result: Result
    acted: bool
    removal: bool
    recovered: bool
    began: float


def finish_run(ended: FinishedRun) -> None:
    """Draw the consequences."""
    outcome = ended.result.outcome
    now = trio.current_time()
    if outcome is Outcome.DONE or outcome is Outcome.AFTER:
        _succeeded(ended, now)
    elif outcome is Outcome.RETRY:
        _failed(ended, now)
    elif outcome is Outcome.TERMINAL:
        ended.controller.lane.terminal(ended.job, now)
        _update_status(ended, now)
        _log_outcome(ended, now, "error", "reconcile.terminal", reason=ended.result.reason)
    elif outcome is Outcome.HELD:
        # Told when it was imposed; only somebody's decision, or a changed spec, asks again.
        ended.controller.lane.terminal(ended.job, now)
        _update_status(ended, now)
    else:
        _interrupted(ended, now)
    if (tell := ended.controller.context.on_outcome) is not None:
        tell(ended.job.key, ended.result, ended.job.failures)


def _succeeded(ended: FinishedRun, now: float) -> None:
    controller, job, result = ended.controller, ended.job, ended.result
    host = controller.context
    if ended.recovered and result.outcome is Outcome.DONE:
        # What is declared now comes after what was begun before.
        controller.lane.add(job.key, now, "recovered", Priority.CHANGED)
    rest = _loop_backoff(ended, now)
    if result.outcome is Outcome.AFTER:
        cause = f"after {format_duration(result.delay)}"
        controller.lane.done_after(job, now, result.delay, cause, backoff=rest)
    else:
        controller.lane.done(job, now, rest)
    if _update_status(ended, now):
        host.logs.report_recovery(job.key)
    if ended.removal and result.outcome is Outcome.DONE:
        _log_outcome(ended, now, "info", "reconcile.removed", message=result.reason or None)
        finish_removal(controller, job.key, now)
    elif ended.recovered:
        _log_outcome(ended, now, "info", "recovery.done", message=result.reason or None)
    elif ended.acted or result.reason:
        _log_outcome(ended, now, "info", "reconcile.done", message=result.reason or None)
    elif host.debugging:
        _log_outcome(ended, now, "debug", "reconcile.done")


def finish_removal(controller: Controller, key: Key, now: float) -> None:
    """The removal of *key* has ended: drop it, or have it run where it is declared again."""
    controller.forget(key)
    if controller.desired.finish_removal(key):
        controller.lane.add(key, now, "declared again", Priority.CHANGED)
    elif not controller.stop.began.is_set():
        # At a reload the successor has the lane, and its own removal of the key to end.
        controller.lane.forget(key)


def _failed(ended: FinishedRun, now: float) -> None:
    delay = ended.controller.lane.failed(ended.job, now)
    if ended.controller.context.stopping:
        delay = None  # the next start tries it: to name a time would be untrue
    _update_status(ended, now)
    _log_outcome(
        ended,
        now,
        "warning",
        "reconcile.failed",
        reason=ended.result.reason,
        failures=ended.job.failures + 1,
        retry_in_s=None if delay is None else round(delay, 1),
    )


def _interrupted(ended: FinishedRun, now: float) -> None:
    controller = ended.controller
    controller.lane.interrupted(ended.job, now)
    controller.context.stop_recorder.record_interrupted(ended.job.key)
    reason = controller.context.stop.reason or controller.stop.reason or "its manifest was removed"
    work = "removal" if ended.removal else None
    _log_outcome(ended, now, "info", "reconcile.interrupted", reason=reason, work=work)


def _loop_backoff(ended: FinishedRun, now: float) -> float:
    """What the loop detector wants: a key that wakes itself is slowed down, and named."""
    job, controller = ended.job, ended.controller
    host = controller.context
    # Its own write of its manifest is noticed after the run, and is as good as a wish to run again.
    again = ended.result.outcome is Outcome.AFTER and ended.result.delay < SOON
    at_once = job.dirty or again or controller.is_self_triggered(job.key)
    if ended.recovered or (not (ended.acted or at_once) and not host.loops):
        return 0.0
    ran = RunFacts(
        acted=ended.acted,
        requeued=at_once,
        spec_changed=job.priority <= Priority.CHANGED and job.key not in controller.self_triggers,
        only_scheduled=controller.scheduled(job.causes),
    )
    verdict = host.loops.record_run(job.key, now, ran)
    if verdict.notice is not None:
        log_loop(host, verdict.notice)
    return verdict.backoff


def _update_status(ended: FinishedRun, now: float) -> bool:
    """Bring the key's status up to date; whether it was not as desired before."""
    controller, key = ended.controller, ended.job.key
    manifest = controller.manifests.get(key)
    if manifest is None and not ended.removal:
        # Nobody declares it any more: there was nothing to look at.
        return False
    status = controller.statuses.get(key)
    if status is None:
        status = controller.statuses[key] = Status()
    failing = bool(status.reason)
    outcome = ended.result.outcome
    status.outcome = outcome
    status.reason = "" if outcome in SUCCESSES else ended.result.reason
    status.ended = now
    return failing


def _log_outcome(ended: FinishedRun, now: float, level: str, event: str, **fields: object) -> None:
    job = ended.job
    shown = {name: value for name, value in fields.items() if value is not None}
    getattr(ended.controller.context.log, level)(
        event,
        key=job.key,
        run=ended.number,
        cause=job.causes[0] if job.causes else "",
        duration_s=round(now - ended.began, 3),
        **shown,
    )


def log_loop(context: RuntimeContext, notice: LoopBegan | LoopEnded) -> None:
    """Say once that a key keeps itself busy, and once that it does not any more."""
    seconds = round(notice.seconds, 1)
    if isinstance(notice, LoopBegan):
        context.log.warning(
            "reconcile.looping",
            key=notice.key,
            runs=notice.runs,
            seconds=seconds,
            reason="it ran so often although nobody changed its spec, and is slowed down:"
            " does it write what it watches, or differ from itself each time?",
        )
    else:
        context.log.info("reconcile.loop_ended", key=notice.key, runs=notice.runs, seconds=seconds)
