"""The life of one run: from a job of the queue to an outcome, whatever the plugin does.

A run that begins has its name, its scope and its timeout from ``stop.Work``; how it ends is
settled in one synchronous function, so that no cancellation can come in between.
"""

from __future__ import annotations

import shutil
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from reconciled.core.durations import format_duration
from reconciled.core.jobs import Job, Priority
from reconciled.core.loops import LoopBegan, LoopEnded, Ran
from reconciled.core.problems import Invalid
from reconciled.core.resources import Key, Manifest, Origin
from reconciled.core.results import Outcome, Result, done, terminal
from reconciled.runtime.outcomes import (
    INTERRUPTED,
    Failure,
    cancellation_in,
    checked,
    failure_of,
    result_of_cancelled,
)
from reconciled.runtime.run import Run
from reconciled.runtime.status import Status
from reconciled.stop import Work

if TYPE_CHECKING:
    from reconciled.runtime.controller import Controller
    from reconciled.runtime.host import Host

# Coming back sooner than this counts as "at once" for the loop detector.
SOON = 1.0


async def run(controller: Controller, job: Job) -> None:
    """Run *job*. The queue gets it back in every case; nothing but a cancellation is raised."""
    host = controller.host
    started = trio.current_time()
    if host.stopping:
        # The signal came after the job was handed out: it never began (invariant 2).
        controller.lane.interrupted(job, started)
        return
    number = host.next_run()
    removal = job.key in controller.removing
    host.log.debug("reconcile.started", key=job.key, run=number, causes=job.causes)
    work = Work(f"reconcile {job.key}", controller.stop, job.key, controller.config.timeout)
    result = INTERRUPTED
    acted = False
    try:
        with work:
            request = await _request(controller, job, number, work, removal=removal)
            if isinstance(request, Result):
                result = request
            else:
                try:
                    result = await _attempt(controller, request, removal=removal)
                finally:
                    acted = request.acted
        if work.scope.cancelled_caught:
            result = result_of_cancelled(work)
    finally:
        _Ended(controller, job, number, result, acted, started, removal).settle()


async def _request(
    controller: Controller, job: Job, number: int, work: Work, *, removal: bool
) -> Run | Result:
    """The request, or the result where there is nothing to ask for."""
    key = job.key
    manifest = controller.manifests.get(key)
    if removal:
        manifest = controller.absent.get(key) or await _remembered(controller.host, key)
    if manifest is None:
        return done()
    try:
        spec = controller.spec_of(key, manifest)
    except Invalid as invalid:
        return terminal(str(invalid))
    return Run(controller.host, job, manifest, spec, number, work)


async def _attempt(controller: Controller, request: Run, *, removal: bool) -> Result:
    host = controller.host
    try:
        if not removal:
            result = checked(await controller.reconciler.reconcile(request))
            if result.outcome in (Outcome.DONE, Outcome.AFTER):
                await request.remember_done()
            return result
        remove = getattr(controller.reconciler, "remove", None)
        result = done("forgotten") if remove is None else checked(await remove(request))
        if result.outcome is Outcome.DONE:
            async with request.work.cleanup("record of the removal"):
                await host.store.forget(request.key)
                await _erase(request)
        return result
    except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for a cancellation
        failure = failure_of(error)
        if failure is None:
            raise
        _tell_internal(controller, request, failure)
        if (cancelled := cancellation_in(error)) is not None:
            raise cancelled from None
        return failure.result


async def _erase(request: Run) -> None:
    """The key's own files go with the key (invariant 14)."""
    for directory in (request.output, request.memory):
        await trio.to_thread.run_sync(partial(shutil.rmtree, directory, ignore_errors=True))


async def _remembered(host: Host, key: Key) -> Manifest | None:
    """What is known of a key whose manifest went while the daemon was down."""
    applied = await host.store.recall(key)
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


def _tell_internal(controller: Controller, request: Run, failure: Failure) -> None:
    """An exception that nobody foresaw: say where it was raised, and whose code that is."""
    if not failure.internal:
        return
    frames = traceback.extract_tb(failure.error.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    request.log.debug("plugin.traceback", exc_info=failure.error)
    request.log.error(
        "plugin.failed",
        plugin=controller.plugin.name,
        version=controller.plugin.version,
        at=at,
        reason=failure.result.reason,
    )


class _Ended:
    """How one run ended; settle() tells the queue, the status, the log and the loop detector."""

    def __init__(  # noqa: PLR0913, PLR0917 - one argument a field
        self,
        controller: Controller,
        job: Job,
        number: int,
        result: Result,
        acted: bool,  # noqa: FBT001
        started: float,
        removal: bool,  # noqa: FBT001
    ) -> None:
        self.controller = controller
        self.job = job
        self.number = number
        self.result = result
        self.acted = acted
        self.removal = removal
        self.now = trio.current_time()
        self.duration = self.now - started

    def settle(self) -> None:
        """Synchronous: nothing can come between an ending and its consequences."""
        outcome = self.result.outcome
        if outcome is Outcome.DONE or outcome is Outcome.AFTER:
            self._succeeded()
        elif outcome is Outcome.RETRY:
            self._failed()
        elif outcome is Outcome.TERMINAL:
            self.controller.lane.terminal(self.job, self.now)
            self._note()
            self._say("error", "reconcile.terminal", reason=self.result.reason)
        else:
            self.controller.lane.interrupted(self.job, self.now)
            self.controller.host.record.interrupted(self.job.key)
            work = "removal" if self.removal else None
            reason = self.controller.host.stop.reason or self.controller.stop.reason
            self._say("info", "reconcile.interrupted", reason=reason or "its manifest", work=work)
        if (tell := self.controller.host.on_outcome) is not None:
            tell(self.job.key, self.result, self.job.failures)

    def _succeeded(self) -> None:
        controller, job, key = self.controller, self.job, self.job.key
        rest = self._rest()
        if self.result.outcome is Outcome.AFTER:
            cause = f"after {format_duration(self.result.delay)}"
            controller.lane.done_after(job, self.now, self.result.delay, cause, rest=rest)
        else:
            controller.lane.done(job, self.now, rest)
        status = controller.statuses.get(key)
        was_failing = status is not None and not status.ready
        self._note()
        level = "info" if self.acted or self.result.reason or self.removal else "debug"
        event = "reconcile.removed" if self.removal else "reconcile.done"
        self._say(level, event, message=self.result.reason or None)
        if was_failing:
            controller.host.logs.recovered(key)
        if self.removal:
            self._gone(key)

    def _gone(self, key: Key) -> None:
        controller = self.controller
        controller.forget(key)
        if controller.desired.removal_ended(key):
            controller.lane.add(key, self.now, "declared again", Priority.CHANGED)
        else:
            controller.lane.forget(key)

    def _failed(self) -> None:
        delay = self.controller.lane.failed(self.job, self.now)
        self._note()
        self._say(
            "warning",
            "reconcile.failed",
            reason=self.result.reason,
            failures=self.job.failures + 1,
            retry_in_s=None if delay is None else round(delay, 1),
        )

    def _rest(self) -> float:
        """What the loop detector wants: a key that wakes itself is slowed down, and named."""
        job, controller = self.job, self.controller
        ran = Ran(
            acted=self.acted,
            at_once=job.pending or (0.0 < self.result.delay < SOON),
            foreign=job.priority <= Priority.CHANGED and job.key not in controller.echoes,
            scheduled=controller.scheduled(job.causes),
        )
        if not ran.counts and not ran.foreign:
            return 0.0
        verdict = controller.host.loops.ran(job.key, self.now, ran)
        if verdict.notice is not None:
            tell_loop(controller.host, verdict.notice)
        return verdict.rest

    def _note(self) -> None:
        statuses = self.controller.statuses
        status = statuses.get(self.job.key)
        if status is None:
            status = statuses[self.job.key] = Status()
        status.outcome = self.result.outcome
        status.reason = "" if status.ready else self.result.reason
        status.ended = self.now
        manifest = self.controller.manifests.get(self.job.key)
        status.observed = manifest.fingerprint if manifest else None

    def _say(self, level: str, event: str, **fields: object) -> None:
        log = self.controller.host.log
        if level == "debug" and not self.controller.host.logs.level == "debug":
            return
        shown = {name: value for name, value in fields.items() if value is not None}
        getattr(log, level)(
            event,
            key=self.job.key,
            run=self.number,
            cause=self.job.causes[0] if self.job.causes else "",
            duration_s=round(self.duration, 3),
            **shown,
        )


def tell_loop(host: Host, notice: LoopBegan | LoopEnded) -> None:
    """Say once that a key keeps itself busy, and once that it does not any more."""
    seconds = round(notice.seconds, 1)
    if isinstance(notice, LoopBegan):
        host.log.warning(
            "reconcile.looping",
            key=notice.key,
            runs=notice.runs,
            seconds=seconds,
            reason="it ran so often although nobody changed its spec, and is slowed down:"
            " does it write what it watches, or differ from itself each time?",
        )
    else:
        host.log.info("reconcile.loop_ended", key=notice.key, runs=notice.runs, seconds=seconds)
