"""The configuration as objects: every name that a file may hold, with its default.

Files are structured into these classes, so the name, type and default of a field are the
documented ones. Durations are in seconds, shares 0 to 1, paths absolute once loaded. Positions
take no part in equality: a reload that only moves lines changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from reconciled.config.structuring.field_types import Share, at_least, positive
from reconciled.config.watches import Watch
from reconciled.config.yaml.positions import Path as Steps
from reconciled.config.yaml.positions import Positions
from reconciled.core.durations import Seconds, format_duration
from reconciled.core.resources import Origin
from reconciled.core.stages import StopLimits

_DAY = 86400.0

InterruptedPolicy = Literal["roll-forward", "roll-back", "hold"]


@attrs.frozen
class LogConfig:
    """``log``. The format auto means journal under systemd, text on a terminal, else json."""

    format: Literal["auto", "text", "json", "journal"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"


def _within_critical(limits: Any, attribute: Any, drain: float) -> None:
    if drain > limits.critical:
        critical = format_duration(limits.critical)
        message = f"is longer than critical ({critical}): lower it, or raise critical"
        raise ValueError(message, attribute)


@attrs.frozen
class StopConfig:
    """``stop``, as written; all other modules use its StopLimits."""

    critical: Seconds = attrs.field(default=Seconds(300.0))
    drain: Seconds = attrs.field(default=Seconds(20.0), validator=_within_critical)
    cleanup: Seconds = attrs.field(default=Seconds(5.0), validator=positive)

    @property
    def limits(self) -> StopLimits:
        """The limits of every stop."""
        return StopLimits(drain=self.drain, critical=self.critical, cleanup=self.cleanup)


@attrs.frozen
class LimitsConfig:
    """``limits``: the number of concurrent reconciles over all controllers."""

    concurrency: int = attrs.field(default=16, validator=at_least(1))


@attrs.frozen
class HistoryConfig:
    """``journal.history``: how many ended operations are kept, and for how long."""

    operations: int = attrs.field(default=100_000, validator=at_least(0))
    age: Seconds = attrs.field(default=Seconds(90 * _DAY))


@attrs.frozen
class JournalConfig:
    """``journal``."""

    history: HistoryConfig = attrs.Factory(HistoryConfig)


def _split_listen(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise ValueError('takes HOST:PORT, as in "127.0.0.1:9464"')
    return host, int(port)


def _is_listen(_: Any, attribute: Any, value: str) -> None:
    try:
        _split_listen(value)
    except ValueError as exc:
        raise ValueError(str(exc), attribute) from exc


@attrs.frozen
class HttpConfig:
    """``http``. Without it there is no listener."""

    listen: str = attrs.field(validator=_is_listen)

    @property
    def host(self) -> str:
        """The address without brackets; empty: all addresses."""
        return _split_listen(self.listen)[0]

    @property
    def port(self) -> int:
        """The TCP port."""
        return _split_listen(self.listen)[1]


@attrs.frozen
class ControlConfig:
    """``control``: the socket; None: the default location."""

    socket: Path | None = None


@attrs.frozen
class PluginsConfig:
    """``plugins``: directories with reconcilers that are single files."""

    directories: tuple[Path, ...] = ()


def _not_below_initial(delays: Any, attribute: Any, longest: float) -> None:
    if longest < delays.initial:
        initial = format_duration(delays.initial)
        message = f"is shorter than initial ({initial}): raise it, or lower initial"
        raise ValueError(message, attribute)


@attrs.frozen
class RetryConfig:
    """``retry``: the first delay after a failure, and the longest, in seconds."""

    initial: Seconds = attrs.field(default=Seconds(1.0), validator=positive)
    max: Seconds = attrs.field(default=Seconds(300.0), validator=_not_below_initial)


@attrs.frozen
class RemovalsConfig:
    """``removals``: more than *share* of the keys and more than *above* at once are held."""

    share: Share = attrs.field(default=Share(0.5))
    above: int = attrs.field(default=4, validator=at_least(0))


@attrs.frozen
class ControllerConfig:
    """One of ``controllers``."""

    name: str
    reconciler: str
    watch: tuple[Watch, ...]
    concurrency: int
    timeout: Seconds
    retry: RetryConfig
    interrupted: InterruptedPolicy
    max_recoveries: int
    removals: RemovalsConfig
    options: Mapping[str, Any]
    origin: Origin = attrs.field(eq=False)
    # Where the controller is written, for problems with its reconciler and options.
    positions: Positions = attrs.field(eq=False, repr=False)
    path: Steps = attrs.field(eq=False, repr=False)


@attrs.frozen
class Config:
    """The whole configuration, checked, with every default filled in."""

    state: Path
    controllers: Mapping[str, ControllerConfig]
    control: Path  # the socket
    log: LogConfig = attrs.Factory(LogConfig)
    stop: StopLimits = attrs.Factory(StopLimits)
    limits: LimitsConfig = attrs.Factory(LimitsConfig)
    journal: JournalConfig = attrs.Factory(JournalConfig)
    http: HttpConfig | None = None
    plugins: PluginsConfig = attrs.Factory(PluginsConfig)
    files: tuple[Path, ...] = attrs.field(default=(), eq=False)
    # Every name that is written in a file, with its location: warnings name only these.
    origins: tuple[tuple[Steps, Origin], ...] = attrs.field(default=(), eq=False, repr=False)

    def origin_of(self, *path: str) -> Origin:
        """Where *path* is written; the main file if it is a default."""
        for written, origin in self.origins:
            if written == path:
                return origin
        return Origin(str(self.files[0]) if self.files else "configuration")
