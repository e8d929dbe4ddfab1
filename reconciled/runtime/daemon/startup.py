"""The start of the daemon: everything before the loop runs, and how it can fail.

Order: configuration, plugins, subreaper, lock, store, leftover processes, loop. Nothing is
written before the lock is held, and nothing starts before the loop runs, so that a signal until
then ends the process at once.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping
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
from reconciled.core.exit_codes import DONE, FAILED, INVALID, LOCKED
from reconciled.journal.operation_journal import HistoryLimits, OperationJournal
from reconciled.journal.operation_record import OperationRecord
from reconciled.journal.sqlite.store import Store
from reconciled.journal.state_identity import ExaminedState, examine
from reconciled.journal.state_lock import StateLock
from reconciled.observe.bound_log import BoundLog
from reconciled.observe.logs import Logs, configure
from reconciled.programs.cgroup import cgroup_of_main_process, hidden_in, members_of
from reconciled.programs.orphan_reaper import become_subreaper
from reconciled.programs.reap import SurvivorReaper
from reconciled.programs.survivors import TERM_GRACE
from reconciled.runtime.controllers.loading import PreparedConfig, prepare_valid
from reconciled.runtime.controllers.secrets import redact_credentials, stall_without_secrets
from reconciled.runtime.daemon.daemon import Daemon
from reconciled.runtime.daemon.lost_operations import find_lost
from reconciled.runtime.daemon.manager_integration import ManagerIntegration
from reconciled.runtime.host.unit_check import UnitCheck
from reconciled.signal_handlers import SignalHandlers


def run_daemon(  # noqa: PLR0913 - what the process was given
    path: Path,
    environ: Mapping[str, str],
    signals: SignalHandlers,
    integration: ManagerIntegration,
    *,
    once: bool = False,
    strict: bool = False,
) -> int:
    """Run the daemon until it has stopped; the exit code. *signals* are installed already."""
    began = time.monotonic()
    # Stacks for an end by a signal: a crash in C code, or the manager's watchdog.
    faulthandler.enable(file=2, all_threads=True)
    try:
        loaded = load(path, environ)
        prepared = stall_without_secrets(prepare_valid(loaded.config))
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
        integration.unit = UnitCheck(logs.log, environ, integration.notifier.watchdog_s)
        if strict and not integration.unit.fits(loaded.config.stop):
            reason = "--strict: the stop budget does not fit the unit"
            logs.log.error("daemon.refused", reason=reason)
            return INVALID
        return _locked(
            path,
            environ,
            signals,
            integration,
            prepared=prepared,
            logs=logs,
            once=once,
            began=began,
        )
    finally:
        signals.ignore_stops()
        logs.close()


def _log_invalid(path: Path, environ: Mapping[str, str], invalid: Invalid) -> int:
    """Log the problems, in the default format, because the log's own settings may be invalid."""
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
    integration: ManagerIntegration,
    *,
    prepared: PreparedConfig,
    logs: Logs,
    once: bool,
    began: float,
) -> int:
    become_subreaper()
    signals.install()  # again: a signal that the parent ignored is inherited as ignored
    state = prepared.config.state
    integration.notify_opening()
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
    group = cgroup_of_main_process(environ) if integration.notifier.present else None
    lost = find_lost(store, journal, state / "operations", logs.log)
    if group is not None:
        end_leftovers(group, state / "operations", [*journal.list_open(), *lost], logs.log)
    daemon = Daemon(
        path, environ, prepared, logs, signals, integration, store, journal, once=once, began=began
    )
    daemon.state_lost, daemon.lost = lock.lost, lost
    daemon.examined = _examined(state, logs)
    code = _run(daemon)
    if daemon.once_progress is not None and code == DONE:
        code = daemon.once_progress.log_result(logs.log)
    lock.release()
    return code


def _examined(state: Path, logs: Logs) -> ExaminedState | None:
    """The state directory, compared with its identity; None, with a warning, if it cannot be."""
    try:
        return examine(state)
    except OSError as error:
        reason = f"the identity of {state} cannot be read, by which a copy is recognised: {error}"
        logs.log.warning("state.warning", reason=reason)
        return None


def _opened(state: Path, logs: Logs) -> tuple[StateLock, Store] | int:
    """The lock and the store, or the exit code if one of them cannot be opened."""
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
        daemon.integration.open(daemon.prepared.config, daemon.logs.log)
    except ListenRefused as error:
        daemon.logs.log.error("daemon.failed", reason=str(error))
        return FAILED
    try:
        return trio.run(daemon.run, strict_exception_groups=True)
    except trio.TrioInternalError as error:
        # For example, a system task of a plugin failed: trio has abandoned the tree.
        return daemon.shutdown.collapse(error)
    finally:
        daemon.integration.close()


def _log_store_condition(logs: Logs, store: Store, journal: OperationJournal) -> None:
    """Log what the last run of the daemon left: a torn tail, damage, open operations."""
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
            commands=['reconciled journal resolve --all --abandon --why "…"'],
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


def end_leftovers(
    group: Path, operations: Path, found: Iterable[OperationRecord], log: BoundLog
) -> None:
    """End what an earlier daemon of this unit left running in its control group *group*.

    operations  the directory of operations
    found       the open ones: their critical programs are left to their adoption, which waits

    ``reap`` normally does this when the daemon has ended. It may have been killed itself, and a
    unit may not use it: then the service manager logs "Found left-over process" and starts this
    process beside them. An ordinary program that continued would race its own recovery. Only for
    the unit's main process, and before it is ready: until then no other process belongs there.

    Blocks for 10 s at most. Logs each process that it ends.
    """
    # Our programs are in our group: where it has no other member, no record has to be read.
    if not any(process.alive for process in members_of(group)) and not hidden_in(group):
        return

    def report(text: str) -> None:
        log.warning("program.left_over", reason=text)

    adopted = frozenset(record.id for record in found)
    SurvivorReaper(0.0, TERM_GRACE, report, group, adopted=adopted).reap(operations)
