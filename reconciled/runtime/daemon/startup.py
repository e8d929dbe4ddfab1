"""The start of the daemon: everything before the loop runs, and what may go wrong with it.

Order: configuration, plugins, reaper, lock, store, loop. Nothing is written before the lock is
held, and nothing is begun before the loop runs, so that a signal until then just ends it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import trio

from reconciled.config.load import load
from reconciled.config.references import not_built
from reconciled.control.addresses import ListenRefused
from reconciled.core.problems import Invalid
from reconciled.core.resources import Key
from reconciled.instant import Signals
from reconciled.journal.operation_log import DurableOperations, History
from reconciled.journal.sqlite.schema import StoreTooNew, StoreUnusable
from reconciled.journal.sqlite.store import Store
from reconciled.journal.state_lock import Locked, StateLock, StateRefused
from reconciled.observe.logs import Logs, configure
from reconciled.programs.cgroup import group_of_main_process
from reconciled.programs.orphans import become_reaper
from reconciled.runtime.controllers.loading import Prepared, prepared_whole
from reconciled.runtime.controllers.secrets import hide, with_secrets
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.daemon.integrations import Outside
from reconciled.runtime.daemon.run_once import Once
from reconciled.runtime.daemon.strays import end_leftovers
from reconciled.runtime.host.unit_check import UnitFit

DONE, FAILED, NOT_DONE, HELD, INVALID = 0, 1, 4, 75, 78


def run_daemon(  # noqa: PLR0913 - what the process was given
    path: Path,
    environ: Mapping[str, str],
    signals: Signals,
    outside: Outside,
    *,
    once: bool = False,
    strict: bool = False,
) -> int:
    """Be the daemon until it has stopped; the exit code. The handlers are installed already."""
    began = time.monotonic()
    # For what ends us with a signal of its own: a crash in C code, the manager's watchdog.
    faulthandler.enable(file=2, all_threads=True)
    try:
        loaded = load(path, environ)
        prepared = with_secrets(prepared_whole(loaded.config))
    except Invalid as invalid:
        return _tell_invalid(path, environ, invalid)
    log_config = loaded.config.log
    logs = configure(log_config.format, log_config.level, environment=environ)
    logs.adopt()
    faulthandler.enable(file=logs.sink.fileno(), all_threads=True)
    hide(logs.redactor)
    try:
        for warning in loaded.warnings:
            logs.log.warning("config.warning", at=str(warning.origin), reason=warning.message)
        for line in not_built(loaded.config):
            logs.log.warning("config.not_built", reason=line)
        outside.unit = UnitFit(logs.log, environ, outside.notifier.watchdog_s)
        if strict and not outside.unit.fits(loaded.config.stop):
            reason = "--strict: the stop budget does not fit the unit"
            logs.log.error("daemon.refused", reason=reason)
            return INVALID
        return _locked(
            path, environ, signals, outside, prepared=prepared, logs=logs, once=once, began=began
        )
    finally:
        signals.ignore_stops()
        logs.close()


def _tell_invalid(path: Path, environ: Mapping[str, str], invalid: Invalid) -> int:
    """The log's settings may be what is wrong: these lines go out in the default format."""
    logs = configure(environment=environ)
    hide(logs.redactor)
    for problem in invalid.problems:
        logs.log.error("config.invalid", at=str(problem.origin), reason=problem.message)
    logs.log.error("daemon.refused", config=str(path), problems=len(invalid.problems))
    logs.close()
    return INVALID


def _locked(  # noqa: PLR0913 - what the start has gathered
    path: Path,
    environ: Mapping[str, str],
    signals: Signals,
    outside: Outside,
    *,
    prepared: Prepared,
    logs: Logs,
    once: bool,
    began: float,
) -> int:
    become_reaper()
    signals.install()  # again: a parent that ignored a signal has handed that down
    state = prepared.config.state
    outside.tell_opening()
    opened = _opened(state, logs)
    if isinstance(opened, int):
        return opened
    lock, store = opened
    for warning in lock.warnings:
        logs.log.warning("state.warning", reason=warning)
    # Dumps without the interpreter's help, also while the loop is blocked.
    faulthandler.register(signal.SIGUSR1, file=logs.sink.fileno(), all_threads=True)
    logs.log.info(
        "daemon.starting",
        pid=os.getpid(),
        config=str(path),
        state=str(state),
        epoch=store.epoch,
        stop_budget_s=prepared.config.stop.budget,
    )
    kept = prepared.config.journal.history
    journal = DurableOperations.over(store, history=History(kept.operations, kept.age))
    _tell_condition(logs, store, journal)
    group = group_of_main_process(environ) if outside.notifier.present else None
    if group is not None:
        end_leftovers(group, state / "operations", journal.open(), logs.log)
    daemon = Daemon(
        path, environ, prepared, logs, signals, outside, store, journal, once=once, began=began
    )
    code = _run(daemon)
    if once and code == DONE:
        code = _once_code(logs, daemon.counted)
    lock.release()
    return code


def _opened(state: Path, logs: Logs) -> tuple[StateLock, Store] | int:
    """The lock and the store; or the exit code, where either refuses."""
    try:
        return StateLock.acquire(state), Store.open(state)
    except Locked as error:
        logs.log.error("daemon.locked", reason=str(error))
        return HELD
    except (StateRefused, StoreTooNew) as error:
        logs.log.error("daemon.refused", reason=str(error))
        return INVALID
    except StoreUnusable as error:
        logs.log.error("daemon.failed", reason=str(error))
        return FAILED


def _run(daemon: Daemon) -> int:
    try:
        daemon.outside.open(daemon.prepared.config, daemon.logs.log)
    except ListenRefused as error:
        daemon.logs.log.error("daemon.failed", reason=str(error))
        return FAILED
    try:
        return trio.run(daemon.run, strict_exception_groups=True)
    except trio.TrioInternalError as error:
        # A plugin's system task failed, say: trio has given up on the tree, and so do we.
        return daemon.ending.collapse(error)
    finally:
        daemon.outside.close()


def _tell_condition(logs: Logs, store: Store, journal: DurableOperations) -> None:
    """What the last end has left: a torn tail, damage, operations to settle."""
    condition = store.condition
    if condition.warning:
        logs.log.warning("journal.torn_tail", reason=condition.warning)
    if condition.damage:
        logs.log.error("journal.damaged", reason=condition.damage, aside=str(condition.aside))
    if store.degraded:
        logs.log.error(
            "journal.degraded",
            reason=store.degraded_why,
            settle='reconciled journal resolve --all --abandon --why "…"',
        )
    for record in journal.open():
        logs.log.warning(
            "operation.found_open",
            key=record.key,
            operation=record.id,
            name=record.name,
            last_step=record.last_step or None,
            held=record.hold.reason if record.hold else None,
        )


def _once_code(logs: Logs, counted: Once | None) -> int:
    """Name each key that is not done."""
    if counted is None or not counted.begun:
        logs.log.error("once.not_done", reason="it was stopped before every source was read")
        return NOT_DONE
    reasons: dict[Key, str] = dict.fromkeys(counted.missing, "the stop came first")
    for key, reason in sorted((reasons | counted.failed).items()):
        logs.log.error("once.not_done", key=key, reason=reason)
    for source, reason in sorted(counted.unread.items()):
        logs.log.error("once.unread", source=source, reason=reason)
    return NOT_DONE if reasons or counted.failed or counted.unread else DONE
