"""The verbs of the control socket, and the reasons why the daemon is not ready.

Each verb gets the peer that sent it, and returns the exit code and the output lines of its
command. A verb that only reads (``status``, ``queue``) would be one more entry of the table.
"""

from __future__ import annotations

import attrs

from reconciled.control.listening_sockets import Peer
from reconciled.control.protocol import ControlReply
from reconciled.control.server import Verb
from reconciled.core.errors import RequestRefused
from reconciled.core.exit_codes import DONE, INVALID
from reconciled.core.stages import Stage
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.daemon.callers import find_calling_operation
from reconciled.runtime.daemon.commands import STOP_IN_PROGRESS, Commands

_STAGES = {
    Stage.RUNNING: "running",
    Stage.DRAINING: "draining: what runs may finish",
    Stage.STOPPING: "stopping: only critical operations continue",
    Stage.HARD: "at its hard limit: everything is cut",
}


@attrs.define(eq=False)
class ControlVerbs:
    """The verbs of one daemon."""

    context: RuntimeContext
    commands: Commands

    def table(self) -> dict[str, Verb]:
        """Every verb, by its name."""
        return {"reload": Verb(self.reload), "stop": Verb(self.stop, {"now": bool})}

    def _record_caller(self, peer: Peer, verb: str) -> None:
        """Record that a program of an open operation requested *verb*, if one did.

        An interruption by it counts against max_recoveries like a kill: the operation would stop
        each of its attempts for ever. The note is written beside the stop, which must not wait for
        a disk that is full.
        """
        operation = find_calling_operation(peer.pid)
        journal = self.context.operations.journal
        if self.context.stopping or journal.find(operation) is None:
            return
        self.context.own_requests[operation] = verb
        self.context.log.warning(
            "operation.own_request", operation=operation, verb=verb, pid=peer.pid
        )
        self.context.start_background("own request", journal.note_own_request, operation, verb)

    async def reload(self, peer: Peer) -> ControlReply:
        """Reload, and report its result. Waits until the start is over. Raises RequestRefused."""
        await self.commands.started.wait()
        self._record_caller(peer, "reload")
        request = self.commands.reload()
        if request is None:
            raise RequestRefused(STOP_IN_PROGRESS)
        result = await request.wait_finished()
        if result.reason:
            raise RequestRefused(result.reason)
        if result.problems:
            problems = [str(each) for each in result.problems]
            return ControlReply(
                INVALID, (*problems, "rejected: the previous configuration stays in force")
            )
        return ControlReply(DONE, result.lines)

    async def stop(self, peer: Peer, *, now: bool = False) -> ControlReply:
        """Begin a stop, or with *now* take it one stage further; replies when it has begun.

        Waits until the start is over.
        """
        await self.commands.started.wait()
        self._record_caller(peer, "stop")
        if now:
            self.commands.escalate(f"stop --now by uid {peer.uid}")
        else:
            self.commands.stop(f"stop by uid {peer.uid}")
        # No wait from here to the reply: a daemon without work ends at once.
        return ControlReply(DONE, (f"The daemon is {_STAGES[self.context.stop.stage]}.",))

    def not_ready_reasons(self) -> list[str]:
        """Why the daemon does not take work at the moment; empty: it is ready.

        A stalled controller is not one: the others work, and a restart would not help.
        """
        if self.context.stopping:
            return [f"stopping: {self.context.stop.reason or 'a signal was received'}"]
        reasons = []
        if not self.context.ready:
            reasons.append("starting: not every source has been read yet")
        if self.context.pause_reason:
            reasons.append(f"paused: {self.context.pause_reason}")
        return reasons
