"""A stop of the daemon from its begin to the end of the process.

1. Every stop begins in ``Stop.begin``, whatever requested it; from there this module logs it once
   and wakes the dispatcher.
2. The process ends in order, with work left behind, or by the last resort. In each case ordinary
   children are ended, the stop is reported, and the log buffer is written.
3. The exit codes are those of the contract: 0, 1, 3 and 70; 1 outranks 3.
4. Where the state directory was deleted, moved or exchanged, another daemon may work with what is
   at its path: everything is stopped at once, critical operations too, and no report is written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import attrs

from reconciled.core.exit_codes import CUT, DONE, FAILED, HUNG
from reconciled.core.stages import Stage
from reconciled.observe import stop_report
from reconciled.observe.stop_report import StopReport
from reconciled.observe.task_tree import frames_of
from reconciled.runtime.context import RuntimeContext
from reconciled.signal_handlers import STOP_SIGNALS
from reconciled.stop import Cut, Work
from reconciled.stop.last_resort import Blocked
from reconciled.stop.stop import first_error

# The innermost frames of what blocks the loop that one log line shows.
FRAMES = 6


@attrs.define(eq=False)
class Shutdown:
    """How one daemon stops; it calls at most one of the methods that end the process."""

    context: RuntimeContext
    crashed: bool = attrs.field(default=False, init=False)
    # Why the state directory was found lost; empty: it was not.
    state_lost: str = attrs.field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self.context.stop.on_begin = self._handle_begin
        self.context.stop.registry.on_cleanup_cut = self._log_cleanup_cut

    # -- begin ---------------------------------------------------------------

    def begin_stop(self, reason: str, number: int | None = None, at: float | None = None) -> None:
        """Begin a stop for *reason*, or for the signal *number*. Later calls change nothing.

        at  when it was requested, in trio's time: the limits count from there. None: now
        """
        if number is not None and self.context.stop.stage is Stage.RUNNING:
            self.context.stop_recorder.signal = number
        self.context.stop.begin(reason, at=at)

    def handle_crash(self, error: BaseException) -> None:
        """Log *error*, which ended a task of the daemon itself, and stop with exit code 1."""
        self.context.log.critical("daemon.crashed", exc_info=error)
        self.crashed = True
        self.context.stop.crash(f"crash: {first_error(error)!r}")

    def check_state(self) -> None:
        """Stop everything if the state directory was deleted, moved or exchanged."""
        if not self.state_lost and self._is_state_lost():
            self.context.stop.abort(self.state_lost)

    def _is_state_lost(self) -> bool:
        """Whether the state directory is lost, now or earlier; logged the first time."""
        if not self.state_lost:
            self.state_lost = self.context.state_lost()
            if self.state_lost:
                self.context.log.critical("state.lost", reason=self.state_lost)
        return bool(self.state_lost)

    def _handle_begin(self) -> None:
        """Log what began the stop, what it waits for and how long at most; wake the dispatcher."""
        stop = self.context.stop
        limits = stop.limits
        by = "signal" if self.context.stop_recorder.signal is not None else "reason"
        critical = [section.name for section in stop.all_sections()]
        self.context.log.info(
            "stop.began",
            **{by: stop.reason},
            running=len(list(stop.all_works())),
            critical=len(critical),
            drain_s=limits.drain,
            critical_s=limits.critical,
            cleanup_s=limits.cleanup,
        )
        # Otherwise it would sleep until the next key is due.
        self.context.queue.wake()

    def _log_cleanup_cut(self, cut: Cut) -> None:
        self.context.log.warning("cleanup.cut", key=cut.key or cut.owner, reason=str(cut))

    # -- end -----------------------------------------------------------------

    def finish(self) -> int:
        """Report the stop after every task has ended; the exit code."""
        stop = self.context.stop
        lost = self.context.operations.journal.pending
        for record in lost:
            reason = "its outcome was not made durable: the next start finds it interrupted"
            self.context.log.error(
                "operation.outcome_lost", key=record.key, operation=record.id, reason=reason
            )
        members_left = any(each.child is not None for each in self.context.children.remaining())
        code = CUT if stop.registry.cut_count or lost or members_left else DONE
        code = self._outranked(code)
        self._report(code)
        return code

    def _outranked(self, code: int) -> int:
        """FAILED after a crash, or if the state directory is lost; otherwise *code*."""
        return FAILED if self._is_state_lost() or self.crashed else code

    def exit_leaving_work(self, works: Sequence[Work]) -> None:
        """End the process while *works* still run after their cancellation and cleanup.

        Does not return. trio cannot abandon a task: one in a thread, or in a shield of a plugin,
        would keep the process without limit.
        """
        for work in works:
            self.context.log.error(
                "stop.left_behind",
                key=work.key,
                task=work.name,
                where=frames_of(work.task)[:FRAMES],
                reason="it ignores its cancellation",
            )
        code = self._outranked(CUT)
        self._report(code, kill=True)
        self.context.logs.close()
        os._exit(code)

    def collapse(self, error: BaseException) -> int:
        """Report a failure of the event loop itself, which ended every task; the exit code."""
        cause = error.__cause__ or error
        self.context.log.critical("daemon.crashed", reason=f"the event loop failed: {cause!r}")
        self.context.log.debug("daemon.traceback", exc_info=error)
        self._report(FAILED, kill=True)
        return FAILED

    def log_blocked(self, blocked: Blocked) -> None:
        """Log, in the last resort's thread, that the loop is blocked."""
        self.context.logs.log_from_thread(
            "error",
            "loop.blocked",
            blocked_s=round(blocked.seconds, 1),
            task=blocked.task,
            where=list(blocked.where[-FRAMES:]),
            reason="is blocking the event loop: add an await, or use a thread",
        )

    def exit_hung(self, blocked: Blocked) -> None:
        """Report the stop and end the process, in the last resort's thread. Does not return."""
        logs = self.context.logs
        logs.log_from_thread(
            "critical",
            "stop.hung",
            blocked_s=round(blocked.seconds, 1),
            task=blocked.task,
            where=list(blocked.where),
            reason="the event loop is blocked: the last resort ends the process",
        )
        for number, at in self.context.signals.received.copy():
            if number in STOP_SIGNALS:
                self.context.stop_recorder.record_signal(number, at)
        self._report(HUNG, kill=True, stacks=blocked.where, hung=True)
        logs.close()
        os._exit(HUNG)

    def _report(
        self,
        code: int,
        *,
        kill: bool = False,
        stacks: Sequence[str] = (),
        hung: bool = False,
    ) -> None:
        context = self.context
        # Read before they are killed: how fast they end must not decide which are reported.
        left = context.children.remaining()
        killed = (
            frozenset(child.pid for child in context.children.end_all()) if kill else frozenset()
        )
        report = context.stop_recorder.report(
            code,
            operations=context.operations.journal.list_open(),
            left=left,
            killed=killed,
            stacks=stacks,
            drops=context.logs.sink.statistics().dropped,
        )
        problem = self.state_lost or context.state_lost()
        if not problem:
            problem = stop_report.write(report, context.state, context.logs.redactor.redact)
        fields = {
            "exit_code": code,
            "duration_s": round(report.duration_s, 3),
            "stage": max((stage for stage, _ in report.stages), default=Stage.RUNNING).name,
            "interrupted": len(report.interrupted),
            "cut": context.stop.registry.cut_count,
            "programs_left": len(report.children),
            "keys_unserved": report.not_served,
            "report": str(context.state / stop_report.TEXT_NAME),
        }
        if self.state_lost:
            del fields["report"]
        meaning = "" if self.state_lost else stop_report.describe_exit_code(code)
        if reason := "; ".join(filter(None, (meaning, problem))):
            fields["reason"] = reason
        if code != DONE and report.operations:
            fields["commands"] = ["reconciled journal list"]
        level = "info" if code == DONE else "error"
        if hung:
            context.logs.log_from_thread(level, "stop.ended", **fields)
            return
        self._log_unfinished(report)
        getattr(context.log, level)("stop.ended", **fields)

    def _log_unfinished(self, report: StopReport) -> None:
        """Log each program that still runs and each operation that was cut, by its key."""
        log = self.context.log
        for each in report.children:
            owner = {"key": each.key} if each.key else {}
            log.warning(
                "program.still_running",
                **owner,
                pid=each.pid,
                program=each.argv0,
                outcome=each.outcome.value,
            )
        ids = {each.key: each.id for each in report.operations}
        for cut in self.context.stop.registry.cuts:
            log.error(
                "operation.cut",
                key=cut.key or cut.owner,
                operation=ids.get(cut.key),
                reason=str(cut),
            )
