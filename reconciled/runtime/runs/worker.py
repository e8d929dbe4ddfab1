"""One run of one key: from a job of the queue to an outcome, whatever the plugin does.

1. A run has its name, cancel scope and timeout from ``stop.Work``.
2. It is finished by one synchronous function, ``finish_run``, so that no cancellation can come
   in between.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from reconciled.api import has_method
from reconciled.core.durations import format_duration
from reconciled.core.queue.lane import Job
from reconciled.core.recovery import Observed
from reconciled.core.resources import Key, Manifest, Origin
from reconciled.core.results import Outcome, Result, done, retry
from reconciled.core.stages import Stage
from reconciled.observe.bound_log import BoundLog
from reconciled.runtime.plugin_errors import (
    PluginFailure,
    cancellation_in,
    failure_of,
    stray_cancellation,
)
from reconciled.runtime.runs.completion import FinishedRun, finish_run
from reconciled.runtime.runs.reconciler_calls import SUCCESSES, call_observe, checked_result
from reconciled.runtime.runs.recovery import Recovery
from reconciled.runtime.runs.request import RunRequest
from reconciled.runtime.runs.unattended import Predecessor, UnattendedKeys
from reconciled.stop import Work

if TYPE_CHECKING:
    from reconciled.runtime.context import RuntimeContext
    from reconciled.runtime.controllers.controller import Controller

_INTERRUPTED = Result(Outcome.INTERRUPTED)


async def run_job(controller: Controller, job: Job, name: str, unattended: UnattendedKeys) -> None:
    """Run *job* and return it to the queue in every case. Raises nothing but a cancellation."""
    predecessor = unattended.find_predecessor(controller, job.key)
    if _return_if_blocked(controller, job, predecessor):
        return
    context = controller.context
    key = job.key
    number = context.next_run()
    interrupted = context.operations.journal.find_by_key(key)
    removal = interrupted is None and key in controller.removing
    work = Work(name, controller.stop, key, controller.config.timeout)
    result = _INTERRUPTED
    request: RunRequest | None = None
    try:
        with work:
            if context.debugging:
                context.log.debug("reconcile.started", key=key, run=number, causes=job.causes)
            try:
                if interrupted is not None:
                    log = context.log.bind(key=key, run=number, operation=interrupted.id)
                    result = await Recovery(controller, job, number, work, interrupted, log).run()
                else:
                    request = await _request(controller, job, number, work, removal=removal)
                    result = await _attempt(controller, request, predecessor)
            except BaseException as error:  # noqa: ASYNC103, BLE001 - plugin code
                cancelled = cancellation_in(error)
                stray = None if cancelled is None else stray_cancellation(error)
                failure = failure_of(error) or stray
                if failure is not None and failure.internal:
                    _log_plugin_failure(controller, context.log.bind(key=key, run=number), failure)
                if cancelled is not None and stray is None:
                    # The run was cancelled: an error beside the cancellation is not a failure.
                    raise cancelled from None  # noqa: ASYNC104 - it is the cancellation itself
                if failure is not None and not _cancelled_by_stop(work):
                    result = failure.result
        if work.scope.cancelled_caught:
            result = _result_of_cancelled(work)
    finally:
        acted = request is not None and request.acted
        try:
            recovered = interrupted is not None
            began = work.began_at
            finish_run(
                FinishedRun(controller, job, number, result, acted, removal, recovered, began)
            )
        except Exception as error:
            # A fault of the daemon. The stop has to have its reason before runs are cancelled.
            context.stop.crash(f"crash: {error!r}")
            raise
        unattended.run_ended(controller, key)


def _cancelled_by_stop(work: Work) -> bool:
    """Whether an error of this run counts as its cancellation by a stop (invariant 8).

    Not where its critical part was cut off: then the error is the outcome.
    """
    return work.stop.stage >= Stage.STOPPING and work.cut is None


def _result_of_cancelled(work: Work) -> Result:
    """The result of a run that the scope of *work* cancelled: by a stop, or by its timeout."""
    if work.stop.stage >= Stage.STOPPING:
        return _INTERRUPTED
    return retry(f"Timeout: took longer than {format_duration(work.timeout)}")


def _return_if_blocked(controller: Controller, job: Job, predecessor: Predecessor | None) -> bool:
    """Return the job to the queue where the run must not start; whether it was returned."""
    now = trio.current_time()
    if controller.context.stopping:
        # The signal arrived after the dispatcher started this task (invariant 2).
        controller.lane.interrupted(job, now)
        return True
    if job.key in controller.context.adopting:
        # A program of an earlier daemon is still running; its end queues the key again.
        controller.lane.terminal(job, now)
        return True
    if predecessor is not None and predecessor.active:
        # The end of that program or run queues this key again.
        reason = f"{predecessor.key}, its key under a removed controller, is still at work"
        controller.context.log.warning("reconcile.waiting", key=job.key, reason=reason)
        controller.lane.terminal(job, now)
        return True
    return False


async def _request(
    controller: Controller, job: Job, number: int, work: Work, *, removal: bool
) -> RunRequest | None:
    """The request of the run; None where the key is neither declared nor applied."""
    key = job.key
    manifest = controller.manifests.get(key)
    if removal:
        manifest = controller.absent.get(key) or await _applied_manifest(controller.context, key)
    if manifest is None:
        return None
    spec = controller.spec_of(key, manifest)
    request = RunRequest(controller.context, job, manifest, spec, number, work)
    request.removal = removal
    request.undoable = controller.reconciler.can_undo(spec)
    return request


async def _attempt(
    controller: Controller, request: RunRequest | None, predecessor: Predecessor | None
) -> Result:
    if request is None:
        return done()
    if predecessor is not None:
        return _hold_for_predecessor(request, predecessor)
    if controller.context.store.degraded and (held := await _hold_if_degraded(controller, request)):
        return held
    if request.removal:
        return await _remove(controller, request)
    result = checked_result(await controller.reconciler.reconcile(request))
    if result.outcome in SUCCESSES and not request.is_applied:
        await request.record_applied()
    return result


def _hold_for_predecessor(request: RunRequest, predecessor: Predecessor) -> Result:
    """Hold the run while a removed controller's operation on the same manifest is open."""
    reason = (
        f"operation {predecessor.operation} of {predecessor.key}, its key under a removed"
        " controller, is open: resolve that first"
    )
    request.log.error("reconcile.blocked", operation=predecessor.operation, reason=reason)
    return Result(Outcome.HELD, reason)


async def _hold_if_degraded(controller: Controller, request: RunRequest) -> Result | None:
    """Hold the run after a damaged store was set aside, unless its key is as desired.

    What was applied and which operations were open is unknown then. None: the run may continue.
    """
    if not request.removal:
        observation = await call_observe(controller.reconciler, request)
        if observation is not None and observation.state is Observed.AS_DESIRED:
            return None
    return Result(
        Outcome.HELD,
        "the store was damaged, and operations of this key may have been open: check it, then run"
        ' reconciled journal resolve --all --abandon --why "…"',
    )


async def _remove(controller: Controller, request: RunRequest) -> Result:
    """Run remove() if the reconciler has one, and forget the key once it is done."""
    reconciler = controller.reconciler
    result = (
        checked_result(await reconciler.remove(request))
        if has_method(reconciler, "remove")
        else done("forgotten")
    )
    if result.outcome is Outcome.DONE:
        async with request.work.cleanup("record of the removal"):
            await controller.context.store.forget(request.key)
            await request.erase()
    return result


async def _applied_manifest(context: RuntimeContext, key: Key) -> Manifest | None:
    """The manifest of a key that was deleted while no daemon ran, from the store."""
    applied = await context.store.find_applied(key)
    if applied is None:
        return None
    _, *namespace, name = key.split("/")
    origin = Origin(str(Path(applied.base) / "(removed)"))
    return Manifest(
        applied.kind,
        name,
        applied.spec,
        origin,
        applied.fingerprint,
        namespace=namespace[0] if namespace else None,
    )


def _log_plugin_failure(controller: Controller, log: BoundLog, failure: PluginFailure) -> None:
    """Log an unexpected exception with the plugin and the line of code that raised it."""
    frames = traceback.extract_tb(failure.error.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    log.debug("plugin.traceback", exc_info=failure.error)
    log.error(
        "plugin.failed",
        plugin=controller.plugin.name,
        version=controller.plugin.version,
        at=at,
        reason=failure.result.reason,
    )
