"""Recovery: an open operation without a live program is finished before other work on its key.

There is no service or phase for recovery: it takes the place of the key's next run, under the
dispatcher's rules, so that other keys are not delayed.

1. No code of the reconciler runs before the attempt is counted durably (invariant 5).
2. No program of the operation is alive: adoption comes first (see ``adoption``).
3. Recovery uses the pinned inputs; what is declared now is applied in a later run.
4. A decision that cannot be carried out is a hold, with the commands that resolve it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from reconciled.api import has_method
from reconciled.core import recovery as core
from reconciled.core.errors import Invalid, RecordDamaged, StepsDamaged
from reconciled.core.queue.lane import Job
from reconciled.core.recovery import Decision, Facts, Interrupted
from reconciled.core.resources import Manifest, fingerprint_of
from reconciled.core.results import Outcome, Result, done, retry
from reconciled.journal import operation_record
from reconciled.journal.host_identity import HostIdentity
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending, OperationRecord, StepState
from reconciled.observe.bound_log import BoundLog
from reconciled.programs import attempt_fence
from reconciled.programs.steps import read_steps
from reconciled.runtime.operations.interrupted import (
    operation_for_observe,
    operation_for_recover,
)
from reconciled.runtime.operations.operation import Operations, is_interruption, was_cancelled
from reconciled.runtime.operations.pinned import is_removal, pinned_manifest
from reconciled.runtime.runs.reconciler_calls import (
    SUCCESSES,
    call_observe,
    call_recover,
    checked_result,
)
from reconciled.runtime.runs.request import RunRequest
from reconciled.service.credentials import unavailable_reason
from reconciled.stop import Work
from reconciled.threads import in_thread

if TYPE_CHECKING:
    from reconciled.runtime.context import RuntimeContext
    from reconciled.runtime.controllers.controller import Controller


@attrs.define(eq=False)
class Recovery:
    """One attempt to recover one operation, as part of a run of its key."""

    controller: Controller
    job: Job
    number: int
    work: Work
    record: OperationRecord
    log: BoundLog
    # The last attempt does not count against max_recoveries.
    _progressed: bool = attrs.field(default=False, init=False)

    async def run(self) -> Result:
        """Recover the operation; the result of the run.

        Cancelled like any run: the operation remains open, and is recovered again.
        """
        if self._journal.is_closing(self.record.id):
            return retry("the outcome of its operation is not durable yet")
        held = self.record.hold
        if held is not None and not self._lifted(held):
            await self._record_hold_context(held)
            return Result(Outcome.HELD, held.reason)
        if held is not None:
            await self._journal.unhold(self.record.id, keep_count=not held.by_cap)
            self.record = self._journal.find(self.record.id) or self.record
        resolution = self.record.pending_resolution
        self._progressed = await self._has_progressed()
        if hold := self._precondition_hold():
            return await self._hold(hold)
        manifest = pinned_manifest(self.record)
        self._context.logs.redactor.register_all(manifest.spec)
        try:
            spec = self.controller.plugin.spec_of(manifest)
        except Invalid as invalid:
            return await self._hold(core.Hold(f"its pinned spec is not valid any more: {invalid}"))
        await self._begin_attempt()
        try:
            return await self._attempt(manifest, spec, resolution)
        except BaseException as error:
            if self._stop_was_requested() and was_cancelled(error):
                # Not a poison pill: the daemon did not crash, it was asked to stop the run.
                async with self.work.cleanup("count of a recovery"):  # noqa: ASYNC102 - it is a shield
                    await self._record_own_outcome()  # noqa: ASYNC102 - inside it
            raise

    async def _attempt(self, manifest: Manifest, spec: Any, resolution: str) -> Result:
        request = RunRequest(self._context, self.job, manifest, spec, self.number, self.work)
        request.removal = is_removal(self.record)
        request.resume(self.record)
        try:
            interrupted = operation_for_recover(self._operations, self.record, spec)
        except (RecordDamaged, OSError) as error:
            return await self._hold(core.Hold(f"cannot read the program's exit record: {error}"))
        request.interrupted = operation_for_observe(
            self._operations, self.record, self.work, interrupted.ended
        )
        facts = await self._facts(request, interrupted, resolution)
        request.interrupted = None
        request.undoable = facts.can_undo
        decision = core.decide(interrupted, facts)
        self.log.info("recovery.decided", **core.decision_fields(decision))
        return await self._act(request, decision, facts)

    def _stop_was_requested(self) -> bool:
        """Whether a person or manager requested the stop of this run, not its own program."""
        verb = self._context.own_requests.get(self.record.id)
        own = verb == "stop" or (verb == "reload" and not self._context.stopping)
        return self.work.stop.is_requested and not own

    async def _has_progressed(self) -> bool:
        """Whether the last attempt does not count: it did a new step, or was not interrupted."""
        record = self.record
        if record.id in self._context.adopted:
            self._context.adopted.discard(record.id)
            return True
        directory = self._operations.root / record.id
        if record.progressed or not directory.exists():
            return record.progressed
        try:
            steps = await in_thread(partial(read_steps, directory))
        except (StepsDamaged, OSError):
            return False  # the next program that records a step is refused
        return any(step.attempt == record.attempt for step in steps)

    async def _begin_attempt(self) -> None:
        """Count the attempt, and fence programs of older attempts, before any code runs."""
        self.record = await self._journal.count_recovery(
            self.record.id, progressed=self._progressed
        )
        directory = self._operations.root / self.record.id
        if directory.exists():
            fence = partial(attempt_fence.fence, directory, self.record.attempt)
            await in_thread(fence)
        self.log.info(
            "recovery.began",
            name=self.record.name,
            attempt=self.record.attempt,
            last_step=self.record.last_step or None,
        )

    def _precondition_hold(self) -> core.Hold | None:
        """The hold that forbids any attempt here and now; None: there is none."""
        record, controller = self.record, self.controller
        here = HostIdentity.current()
        if record.boot_id and record.boot_id != here.boot_id:
            known = record.machine_id and record.machine_id == here.machine_id
            if not known and not record.pending_resolution:
                return core.Hold(
                    "it was begun on another machine, which may still run it",
                    f"machine {record.machine_id or 'unknown'}, not {here.machine_id or 'unknown'}",
                )
        if record.pinned["kind"] != controller.plugin.kind:
            kind = record.pinned["kind"]
            return core.Hold(
                f"its kind is {kind}, which controller {controller.name} does not take any more"
            )
        recoveries = 0 if self._progressed else record.recoveries
        limit = controller.config.max_recoveries
        return core.check_max_recoveries(recoveries, limit, record.own_request)

    # -- facts -----------------------------------------------------------------

    @property
    def _context(self) -> RuntimeContext:
        return self.controller.context

    @property
    def _journal(self) -> OperationJournal:
        return self._operations.journal

    @property
    def _operations(self) -> Operations:
        return self._context.operations

    def _lifted(self, held: operation_record.Hold) -> bool:
        """Whether present facts lift *held*.

        A controller that runs again lifts a hold for its absence, and a changed spec or changed
        options one by the cap; a person lifts every other one.
        """
        if held.code == operation_record.CONTROLLER_MISSING:
            return True  # the controller runs now
        now = self._hold_context()
        return held.by_cap and bool(held.context and now) and held.context != now

    async def _record_hold_context(self, held: operation_record.Hold) -> None:
        """Add the hold context to a hold that was imposed before the sources were read."""
        if held.by_cap and not held.context and (context := self._hold_context()):
            await self._journal.hold(self.record.id, attrs.evolve(held, context=context))

    def _hold_context(self) -> str:
        """Fingerprint of the declared spec and the options; a hold by the cap is bound to it.

        Empty before the sources were read: at a start recovery comes before their first report,
        and a spec that is not read yet would count as a changed one.
        """
        manifest = self.controller.manifests.get(self.record.key)
        if manifest is None and not self.controller.desired.complete:
            return ""
        declared = None if manifest is None else manifest.fingerprint
        return fingerprint_of([declared, dict(self.controller.config.options)])

    async def _facts(self, request: RunRequest, interrupted: Interrupted, resolution: str) -> Facts:
        reconciler = self.controller.reconciler
        facts = Facts(
            self.controller.config.interrupted,
            reconciler.can_undo(interrupted.spec),
            retry_in=self.controller.config.retry.initial,
        )
        if resolution:
            return attrs.evolve(facts, verdict=_resolution_decision(resolution))
        observation = await call_observe(reconciler, request)
        verdict, error = call_recover(reconciler, interrupted, observation)
        return attrs.evolve(facts, observation=observation, verdict=verdict, recover_error=error)

    # -- acts ------------------------------------------------------------------

    async def _act(self, request: RunRequest, decision: Decision, facts: Facts) -> Result:
        if isinstance(decision, core.Hold):
            return await self._hold(decision)
        if isinstance(decision, core.Complete | core.Abandon):
            complete = isinstance(decision, core.Complete)
            ending = Ending.COMPLETED if complete else Ending.ABANDONED
            return await self._close(request, ending, decision.reason)
        if why := unavailable_reason(request.spec):
            # Only a restart can provide it, and nothing can observe or act without it: attempts
            # would reach the cap, and end in a hold that does not name the secret.
            return await self._hold(core.Hold(f"a secret of its pinned spec is missing: {why}"))
        if isinstance(decision, core.Wait):
            return await self._wait(decision, facts)
        return await self._run_reconciler(request, decision)

    async def _run_reconciler(self, request: RunRequest, decision: Decision) -> Result:
        """Have the reconciler finish the operation, forward or back."""
        if isinstance(decision, core.RollBack):
            return await self._roll_back(request)
        if isinstance(decision, core.Retry):
            await self._journal.reset_steps(self.record.id)
            self.record = self._journal.find(self.record.id) or self.record
            request.resume(self.record)
        if self.record.undoes:
            return await self._undo(request)
        return await self._roll_forward(request)

    async def _wait(self, decision: core.Wait, facts: Facts) -> Result:
        if facts.verdict is None:
            # The observation is unknown: the attempt counts as one without an outcome.
            return retry(decision.reason)
        await self._journal.record_own_outcome(self.record.id)
        # A shorter time, or 0, would be a busy loop of runs and writes.
        seconds = max(decision.seconds, facts.retry_in)
        return Result(Outcome.AFTER, decision.reason, seconds)

    async def _close(self, request: RunRequest, ending: Ending, reason: str) -> Result:
        async with self.work.cleanup("outcome of a recovery"):
            note = self._context.logs.redactor.redact(reason)
            await self._journal.end(self.record.id, ending, note=note)
            await self._operations.close_attempts(self.record.id)
            if ending is Ending.COMPLETED and not self.record.undoes:
                await self._record_outcome(request)
        return done(f"recovered: {ending.value}")

    async def _roll_forward(self, request: RunRequest) -> Result:
        """Run reconcile() or remove(), which continues the operation at the step it had reached."""
        reconciler = self.controller.reconciler
        act = reconciler.remove if request.removal else reconciler.reconcile
        if request.removal and not has_method(reconciler, "remove"):
            # Never reconcile() instead: that would apply what is to be removed.
            return await self._hold(
                core.Hold("it is a removal, and its reconciler has no remove()")
            )
        try:
            result = checked_result(await act(request))
        except Exception as error:
            # Its own outcome resets the count of attempts without one; an interruption does not.
            if not is_interruption(error):
                await self._record_own_outcome()  # noqa: ASYNC120 - then the cancellation is what counts
            raise
        if result.outcome not in SUCCESSES:
            await self._record_own_outcome()
            return result
        if self._journal.find(self.record.id) is not None:
            return await self._close(request, Ending.COMPLETED, "settled by observation")
        await self._record_outcome(request)
        return done(f"recovered: rolled forward{_suffix(result.reason)}")

    async def _record_outcome(self, request: RunRequest) -> None:
        """Record in the store that the spec is applied, or that the key is removed."""
        if request.removal:
            async with self.work.cleanup("record of the removal"):
                await self._context.store.forget(request.key)
                await request.erase()
        elif not request.is_applied:
            await request.record_applied()

    async def _record_own_outcome(self) -> None:
        if self._journal.find(self.record.id) is not None:
            await self._journal.record_own_outcome(self.record.id)

    async def _roll_back(self, request: RunRequest) -> Result:
        """Close the operation and begin the one that undoes it, in one transaction, linked."""
        record = self.record
        steps = [
            {
                "name": step.name,
                "kind": step.kind,
                "done": step.state is StepState.DONE,
                "data": step.data,
            }
            for step in record.steps
            if step.kind != core.StepKind.PURE.value
        ]
        self.record = await self._journal.begin(
            record.key, f"undo {record.name}", record.pinned | {"undo": steps}, undoes=record.id
        )
        self.log.info("operation.began", operation=self.record.id, undoes=record.id)
        await self._operations.close_attempts(record.id)
        request.resume(self.record)
        return await self._undo(request)

    async def _undo(self, request: RunRequest) -> Result:
        """Undo the steps, newest first; each is a step of the undoing operation."""
        reconciler = self.controller.reconciler
        if not has_method(reconciler, "undo"):
            return await self._hold(core.Hold("its reconciler has no undo() any more"))
        async with request.undoing() as operation:
            for step in reversed(self.record.pinned.get("undo", [])):
                view = core.Step(
                    step["name"], core.StepKind(step["kind"]), step["done"], step["data"]
                )
                await operation.step(f"undo {view.name}", partial(reconciler.undo, request, view))
        return done("recovered: rolled back")

    def _can_undo(self) -> bool:
        """Whether to offer --back to a person; a fault of the plugin counts as no."""
        controller = self.controller
        try:
            return controller.reconciler.can_undo(
                controller.plugin.spec_of(pinned_manifest(self.record))
            )
        except Exception:  # noqa: BLE001 - a fault of the plugin must not prevent the hold
            return False

    async def _hold(self, hold: core.Hold) -> Result:
        """Hold the operation durably: its key is blocked until a person resolves it."""
        record = self.record
        commands = hold.commands or core.resolve_commands(
            record.id, can_undo=not record.undoes and self._can_undo()
        )
        async with self.work.cleanup("hold"):
            code = "cap" if hold.by_cap else "decision"
            # Texts of plugins and programs may contain secrets, which the store must not keep.
            reason, evidence = map(self._context.logs.redactor.redact, (hold.reason, hold.evidence))
            await self._journal.hold(
                record.id,
                operation_record.Hold(
                    reason, code, evidence, time.time(), hold.by_cap, self._hold_context()
                ),
            )
        self.log.error(
            "operation.held",
            name=record.name,
            last_step=record.last_step or None,
            reason=hold.reason,
            evidence=hold.evidence,
            commands=list(commands),
        )
        return Result(Outcome.HELD, hold.reason)


def _suffix(reason: str) -> str:
    return f", {reason}" if reason else ""


def _resolution_decision(resolution: str) -> Decision:
    """The decision for a resolution recorded by ``journal resolve``."""
    decisions: dict[str, Decision] = {
        "forward": core.RollForward("resolved by a person"),
        "back": core.RollBack("resolved by a person"),
        "complete": core.Complete("resolved by a person"),
        "abandon": core.Abandon("resolved by a person"),
    }
    return decisions[resolution]
