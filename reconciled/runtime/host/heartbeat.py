"""The heartbeat: one task in the daemon's loop that notifies the service manager.

1. Only this task sends notifications, so that a hung loop sends none: no WATCHDOG=1 and no
   extension. It is a service: it outlives the work that a stop waits for.
2. State changes (READY, RELOADING, STOPPING) are pending until the manager's socket has taken
   them, in order. The rest describes the present, and is sent as it is then when there is room.
3. From the first beat of a stop on, extensions (EXTEND_TIMEOUT_USEC) are requested only while the
   stop waits for work: each is the remaining time plus a margin, and is renewed well before it
   ends. They only cover time beyond the unit's own limit: a daemon-reload of the manager drops
   them.

Rejected: a thread (it would beat for a hung loop), and one large extension (a hang would keep all
of it).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

import attrs
import trio

from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.daemon.reload import ReloadResult
from reconciled.runtime.host import status_line
from reconciled.runtime.host.status_line import StatusLine
from reconciled.service.notify import Notifier, microseconds

# Seconds between beats, and the maximum age of the status. 1 wake-up/s is 0.005 % of a core.
BEAT = 1.0
BEAT_OF_STOP = 0.5
# Share of an allowed interval after which its notification is due again.
SHARE = 1 / 3
# Seconds beyond the deadlines of work, to write the report and end the process.
MARGIN = 5.0
# Seconds; a hang during a stop keeps at most this extension.
LONGEST_EXTENSION = 30.0

REJECTED = "the last reload failed, the previous configuration stays in force"


@attrs.define(eq=False)
class Heartbeat:
    """The notifications of one daemon. Made in the loop; serve() is its task."""

    context: RuntimeContext
    notifier: Notifier
    controllers: Mapping[str, Controller]
    _began: float = attrs.field(factory=trio.current_time, init=False)
    _pending: deque[dict[str, object]] = attrs.field(factory=deque, init=False)
    _ready: bool = attrs.field(default=False, init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _reloading: bool = attrs.field(default=False, init=False)
    _note: str = attrs.field(default="", init=False)
    # The manager's socket has taken READY=1.
    _ready_delivered: bool = attrs.field(default=False, init=False)
    # The last status, extension and watchdog notification that it took.
    _text: str = attrs.field(default="", init=False)
    _extended_at: float = attrs.field(default=-math.inf, init=False)
    _extension: float = attrs.field(default=0.0, init=False)
    _watched_at: float = attrs.field(default=-math.inf, init=False)

    @property
    def has_watchdog(self) -> bool:
        """Whether the manager would end a hung loop now; safe in any thread.

        It does so only between READY=1 and the beginning of a stop.
        """
        enabled = self.notifier.watchdog_s is not None and self._ready_delivered
        return enabled and not self.context.stopping

    async def serve(self) -> None:
        """Beat until cancelled, after all work has ended."""
        began = self.context.stop.began
        try:
            while True:
                self.beat()
                with trio.move_on_after(self._pause()):
                    if self._stopping:
                        await trio.sleep_forever()
                    await began.wait()
        finally:
            # A stop without work ends before the next regular beat.
            self.beat()
            self.notifier.set_status(status_line.of_end(self.context).text)

    def notify_ready(self) -> None:
        """Notify READY: the start is over."""
        self._ready = True
        self._begin_state()
        self._enqueue(READY=1)

    def notify_reload(self, result: ReloadResult | None) -> None:
        """Notify that a reload begins (None) or has ended; nothing once a stop has begun."""
        if result is not None:
            self._note = "" if result.done else REJECTED
        if self.context.stopping:
            return  # STOPPING is final
        self._reloading = result is None
        if self._reloading:
            # The time of the begin, even if it is sent later: the manager compares it with its own.
            self._enqueue(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
        else:
            self._enqueue(READY=1)

    def beat(self) -> None:
        """Send what is due now; in the loop, without waiting."""
        now = trio.current_time()
        if not self._stopping and self.context.stop.began.is_set():
            self._stopping = True
            self._begin_state()
            self._pending.append({"STOPPING": 1})
        status = self._current_status(now)
        due = self._due(status, now)
        while due or self._pending:
            pending = self._pending[0] if self._pending else {}
            if not self.notifier.notify(**pending, **due):
                return
            self._record_sent(due, status, now)
            due = {}
            if pending:
                self._pending.popleft()
                self._ready_delivered = self._ready_delivered or "READY" in pending

    def _begin_state(self) -> None:
        """An extension is valid only in the state in which it was requested."""
        self._extended_at = -math.inf

    def _enqueue(self, **fields: object) -> None:
        self._pending.append(fields)
        self.beat()

    def _pause(self) -> float:
        watchdog = self.notifier.watchdog_s
        beat = BEAT_OF_STOP if self._stopping or self._pending else BEAT
        return beat if watchdog is None else min(beat, watchdog * SHARE)

    def _current_status(self, now: float) -> StatusLine:
        if self._stopping:
            return status_line.of_stop(self.context.stop, now)
        if not self._ready:
            return status_line.of_start(self.controllers, self._began, now)
        if self._reloading:
            return StatusLine("reloading")
        return status_line.of_running(self.context, self.controllers, self._note)

    def _due(self, status: StatusLine, now: float) -> dict[str, object]:
        due: dict[str, object] = {}
        if status.text != self._text:
            due["STATUS"] = status.text
        if status.remaining > 0 and now - self._extended_at >= self._extension * SHARE:
            due["EXTEND_TIMEOUT_USEC"] = microseconds(_extension(status))
        watchdog = self.notifier.watchdog_s
        # Sent now if the next beat would be too late.
        if watchdog is not None and now + self._pause() > self._watched_at + watchdog * SHARE:
            due["WATCHDOG"] = 1
        return due

    def _record_sent(self, sent: dict[str, object], status: StatusLine, now: float) -> None:
        if "STATUS" in sent:
            self._text = status.text
        if "EXTEND_TIMEOUT_USEC" in sent:
            self._extended_at, self._extension = now, _extension(status)
        if "WATCHDOG" in sent:
            self._watched_at = now


def _extension(status: StatusLine) -> float:
    return min(status.remaining + MARGIN, LONGEST_EXTENSION)
