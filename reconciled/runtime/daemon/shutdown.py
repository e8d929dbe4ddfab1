"""How the process ends: in order, with work left behind, or by the last resort.

Whichever way it is, ordinary children are ended, the stop is reported, and what is in the log
buffer is written. The exit codes are those of the contract: 0, 1, 3 and 70.
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

# The innermost frames of what blocks the loop that one log line shows.
FRAMES = 6


@attrs.define(eq=False)
class Shutdown:
    """Made with the daemon; each method that leaves does so once."""

    context: RuntimeContext
    crashed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.context.stop.registry.on_cleanup_cut = self._log_cleanup_cut

    # -- while the stop goes on ----------------------------------------------

    def log_stop_began(self, **by: str) -> None:
        """The first line of a stop: *by* what, what it waits for, and how long at most."""
        stop = self.context.stop
        limits = stop.limits
        critical = [section.name for section in stop.all_sections()]
        self.context.log.info(
            "stop.began",
            **by,
            running=len(list(stop.all_works())),
            critical=len(critical),
            drain_s=limits.drain,
            critical_s=limits.critical,
            cleanup_s=limits.cleanup,
        )

    def _log_cleanup_cut(self, cut: Cut) -> None:
        self.context.log.warning("cleanup.cut", key=cut.key or cut.owner, reason=str(cut))

    # -- the ends --------------------------------------------------------------

    def finish(self) -> int:
        """The tree has ended by itself."""
        stop = self.context.stop
        lost = self.context.operations.journal.pending
        for record in lost:
            reason = "its outcome never became durable: the next start finds it interrupted"
            self.context.log.error(
                "operation.outcome_lost", key=record.key, operation=record.id, reason=reason
            )
        code = CUT if stop.registry.cut_count or lost else DONE
        if self.crashed:
            code = FAILED
        self._report(code)
        return code

    def exit_leaving_work(self, works: Sequence[Work]) -> None:
        """Work is still there after its cancellation and cleanup: leave without it.

        Does not return. trio cannot abandon a task; one in a thread or a foreign shield would
        keep the process for as long as it likes.
        """
        for work in works:
            self.context.log.error(
                "stop.left_behind",
                key=work.key,
                task=work.name,
                where=frames_of(work.task)[:FRAMES],
                reason="it ignores its cancellation",
            )
        self._report(CUT, kill=True)
        self.context.logs.close()
        os._exit(CUT)

    def collapse(self, error: BaseException) -> int:
        """The loop itself has broken down, and nothing of the tree runs any more; the exit code."""
        cause = error.__cause__ or error
        self.context.log.critical("daemon.crashed", reason=f"the loop broke down: {cause!r}")
        self.context.log.debug("daemon.traceback", exc_info=error)
        self._report(FAILED, kill=True)
        return FAILED

    def log_blocked(self, blocked: Blocked) -> None:
        """In the last resort's thread: the loop does not turn."""
        self.context.logs.log_from_thread(
            "error",
            "loop.blocked",
            blocked_s=round(blocked.seconds, 1),
            task=blocked.task,
            where=list(blocked.where[-FRAMES:]),
            reason="code in the event loop does not give way: let it await, or use a thread",
        )

    def exit_hung(self, blocked: Blocked) -> None:
        """In the last resort's thread: time is over. Does not return."""
        logs = self.context.logs
        logs.log_from_thread(
            "critical",
            "stop.hung",
            blocked_s=round(blocked.seconds, 1),
            task=blocked.task,
            where=list(blocked.where),
            reason="the event loop does not answer: the process is ended from outside it",
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
        host = self.context
        # Looked at before they are killed: how fast they die must not decide who is reported.
        left = host.children.remaining()
        killed = frozenset(child.pid for child in host.children.end_all()) if kill else frozenset()
        report = host.stop_recorder.report(
            code,
            operations=host.operations.journal.list_open(),
            left=left,
            killed=killed,
            stacks=stacks,
            drops=host.logs.sink.statistics().dropped,
        )
        trouble = stop_report.write(report, host.state, host.logs.redactor.redact)
        fields = {
            "exit_code": code,
            "duration_s": round(report.duration_s, 3),
            "stage": max((stage for stage, _ in report.stages), default=Stage.RUNNING).name,
            "interrupted": len(report.interrupted),
            "cut": host.stop.registry.cut_count,
            "programs_left": len(report.children),
            "keys_unserved": report.not_served,
            "report": str(host.state / stop_report.TEXT_NAME),
        }
        if reason := "; ".join(filter(None, (stop_report.describe_exit_code(code), trouble))):
            fields["reason"] = reason
        if code != DONE and report.operations:
            fields["commands"] = "reconciled journal list   # what the next start recovers"
        level = "info" if code == DONE else "error"
        if hung:
            host.logs.log_from_thread(level, "stop.ended", **fields)
            return
        self._log_left(report)
        getattr(host.log, level)("stop.ended", **fields)

    def _log_left(self, report: StopReport) -> None:
        """A line for each thing that did not end well, by which it can be looked up."""
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
