"""The daemon's log: renders each event as one line on standard error, or as a journal entry.

``configure()`` makes the one Logs object, which callers pass on; the package has no global logger.

1. No log call raises or blocks, whatever its fields are and however slow the reader is.
2. Equal lines are folded (see core.repeat_filter): a fault is logged once, then its repetitions
   are summarised, then its recovery is logged.
3. No secret is written (see redaction).
4. A traceback is logged for internal faults (``exc_info``) and at level debug; otherwise an
   exception is logged by its type and message.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import structlog
import trio

from reconciled.core.repeat_filter import Recovery, RepeatFilter, Summary, Suppress
from reconciled.observe import stdlib_logging
from reconciled.observe.bound_log import LEVELS, BoundLog, bound_log_class, set_level
from reconciled.observe.journald import (
    SOCKET,
    JournaldRenderer,
    message,
    open_journald,
    syslog_identifier,
)
from reconciled.observe.line_format import (
    Renderer,
    TimestampFormatter,
    colour_line,
    encoded,
    json_line,
    text_line,
)
from reconciled.observe.output_descriptor import Descriptor, open_descriptor
from reconciled.observe.plain_data import message_of, plain_data, traceback_of
from reconciled.observe.redaction import REDACTED, Redactor, is_secret_name
from reconciled.observe.repetition import UNFOLDED, folding_line
from reconciled.observe.sink import Sink

_SUMMARY_EVERY = 1.0  # seconds between checks for summaries that are due


@attrs.define(eq=False)
class Logs:
    """The log of one process. Made by configure(), closed by close(); any thread may log."""

    sink: Sink
    redactor: Redactor
    _render: Renderer
    _wall: Callable[[], float]
    _clock: Callable[[], float]
    _stamp: TimestampFormatter
    # With the journal's native protocol: standard error, which the manager connects to it too.
    _fallback: Descriptor | None = None
    _loggers: type[BoundLog] = attrs.field(factory=bound_log_class, init=False)
    _folder: RepeatFilter = attrs.field(factory=RepeatFilter, init=False)
    # Re-entrant, since a finalizer may log while its thread holds the lock: _folding is True then,
    # and that line is not folded.
    _lock: threading.RLock = attrs.field(factory=threading.RLock, init=False)
    _folding: bool = attrs.field(default=False, init=False)
    _level: str = attrs.field(default="info", init=False)
    _stdlib_capture: stdlib_logging.StdlibCapture | None = attrs.field(default=None, init=False)
    log: BoundLog = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.log = structlog.wrap_logger(
            _Output(self), self._processors(), self._loggers, dict, cache_logger_on_first_use=False
        ).bind()

    def __repr__(self) -> str:
        return f"<Logs level={self._level} {self.sink!r} {self._folder!r}>"

    @property
    def level(self) -> str:
        """The level below which lines are not written."""
        return self._level

    def set_level(self, level: str) -> None:
        """Set the level of all bound loggers. Raises ValueError if *level* is unknown."""
        set_level(self._loggers, level)
        self._level = level
        if self._stdlib_capture is not None:
            self._stdlib_capture.set_level(level)

    def capture_stdlib(self) -> None:
        """Log the lines of the logging module, of warnings, and of structlog.get_logger() here.

        Changes global state of these modules; close() restores it. A second call has no effect.
        """
        if self._stdlib_capture is not None:
            return
        self._stdlib_capture = stdlib_logging.capture_stdlib(self.log, self._level)
        structlog.configure(
            processors=self._processors(),
            wrapper_class=self._loggers,
            context_class=dict,
            logger_factory=lambda *_names: _Output(self),
            cache_logger_on_first_use=False,
        )

    def report_recovery(self, key: str) -> None:
        """Log that *key* has recovered, if a fault of it was logged. Cheap if there was none.

        The key of a source, whose lines have the fields controller and source, is
        ``CONTROLLER: SOURCE``.
        """
        now = self._clock()
        with self._lock_folder():
            ended = self._folder.mark_recovered(key, now)
        for recovery in ended:
            self._log_recovery(recovery, now)

    def forget(self, key: str) -> None:
        """Drop the state of *key*, which was deleted."""
        with self._lock_folder():
            self._folder.forget(key)

    async def serve(self) -> None:
        """Write buffered records and due summaries, until cancelled.

        Start it in a nursery that outlives all work.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.sink.flush_forever, name="log flusher")
            nursery.start_soon(self._summarise_forever, name="log summaries")

    def log_from_thread(self, level: str, event: str, **fields: Any) -> bool:
        """Write a line without folding, from a thread that cannot rely on the others.

        False: another thread hangs while it holds the sink's lock, and the line is lost.
        """
        shown = self._add_error_fields(None, level, {"event": event, **fields})
        line = self._render_line(None, level, self._to_plain_data(None, level, shown))
        return self.sink.write_from_thread(line)

    def close(self, timeout: float = 0.2) -> None:
        """Write all summaries and buffered records, for *timeout* seconds at most. Any thread."""
        if self._stdlib_capture is not None:
            self._stdlib_capture.restore()
            self._stdlib_capture = None
            structlog.reset_defaults()
        now = self._clock()
        with self._lock_folder(timeout) as held:
            summaries = self._folder.flush_all(now) if held else []
        for summary in summaries:
            self.sink.write_from_thread(self._summary_line(summary, now))
        missing = self.sink.close(timeout)
        if self._fallback is not None:
            self._report_dropped(missing, self._fallback)
            self._fallback = None

    def line(self, level: str, event: str, fields: Mapping[str, Any]) -> bytes:
        """Render the line of an event whose fields are plain data already."""
        return self._render(self._stamp.format(self._wall()), level, event, fields)

    @contextlib.contextmanager
    def _lock_folder(self, timeout: float = -1) -> Iterator[bool]:
        """Hold the folder's lock.

        False: this call has interrupted the holder in its own thread, or the holder hangs.
        """
        if not self._lock.acquire(timeout=timeout):
            yield False
            return
        outermost, self._folding = not self._folding, True
        try:
            yield outermost
        finally:
            self._folding = not outermost
            self._lock.release()

    def _processors(self) -> list[Any]:
        return [self._add_error_fields, self._to_plain_data, self._fold, self._render_line]

    def _add_error_fields(
        self, _logger: Any, _level: str, fields: dict[str, Any]
    ) -> dict[str, Any]:
        given = fields.pop("exc_info", None)
        error = fields.get("error")
        if given is True:
            given = sys.exc_info()[1]
        elif isinstance(given, tuple):
            given = given[1]
        elif isinstance(error, BaseException) and self._level == LEVELS[0]:
            given = error
        if isinstance(given, BaseException):
            fields.setdefault("error", given)
            error = fields["error"]
            fields["exc_info"] = given
        if isinstance(error, BaseException):
            fields["error_type"] = type(error).__name__
            if isinstance(error, OSError) and error.errno is not None:
                fields["errno"] = error.errno
            fields["error"] = message_of(error)
        return fields

    def _to_plain_data(self, _logger: Any, _level: str, fields: dict[str, Any]) -> dict[str, Any]:
        redactor = self.redactor
        for name, value in fields.items():
            if name == "exc_info":
                continue
            fields[name] = REDACTED if is_secret_name(name) else plain_data(value, redactor)
        return fields

    def _fold(self, _logger: Any, level: str, fields: dict[str, Any]) -> dict[str, Any]:
        if level == LEVELS[0] or fields["event"].startswith(UNFOLDED):
            return fields
        line = folding_line(level, fields)
        now = self._clock()
        with self._lock:  # _lock_folder() inlined: a generator would cost a tenth of the line
            if self._folding:
                return fields
            self._folding = True
            try:
                verdict = self._folder.admit(line, now)
            finally:
                self._folding = False
        if isinstance(verdict, Suppress):
            raise structlog.DropEvent
        if verdict.before is not None:
            self.sink.write(self._summary_line(verdict.before, now))
        if verdict.repeated:
            fields["repeated"] = verdict.repeated
            fields["since"] = self._timestamp(verdict.since, now)
        if verdict.changes:
            fields["changes"] = verdict.changes
        return fields

    def _render_line(self, _logger: Any, level: str, fields: dict[str, Any]) -> bytes:
        error = fields.pop("exc_info", None)
        if error is not None:
            fields["traceback"] = traceback_of(error, self.redactor)
        return self.line(level, fields.pop("event"), fields)

    async def _summarise_forever(self) -> None:
        while True:
            await trio.sleep(_SUMMARY_EVERY)
            now = self._clock()
            with self._lock_folder():
                summaries = self._folder.flush_due(now)
            for summary in summaries:
                self.sink.write(self._summary_line(summary, now))

    def _summary_line(self, summary: Summary, now: float) -> bytes:
        fields = dict(summary.line.fields)
        fields["repeated"] = summary.repeated
        fields["since"] = self._timestamp(summary.since, now)
        if summary.changes:
            fields["changes"] = summary.changes
        if summary.ended:
            fields["recovered"] = True
        return self.line(summary.line.level, summary.line.event, fields)

    def _log_recovery(self, recovery: Recovery, now: float) -> None:
        fields: dict[str, Any] = {
            "fault": recovery.line.event,
            "since": self._timestamp(recovery.since, now),
        }
        if recovery.repeated:
            fields["repeated"] = recovery.repeated
        self.log.info("fault.recovered", **{**recovery.line.fields, **fields})

    def _report_dropped(self, count: int, spare: Descriptor) -> None:
        """Report dropped lines on standard error: its buffer keeps them until the journal reads."""
        with contextlib.suppress(OSError):
            if count:
                spare.write(encoded(f"<4>{message('log.dropped', {'count': count})}\n"))
            spare.close()

    def _timestamp(self, then: float, now: float) -> str:
        return self._stamp.format(self._wall() - (now - then))


@attrs.define(eq=False)
class _Output:
    """The logger that structlog wraps: it writes rendered lines."""

    _logs: Logs

    def line(self, line: bytes) -> None:
        self._logs.sink.write(line)

    def lost(self, level: str, event: str, error: Exception) -> None:
        fields = {"failed": repr(event)[:100], "error_type": type(error).__name__}
        self._logs.sink.write(self._logs.line(level, "log.failed", fields))


def configure(  # noqa: PLR0913 - the one function that gets clocks, descriptor and environment
    style: str = "auto",
    level: str = "info",
    *,
    descriptor: int = 2,
    journal: str = SOCKET,
    environment: Mapping[str, str],
    wall: Callable[[], float] = time.time,
    clock: Callable[[], float] = time.monotonic,
) -> Logs:
    """Make the log on *descriptor*, in *style* (auto, text, json or journal) from *level* on.

    auto selects the journal if the manager has connected *descriptor* to it, text on a terminal,
    and JSON elsewhere; style journal without a journal falls back to JSON. *environment* supplies
    JOURNAL_STREAM, RUNTIME_DIRECTORY, NO_COLOR and TERM. *clock* times the folding and must be
    monotonic; *wall* stamps lines. Raises ValueError for an unknown style or level.
    """
    stamp = TimestampFormatter()
    native = None
    if style in ("auto", "journal"):
        insist = style == "journal"
        native = open_journald(environment, descriptor, force=insist, path=journal)
    inherited = open_descriptor(descriptor)
    opened, spare = (native, inherited) if native else (inherited, None)
    if native is not None:
        render: Renderer = JournaldRenderer(syslog_identifier(environment))
    else:
        render = _renderer(style, environment, terminal=opened.is_terminal)

    def drop_record(count: int) -> bytes:
        return render(stamp.format(wall()), "warning", "log.dropped", {"count": count})

    sink = Sink(opened, drop_record, datagrams=native is not None)
    logs = Logs(sink, Redactor(), render, wall, clock, stamp, spare)
    logs.set_level(level)
    if style == "journal" and native is None:
        reason = f"no journal listens at {journal}: logging JSON on standard error instead"
        logs.log.warning("log.journal_missing", reason=reason)
    return logs


def _renderer(style: str, environment: Mapping[str, str], *, terminal: bool) -> Renderer:
    if style not in ("auto", "text", "json", "journal"):
        raise ValueError(f"unknown log format {style!r}: write auto, text, json or journal")
    if style in ("json", "journal") or (style == "auto" and not terminal):
        return json_line
    plain_text = environment.get("NO_COLOR") or environment.get("TERM") == "dumb"
    return colour_line if terminal and not plain_text else text_line
