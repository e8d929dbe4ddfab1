"""Records of Python's logging module, and of warnings, as lines of the daemon's log.

Only warnings and errors are taken over, unless the level is debug: a library's info records (each
request of an HTTP client) are about the library's work, not the daemon's.
"""

from __future__ import annotations

import logging

import attrs

from reconciled.observe.bound_log import BoundLog


class StdlibHandler(logging.Handler):
    """Passes each record to *log* as ``log.stdlib``, with logger and message as fields."""

    def __init__(self, log: BoundLog) -> None:
        super().__init__()
        self._log = log

    def createLock(self) -> None:  # noqa: N802 - the name that logging calls
        """No lock: the sink has one, and this one would be held while waiting for it."""
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Emit *record* without a lock: from Python 3.13 on the inherited method needs one."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        """Log *record*. Never raises, whatever the record contains."""
        event = "log.stdlib"
        try:
            message = record.getMessage()
        except Exception as exc:  # noqa: BLE001 - the arguments are another module's
            message = f"{record.msg!r} <arguments do not fit: {type(exc).__name__}>"
        error = record.exc_info[1] if record.exc_info else None
        fields = {"exc_info": error} if error is not None else {}
        write = self._log.info
        if record.levelno >= logging.ERROR:
            write = self._log.error
        elif record.levelno >= logging.WARNING:
            write = self._log.warning
        elif record.levelno < logging.INFO:
            write = self._log.debug
        write(event, logger=record.name, message=message, **fields)


@attrs.define(eq=False)
class StdlibCapture:
    """The root logger while its records are captured; restore() undoes it."""

    _root: logging.Logger
    _handler: StdlibHandler
    _handlers: list[logging.Handler]
    _level: int

    def set_level(self, level: str) -> None:
        """Capture the records that suit *level* of the daemon's log."""
        self._root.setLevel(logging.INFO if level == "debug" else logging.WARNING)

    def restore(self) -> None:
        """Undo capture_stdlib()."""
        logging.captureWarnings(capture=False)
        self._root.handlers[:] = self._handlers
        self._root.setLevel(self._level)


def capture_stdlib(log: BoundLog, level: str) -> StdlibCapture:
    """Route the standard logging module, and warnings, into *log*."""
    root = logging.getLogger()
    capture = StdlibCapture(root, StdlibHandler(log), list(root.handlers), root.level)
    root.handlers[:] = [capture._handler]  # noqa: SLF001 - made two lines above
    logging.captureWarnings(capture=True)
    capture.set_level(level)
    return capture
