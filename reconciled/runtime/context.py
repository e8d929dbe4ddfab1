"""What every part of the running daemon shares. One object, made by the daemon, handed down."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import trio

from reconciled.core.loop_detector import LoopDetector
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.resources import Key
from reconciled.core.results import Result
from reconciled.journal.sqlite.store import Store
from reconciled.observe.bound_log import BoundLog
from reconciled.observe.logs import Logs
from reconciled.programs.children import Children
from reconciled.runtime.adoption_registry import AdoptionRegistry
from reconciled.runtime.operations.operation import Operations
from reconciled.runtime.stop_recorder import StopRecorder
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop import Stop


@attrs.define(eq=False)
class RuntimeContext:
    """The daemon's services, as its controllers and runs see them.

    stopping() is the one question that everything asks before it begins: it reads the signal
    handler's own flag, which is set before any task knows of the signal (invariant 2).
    """

    state: Path
    logs: Logs
    signals: SignalHandlers
    stop: Stop
    queue: WorkQueue
    store: Store
    operations: Operations
    adoptions: AdoptionRegistry
    children: Children
    loops: LoopDetector
    stop_recorder: StopRecorder
    services: trio.Nursery
    # Called with each outcome: (key, result, failures in a row). ``run --once`` counts them.
    on_outcome: Callable[[Key, Result, int], None] | None = None
    # Every source has said something, or has had its time for it.
    ready: bool = attrs.field(default=False, init=False)
    # Why no key is handed out at the moment; empty: it is. Set by Dispatcher.pause() alone.
    pause_reason: str = attrs.field(default="", init=False)
    log: BoundLog = attrs.field(init=False)
    _runs: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.log = self.logs.log
        # What programs have said is quoted in reasons, and these are kept in the journal as well.
        self.children.redact = self.logs.redactor.redact

    @property
    def stopping(self) -> bool:
        """Whether the instant of a stop is over."""
        return self.signals.stop_requested_at is not None or self.stop.began.is_set()

    @property
    def debugging(self) -> bool:
        """Whether lines of level debug are written; asked before they are put together."""
        return self.logs.level == "debug"

    def next_run(self) -> int:
        """The number of the next run, unique within this start."""
        self._runs += 1
        return self._runs

    def start_background(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """Have a short write done by the services, which outlive all work; failures are logged."""
        self.services.start_soon(self._chore, name, function, args, name=f"chore {name}")

    def log_store_state(self, error: str) -> None:
        """Say whether the store can be written: when it changes, not with each write."""
        if error:
            self.log.error("journal.unwritable", reason=error)
        else:
            self.log.info("journal.writable")

    async def _chore(
        self, name: str, function: Callable[..., Awaitable[object]], args: tuple[object, ...]
    ) -> None:
        try:
            await function(*args)
        except Exception as error:  # noqa: BLE001 - a chore harms nobody else (invariant 12)
            self.log.error("background.failed", task=name, reason=str(error) or repr(error))
