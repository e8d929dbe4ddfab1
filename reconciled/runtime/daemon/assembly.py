"""Assembly: what the daemon, the tests and the benchmarks put together in the same way.

Everything here is made without I/O and without waiting; the caller opens the store, prepares the
directories, and starts the tasks.
"""

from __future__ import annotations

import random
from pathlib import Path

import attrs
import trio

from reconciled.core.loop_detector import LoopDetector
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.resources import Key
from reconciled.core.stages import StopLimits
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.observe.logs import Logs
from reconciled.programs.children import current_children
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers import factory
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.loading import LoadedController
from reconciled.runtime.daemon.shutdown import Shutdown
from reconciled.runtime.decisions.approvals import RemovalApprovals
from reconciled.runtime.operations.operation import Operations
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.runtime.runs.program_adoption import ProgramAdoption
from reconciled.runtime.runs.unattended import UnattendedKeys
from reconciled.runtime.stop_recorder import StopRecorder
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop import Stop


@attrs.define(eq=False)
class Assembly:
    """The context of one daemon, and what acts on it. Made by assemble()."""

    context: RuntimeContext
    shutdown: Shutdown
    # The running controllers, by name; a reload changes them.
    controllers: dict[str, Controller] = attrs.field(factory=dict, init=False)
    approvals: RemovalApprovals = attrs.field(init=False)
    dispatcher: Dispatcher = attrs.field(init=False)
    adoption: ProgramAdoption = attrs.field(init=False)
    unattended: UnattendedKeys = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        context = self.context
        self.approvals = RemovalApprovals(context.state, context.log, self._approve_removals)
        self.unattended = UnattendedKeys(context, lambda: self.controllers)
        self.dispatcher = Dispatcher(context, lambda: self.controllers, self.unattended)
        self.adoption = ProgramAdoption(context, self.unattended)

    def build_controller(self, loaded: LoadedController) -> Controller:
        """A controller under the daemon's stop; the caller adds it to controllers and runs it."""
        return factory.build_controller(loaded, self.context, self.context.stop, self.approvals)

    def _approve_removals(self, controller: str, keys: frozenset[Key]) -> None:
        running = self.controllers.get(controller)
        if running is None:
            reason = "there is no such controller"
            self.context.log.warning("removals.bad_approval", controller=controller, reason=reason)
        else:
            running.approve_removals(keys)


def assemble(  # noqa: PLR0913 - one argument for each injected part
    *,
    state: Path,
    limits: StopLimits,
    concurrency: int,
    logs: Logs,
    signals: SignalHandlers,
    store: Store,
    journal: OperationJournal,
    services: trio.Nursery,
    rng: random.Random,
) -> Assembly:
    """Put the parts of one daemon together, inside trio. Makes its stop the current one.

    state        the state directory
    limits       the limits of a stop
    concurrency  how many runs the queue hands out at once
    services     the nursery that outlives all work
    rng          spreads the delays of the queue
    """
    stop = Stop("daemon", limits)
    stop.install()
    context = RuntimeContext(
        state=state,
        logs=logs,
        signals=signals,
        stop=stop,
        queue=WorkQueue(concurrency, rng),
        store=store,
        operations=Operations(journal, state / "operations"),
        children=current_children(),
        loops=LoopDetector(),
        stop_recorder=StopRecorder(stop),
        services=services,
    )
    return Assembly(context, Shutdown(context))
