"""Exceptions that plugin code raises, as results of a run: failures, and cancellations apart."""

from __future__ import annotations

import math

import attrs
import trio

from reconciled.core.errors import Invalid, Terminal
from reconciled.core.results import Result, retry, terminal
from reconciled.stop import Overrun

REASON_LENGTH = 500


@attrs.frozen
class PluginFailure:
    """An exception of plugin code as a result; internal: it is probably a bug of the plugin."""

    result: Result
    error: BaseException
    internal: bool


def failure_of(error: BaseException) -> PluginFailure | None:
    """*error* as a failure of its key; None where it is a cancellation alone.

    SystemExit, KeyboardInterrupt and GeneratorExit from plugin code are that plugin's failure: a
    library that calls sys.exit() must not end the daemon.
    """
    rest = BaseExceptionGroup("", [error]).split(trio.Cancelled)[1]
    if rest is None:
        return None
    first: BaseException = rest
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, Terminal | Invalid):
        return PluginFailure(terminal(text_of(first)), first, internal=False)
    if isinstance(first, Overrun):
        return PluginFailure(retry(f"Overrun: {first}"), first, internal=False)
    if isinstance(first, SystemExit | KeyboardInterrupt | GeneratorExit):
        reason = f"{text_of(first)}: raised by plugin code; the daemon continues"
        return PluginFailure(retry(reason), first, internal=False)
    known = isinstance(first, OSError) or type(first).__module__.startswith("reconciled.")
    return PluginFailure(retry(text_of(first)), first, internal=not known)


def stray_cancellation(error: BaseException) -> PluginFailure | None:
    """The failure of plugin code that kept a Cancelled and raised it where nothing is cancelled.

    None where a cancellation is in effect. A stray one is not passed on: it would end each task
    around it, one after the other, and at last the daemon.
    """
    if trio.current_effective_deadline() == -math.inf:
        return None
    reason = "Cancelled: plugin code raised it outside the cancel scope that it belongs to"
    return PluginFailure(retry(reason), error, internal=True)


def cancellation_in(error: BaseException) -> BaseException | None:
    """The cancellation within *error*, to raise again: a group may hold it beside an error."""
    if isinstance(error, trio.Cancelled):
        return error
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled)
    return None


def text_of(error: BaseException) -> str:
    """*error* as text for a person, at most REASON_LENGTH characters; never raises."""
    try:
        text = str(error)
    except BaseException:  # noqa: ASYNC103, BLE001 - a broken exception may raise anything
        text = "its text cannot be read: str() of it failed"
    name = type(error).__name__
    text = text if isinstance(error, Terminal | Invalid) else f"{name}: {text}" if text else name
    return text if len(text) <= REASON_LENGTH else text[:REASON_LENGTH] + "…"
