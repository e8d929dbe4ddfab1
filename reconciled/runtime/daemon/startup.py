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

from reconciled.config.load import load, not_built_lines
from reconciled.core.errors import (
    Invalid,
    ListenRefused,
    StateLocked,
    StateRefused,
    StoreTooNew,
    StoreUnusable,
)
from reconciled.core.exit_codes import DONE, FAILED, INVALID, LOCKED, NOT_DONE
from reconciled.core.resources import Key
from reconciled.journal.operation_journal import HistoryLimits, OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.journal.state_lock import StateLock
from reconciled.observe.logs import Logs, configure
from reconciled.programs.cgroup import cgroup_of_main_process
from reconciled.programs.orphans import become_subreaper
from reconciled.runtime.controllers.loading import PreparedConfig, prepared_whole
from reconciled.runtime.controllers.secrets import redact_credentials, stall_without_secrets
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.daemon.integrations import Integrations
from reconciled.runtime.daemon.run_once import OnceProgress
from reconciled.runtime.daemon.strays import end_leftovers
from reconciled.runtime.host.unit_check import UnitCheck
from reconciled.signal_handlers import SignalHandlers


def run_daemon(  # noqa: PLR0913 - what the process was given
    path: Path,
    environ: Mapping[str, str],
    signals: SignalHandlers,
    integrations: Integrations,
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
        prepared = stall_without_secrets(prepared_whole(loaded.config))
    except Invalid as invalid:
        return _log_invalid(path, environ, invalid)
    log_config = loaded.config.log
    logs = configure(log_config.format, log_config.level, environment=environ)
    logs.capture_stdlib()
    faulthandler.enable(file=logs.sink.fileno(), all_threads=True)
    redact_credentials(logs.redactor)
    try:
        for warning in loaded.warnings:
            logs.log.warning("config.warning", at=str(warning.origin), reason=warning.message)
        for line in not_built_lines(loaded.config):
            logs.log.warning("config.not_built", reason=line)
        integrations.unit = UnitCheck(logs.log, environ, integrations.notifier.watchdog_s)
        if strict and not integrations.unit.fits(loaded.config.stop):
            reason = "--strict: the stop budget does not fit the unit"
            logs.log.error("daemon.refused", reason=reason)
            return INVALID
        return _locked(
            path,
            environ,
            signals,
            integrations,
            prepared=prepared,
            logs=logs,
            once=once,
            began=began,
        )
    finally:
        signals.ignore_stops()
        logs.close()


def _log_invalid(path: Path, environ: Mapping[str, str], invalid: Invalid) -> int:
    """The log's settings may be what is wrong: these lines go out in the default format."""
    logs = configure(environment=environ)
    redact_credentials(logs.redactor)
    for problem in invalid.problems:
        logs.log.error("config.invalid", at=str(problem.origin), reason=problem.message)
    logs.log.error("daemon.refused", config=str(path), problems=len(invalid.problems))
    logs.close()
    return INVALID


def _locked(  # noqa: PLR0913 - what the start has gathered
    path: Path,
    environ: Mapping[str, str],
    signals: SignalHandlers,
    integrations: Integrations,
    *,
    prepared: PreparedConfig,
    logs: Logs,
    once: bool,
    began: float,
) -> int:
    become_subreaper()
    signals.install()  # again: a parent that ignored a signal has handed that down
    state = prepared.config.state
    integrations.notify_opening()
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
    journal = OperationJournal.load(store, history=HistoryLimits(kept.operations, kept.age))
    _log_store_condition(logs, store, journal)
    group = cgroup_of_main_process(environ) if integrations.notifier.present else None
    if group is not None:
        end_leftovers(group, state / "operations", journal.list_open(), logs.log)
    daemon = Daemon(
        path, environ, prepared, logs, signals, integrations, store, journal, once=once, began=began
    )
    code = _run(daemon)
    if once and code == DONE:
        code = _once_code(logs, daemon.once_progress)
    lock.release()
    return code


def _opened(state: Path, logs: Logs) -> tuple[StateLock, Store] | int:
    """The lock and the store; or the exit code, where either refuses."""
    try:
        return StateLock.acquire(state), Store.open(state)
    except StateLocked as error:
        logs.log.error("daemon.locked", reason=str(error))
        return LOCKED
    except (StateRefused, StoreTooNew) as error:
        logs.log.error("daemon.refused", reason=str(error))
        return INVALID
    except StoreUnusable as error:
        logs.log.error("daemon.failed", reason=str(error))
        return FAILED


def _run(daemon: Daemon) -> int:
    try:
        daemon.integrations.open(daemon.prepared.config, daemon.logs.log)
    except ListenRefused as error:
        daemon.logs.log.error("daemon.failed", reason=str(error))
        return FAILED
    try:
        return trio.run(daemon.run, strict_exception_groups=True)
    except trio.TrioInternalError as error:
        # A plugin's system task failed, say: trio has given up on the tree, and so do we.
        return daemon.shutdown.collapse(error)
    finally:
        daemon.integrations.close()


def _log_store_condition(logs: Logs, store: Store, journal: OperationJournal) -> None:
    """What the last end has left: a torn tail, damage, operations to settle."""
    condition = store.integrity
    if condition.warning:
        logs.log.warning("journal.torn_tail", reason=condition.warning)
    if condition.damage:
        logs.log.error(
            "journal.damaged", reason=condition.damage, moved_to=str(condition.set_aside_path)
        )
    if store.degraded:
        logs.log.error(
            "journal.degraded",
            reason=store.degraded_reason,
            commands='reconciled journal resolve --all --abandon --why "…"',
        )
    for record in journal.list_open():
        logs.log.warning(
            "operation.found_open",
            key=record.key,
            operation=record.id,
            name=record.name,
            last_step=record.last_step or None,
            held=record.hold.reason if record.hold else None,
        )


def _once_code(logs: Logs, progress: OnceProgress | None) -> int:
    """Name each key that is not done."""
    if progress is None or not progress.begun:
        logs.log.error("once.not_done", reason="it was stopped before every source was read")
        return NOT_DONE
    reasons: dict[Key, str] = dict.fromkeys(progress.missing, "the stop came first")
    for key, reason in sorted((reasons | progress.failed).items()):
        logs.log.error("once.not_done", key=key, reason=reason)
    for source, reason in sorted(progress.unread.items()):
        logs.log.error("once.source_incomplete", source=source, reason=reason)
    return NOT_DONE if reasons or progress.failed or progress.unread else DONE
