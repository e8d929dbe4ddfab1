"""The heartbeat: one task that tells the service manager how the daemon is, from inside its loop.

1. All of it comes from this one task, so that a loop that hangs falls silent: no WATCHDOG=1 and no
   more time. It is a service: it outlives the work that a stop waits for.
2. What the manager has to hear (READY, RELOADING, STOPPING) is owed until its socket has taken
   it, in order. The rest speaks of the moment, and goes out as it is when there is room.
3. Time is asked for from the first beat of a stop on, while and only while something is waited
   for: what is left of it and a little more, asked again well before that is over. It only covers
   what goes beyond the unit's own limit: the manager forgets it at every daemon-reload.

Rejected: a thread (it would beat for a loop that hangs), and one large extension (a hang would
keep all of it).
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

# Seconds between beats: the status is at most so old. A wake-up a second is 0.005 % of a core.
BEAT = 1.0
BEAT_OF_STOP = 0.5
# Of what the manager allows, each part of the protocol is due again after so much.
SHARE = 1 / 3
# Beyond what work may take: to write down how it ended, and to leave.
AFTERWARDS = 5.0
# What a hang in the midst of a stop can keep at most.
LONGEST_EXTENSION = 30.0

REJECTED = "the last reload failed, the configuration before it runs on"


@attrs.define(eq=False)
class Heartbeat:
    """The daemon's words to its manager. Made in the loop; serve() is its task."""

    context: RuntimeContext
    notifier: Notifier
    controllers: Mapping[str, Controller]
    _began: float = attrs.field(factory=trio.current_time, init=False)
    _pending: deque[dict[str, object]] = attrs.field(factory=deque, init=False)
    _ready: bool = attrs.field(default=False, init=False)
    _stopping: bool = attrs.field(default=False, init=False)
    _reloading: bool = attrs.field(default=False, init=False)
    _note: str = attrs.field(default="", init=False)
    # The manager has taken READY=1.
    _ready_delivered: bool = attrs.field(default=False, init=False)
    # What it took last of the rest, and when.
    _text: str = attrs.field(default="", init=False)
    _extended_at: float = attrs.field(default=-math.inf, init=False)
    _extension: float = attrs.field(default=0.0, init=False)
    _watched_at: float = attrs.field(default=-math.inf, init=False)

    @property
    def has_watchdog(self) -> bool:
        """Whether the manager ends a loop that hangs now; any thread may ask.

        It does so only between READY=1 and the begin of a stop.
        """
        watches = self.notifier.watchdog_s is not None and self._ready_delivered
        return watches and not self.context.stopping

    async def serve(self) -> None:
        """Beat until cancelled, which is when all work has ended."""
        began = self.context.stop.began
        try:
            while True:
                self.beat()
                with trio.move_on_after(self._pause()):
                    if self._stopping:
                        await trio.sleep_forever()
                    await began.wait()
        finally:
            # A stop with nothing to wait for is over before the beat that would tell of it.
            self.beat()
            self.notifier.set_status(status_line.of_end(self.context).text)

    def notify_ready(self) -> None:
        """The start is over."""
        self._ready = True
        self._begin_state()
        self._enqueue(READY=1)

    def notify_reload(self, outcome: ReloadResult | None) -> None:
        """A reload begins, or has ended so: with READY=1 either way, unless a stop came first."""
        if outcome is not None:
            self._note = "" if outcome.done else REJECTED
        if self.context.stopping:
            return  # STOPPING is final
        self._reloading = outcome is None
        if self._reloading:
            # Of the begin, also where it is sent later: the manager compares it with its own.
            self._enqueue(RELOADING=1, MONOTONIC_USEC=time.monotonic_ns() // 1000)
        else:
            self._enqueue(READY=1)

    def beat(self) -> None:
        """Tell what is due now; in the loop, never waiting."""
        now = trio.current_time()
        if not self._stopping and self.context.stop.began.is_set():
            self._stopping = True
            self._begin_state()
            self._pending.append({"STOPPING": 1})
        stands = self._current_status(now)
        due = self._due(stands, now)
        while due or self._pending:
            owed = self._pending[0] if self._pending else {}
            if not self.notifier.notify(**owed, **due):
                return
            self._record_sent(due, stands, now)
            due = {}
            if owed:
                self._pending.popleft()
                self._ready_delivered = self._ready_delivered or "READY" in owed

    def _begin_state(self) -> None:
        """An extension holds for the state that it was asked in."""
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
        # Not with the next beat only, when it would be late.
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
    return min(status.remaining + AFTERWARDS, LONGEST_EXTENSION)
