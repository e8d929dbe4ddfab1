"""What the control socket can be asked, and why the daemon may not be ready.

The table has room for the verbs that only read (``status``, ``queue`` and so on); each gets who
asks, and answers with the exit code and the lines of its command.
"""

from __future__ import annotations

import attrs

from reconciled.control.addresses import Peer
from reconciled.control.protocol import ControlReply
from reconciled.control.server import Verb
from reconciled.core.errors import RequestRefused
from reconciled.core.exit_codes import DONE, INVALID
from reconciled.core.stages import Stage
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.daemon.commands import STOPS_ALREADY, Commands

_WORDS = {
    Stage.RUNNING: "running",
    Stage.DRAINING: "draining: what runs may finish",
    Stage.STOPPING: "stopping: only critical operations go on",
    Stage.HARD: "at its hard limit: everything is cut",
}


@attrs.define(eq=False)
class Verbs:
    """Answers for one daemon."""

    context: RuntimeContext
    commands: Commands

    def table(self) -> dict[str, Verb]:
        """Every verb that the daemon answers to."""
        return {"reload": Verb(self.reload), "stop": Verb(self.stop, {"now": bool})}

    async def reload(self, _: Peer) -> ControlReply:
        """Reload, and tell how it ended. Waits for the start to be over. Raises Refused."""
        await self.commands.started.wait()
        asked = self.commands.reload()
        if asked is None:
            raise RequestRefused(STOPS_ALREADY)
        outcome = await asked.wait_finished()
        if outcome.reason:
            raise RequestRefused(outcome.reason)
        if outcome.problems:
            problems = [str(each) for each in outcome.problems]
            return ControlReply(
                INVALID, (*problems, "rejected: the configuration as it was runs on")
            )
        return ControlReply(DONE, outcome.lines)

    async def stop(self, peer: Peer, *, now: bool = False) -> ControlReply:
        """Begin a stop, or with *now* take it one stage on; answers when it has begun."""
        await self.commands.started.wait()
        if now:
            self.commands.escalate(f"stop --now by uid {peer.uid}")
        else:
            self.commands.stop(f"stop by uid {peer.uid}")
        # From here to the answer nothing may wait: a daemon without work is gone soon.
        return ControlReply(DONE, (f"The daemon is {_WORDS[self.context.stop.stage]}.",))

    def unready(self) -> list[str]:
        """Why no work is to be expected of it now; empty: it is ready.

        A stalled controller is no reason: the others work, and a restart would not help.
        """
        if self.context.stopping:
            return [f"stopping: {self.context.stop.reason or 'a signal has come'}"]
        reasons = []
        if not self.context.ready:
            reasons.append("starting: not every source has been read yet")
        if self.context.pause_reason:
            reasons.append(f"paused: {self.context.pause_reason}")
        return reasons
