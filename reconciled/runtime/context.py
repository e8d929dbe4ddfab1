"""What every part of the running daemon shares: one object, passed to each of them."""

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
from reconciled.runtime.operations.operation import Operations
from reconciled.runtime.stop_recorder import StopRecorder
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop import Stop


@attrs.define(eq=False, kw_only=True)
class RuntimeContext:
    """The shared parts of one daemon, as its controllers and runs use them.

    Everything checks ``stopping`` before it starts something: it reads the signal handler's own
    flag, which is set before any task learns of the signal (invariant 2).
    """

    state: Path
    logs: Logs
    signals: SignalHandlers
    stop: Stop
    queue: WorkQueue
    store: Store
    operations: Operations
    children: Children
    loops: LoopDetector
    stop_recorder: StopRecorder
    services: trio.Nursery
    # Called with each outcome: (key, result, failures in a row). ``run --once`` counts them.
    on_outcome: Callable[[Key, Result, int], None] | None = None
    # Keys that wait for a program that outlived an earlier daemon.
    adopting: set[Key] = attrs.field(factory=set, init=False)
    # Operations whose adopted program ended by itself: that attempt was not interrupted.
    adopted: set[str] = attrs.field(factory=set, init=False)
    # Operations whose own program requested a stop or a reload, with which of the two.
    own_requests: dict[str, str] = attrs.field(factory=dict, init=False)
    # Every source has reported, or its time for that is over.
    ready: bool = attrs.field(default=False, init=False)
    # Why the state directory is not this daemon's any more; empty: it is. See StateLock.lost().
    state_lost: Callable[[], str] = attrs.field(default=str, init=False)
    # Why no key is handed out at the moment; empty: there is no pause. Set by the dispatcher alone.
    pause_reason: str = attrs.field(default="", init=False)
    log: BoundLog = attrs.field(init=False)
    _runs: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.log = self.logs.log
        # Reasons quote the output of programs, and the journal keeps reasons.
        self.children.redact = self.logs.redactor.redact

    @property
    def stopping(self) -> bool:
        """Whether a stop has been requested."""
        return self.signals.stop_requested_at is not None or self.stop.began.is_set()

    @property
    def debugging(self) -> bool:
        """Whether debug lines are written; callers check it before they build one."""
        return self.logs.level == "debug"

    def next_run(self) -> int:
        """The number of the next run, unique within this start."""
        self._runs += 1
        return self._runs

    def start_background(
        self, name: str, function: Callable[..., Awaitable[object]], *args: object
    ) -> None:
        """Run a short write as a service, which outlives all work; a failure is logged."""
        self.services.start_soon(
            self._run_background, name, function, args, name=f"background {name}"
        )

    def log_store_state(self, error: str) -> None:
        """Log whether the store is writable; called when that changes, not at each write."""
        if error:
            self.log.error("journal.unwritable", reason=error)
        else:
            self.log.info("journal.writable")

    async def _run_background(
        self, name: str, function: Callable[..., Awaitable[object]], args: tuple[object, ...]
    ) -> None:
        try:
            await function(*args)
        except Exception as error:  # noqa: BLE001 - it must not affect other work (invariant 12)
            self.log.error("background.failed", task=name, reason=str(error) or repr(error))
