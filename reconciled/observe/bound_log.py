"""The logger that other modules hold: a structlog logger whose level can change at run time.

structlog builds the level into the class of a logger: a call below the level is as cheap as an
empty method, but ignores a later change. Here each configuration has its own class, and a change
replaces methods of that class: it takes effect in every logger that was ever bound.
"""

from __future__ import annotations

from typing import Any

import structlog

LEVELS = ("debug", "info", "warning", "error", "critical")


class BoundLog(structlog.BoundLoggerBase):
    """``log.info("event.name", field=1)``; ``bind(key=…)`` gives one with more fields.

    The event is a fixed dotted name: nothing is interpolated into it, and positional arguments
    become the field ``args``. No call raises. time, level and event are reserved field names.
    """

    def debug(self, event: str, /, *args: Any, **fields: Any) -> None:
        """For developers: each decision."""
        self._emit("debug", event, args, fields)

    def info(self, event: str, /, *args: Any, **fields: Any) -> None:
        """Something was done, or a state changed."""
        self._emit("info", event, args, fields)

    def warning(self, event: str, /, *args: Any, **fields: Any) -> None:
        """Something may need attention, but not now."""
        self._emit("warning", event, args, fields)

    def error(self, event: str, /, *args: Any, **fields: Any) -> None:
        """Something is not as declared, and stays so until a person acts."""
        self._emit("error", event, args, fields)

    def critical(self, event: str, /, *args: Any, **fields: Any) -> None:
        """A fault of the daemon itself."""
        self._emit("critical", event, args, fields)

    def exception(self, event: str, /, *args: Any, **fields: Any) -> None:
        """error() with the traceback of the exception that is being handled."""
        self.error(event, *args, **{"exc_info": True, **fields})

    def _emit(self, level: str, event: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        if args:
            fields = {"args": args, **fields}
        # Not as keyword arguments: the parameters of the parent's method would collide with fields.
        try:
            line, _ = self._process_event(level, event, fields)
        except structlog.DropEvent:
            return
        except Exception as exc:  # noqa: BLE001 - a log call must not fail for its arguments
            self._logger.lost(level, event, exc)
            return
        self._logger.line(*line)


def _nop(_self: BoundLog, _event: str, /, *_args: Any, **_fields: Any) -> None:
    return None


def bound_log_class() -> type[BoundLog]:
    """A class of loggers that share one level, independent of other classes."""
    return type("BoundLog", (BoundLog,), {})


def set_level(loggers: type[BoundLog], level: str) -> None:
    """Silence the methods of *loggers* below *level*, and restore the others.

    Raises ValueError for a level that is not in LEVELS.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not a log level: write one of {', '.join(LEVELS)}")
    threshold = LEVELS.index(level)
    for position, name in enumerate(LEVELS):
        if position < threshold:
            setattr(loggers, name, _nop)
        elif name in vars(loggers):
            delattr(loggers, name)
