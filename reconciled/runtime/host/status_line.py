"""The daemon's status line for ``systemctl status``, and the time that its wait may still take.

Both are computed from the present state; nothing is kept that could disagree with the stop. Times
are whole seconds, and multiples of 10 s above 20 s, so that the line rarely changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import attrs

from reconciled.core.durations import format_duration
from reconciled.core.stages import Stage
from reconciled.observe.stop_report import TEXT_NAME
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.stop import Section, Stop, Work

# Seconds that sources have to report; after them the daemon is ready without the missing ones.
SYNC_TIMEOUT = 10.0


@attrs.frozen
class StatusLine:
    """text: the line. remaining: seconds that the wait may take at most; 0 without a wait."""

    text: str
    remaining: float = 0.0


def of_start(controllers: Mapping[str, Controller], since: float, now: float) -> StatusLine:
    """The status before the daemon is ready; *since* is when its loop started."""
    unread = sum(
        watcher.declares
        for controller in controllers.values()
        if not controller.synced.is_set()
        for watcher in controller.watchers
    )
    text = f"starting: reading {_count(unread, 'source')}" if unread else "starting"
    return StatusLine(text, max(0.0, since + SYNC_TIMEOUT - now))


def of_running(
    context: RuntimeContext, controllers: Mapping[str, Controller], note: str
) -> StatusLine:
    """The status between start and stop; *note* is appended to it."""
    keys = sum(len(controller.manifests) for controller in controllers.values())
    held = sum(record.hold is not None for record in context.operations.journal.list_open())
    state = f"paused: {context.pause_reason}" if context.pause_reason else "ready"
    text = f"{state}: {_count(keys, 'key')}, {context.queue.running} running, {held} held"
    return StatusLine(f"{text}; {note}" if note else text)


def of_stop(stop: Stop, now: float) -> StatusLine:
    """The status during a stop."""
    works = list(stop.all_works())
    ordinary = sorted((work for work in works if not work.sections), key=lambda work: work.name)
    sections = list(stop.all_sections())
    ends = _ordinary_end(stop, ordinary)
    waits = []
    if ordinary:
        waits.append(f"waits for {_names(work.name for work in ordinary)}, {_left(ends - now)}")
    if sections:
        last = max(sections, key=lambda section: section.deadline)
        names = _names(map(_name, sorted(sections, key=lambda each: -each.deadline)))
        waits.append(f"critical: {names}, {_left(last.deadline - now)}")
        ends = max(ends, last.deadline + stop.limits.cleanup)
    stage = "draining" if stop.stage is Stage.DRAINING else "stopping"
    return StatusLine(f"{stage}: {'; '.join(waits) or 'nothing runs'}", max(0.0, ends - now))


def of_end(context: RuntimeContext) -> StatusLine:
    """The status after all work has ended; a failed unit continues to show it."""
    cut = context.stop.registry.cut_count
    if not cut:
        return StatusLine("stopped")
    return StatusLine(
        f"stopped: {_count(cut, 'critical operation')} cut, see {context.state / TEXT_NAME}"
    )


def _ordinary_end(stop: Stop, works: list[Work]) -> float:
    """When the last of *works*, none of which is critical now, has to have ended."""
    if not works:
        return -math.inf
    cancelled = min(stop.began_at + min(stop.limits.drain, stop.limits.critical), stop.stopping_at)
    # Work that has left its critical section has its whole cleanup time from there on.
    return max(cancelled, *(work.closed_at for work in works)) + stop.limits.cleanup


def _name(section: Section) -> str:
    return f"{section.name} of {section.key or section.owner}"


def _names(names: Iterable[str]) -> str:
    first, *more = names
    return f"{first} and {len(more)} more" if more else first


def _left(seconds: float) -> str:
    seconds = max(0.0, seconds)
    step = 1 if seconds <= 20 else 10  # noqa: PLR2004 - see the module docstring
    return f"{format_duration(math.ceil(seconds / step) * step)} left"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
