"""``reconciled reap``: end, or wait for, the programs that a dead daemon left running.

The service manager runs it after the daemon's end; a person may run it, too. Exit codes: 0 no
program is left · 3 a program was killed, or a critical one was ended before it had finished · 75
a daemon is running, and nothing was ended · 78 the state directory cannot be used.

1. It takes the state lock first and holds it to the end, so no daemon starts meanwhile.
2. Ordinary programs get SIGTERM at once. A critical one gets what is left of its own budget, at
   most ``--wait``. Both get SIGKILL ``--term`` after SIGTERM.
3. Run by a person it ends recorded programs only. As the service manager's control process it
   also ends all other processes of the unit's control group.
4. While it waits, it reports for which program, and asks the manager for more time: the unit's
   limit may be shorter than the longest budget.
5. It runs after every stop. If the unit's control group has no other process, no program is left,
   since all are in it; then nothing more is imported.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from reconciled.config.locations import find_config, find_state
from reconciled.core.durations import parse_duration
from reconciled.core.exit_codes import INVALID, KILLED, LOCKED, USAGE
from reconciled.programs.cgroup import cgroup_of_control_process, pids_in

TYPE_CHECKING = False  # typing itself takes 4 ms
if TYPE_CHECKING:
    import argparse

    from reconciled.service.notify import Notifier

# Seconds requested beyond the wait itself: for the next measure and the next request.
SLACK = 5.0
# Most seconds per request: if this process hangs, the manager waits no longer than that.
EXTENSION = 30.0


def execute(arguments: argparse.Namespace) -> int:
    """Reap; writes each action as a line to standard error."""
    try:
        wait, term = parse_duration(arguments.wait), parse_duration(arguments.term)
    except ValueError as error:
        return _refuse(USAGE, str(error))
    group = cgroup_of_control_process(os.environ)
    if group is not None and pids_in(group) == [os.getpid()]:
        return 0
    state = _state(arguments)
    if state is None:
        return _refuse(
            USAGE, "no state directory is known: add --state DIRECTORY, or set $STATE_DIRECTORY"
        )
    if not state.is_dir():
        return 0  # no daemon has ever started a program
    return _reap(state, wait, term, group)


def _reap(state: Path, wait: float, term: float, group: Path | None) -> int:
    from reconciled.core.errors import StateLocked, StateRefused
    from reconciled.journal.state_lock import StateLock
    from reconciled.programs.reap import SurvivorReaper

    _act_as_owner(state)
    try:
        lock = StateLock.acquire(state, wait=0)
    except StateLocked as held:
        pid = "pid unknown" if held.pid is None else f"pid {held.pid}"
        return _refuse(
            LOCKED, f"a daemon ({pid}) is running on {state}: nothing was ended; stop it first"
        )
    except StateRefused as refused:
        return _refuse(INVALID, str(refused))
    try:
        killed = SurvivorReaper(wait, term, _print, group, _Manager().report_waiting).reap(
            state / "operations"
        )
    finally:
        lock.release()
    return KILLED if killed else 0


def _state(arguments: argparse.Namespace) -> Path | None:
    if arguments.state:
        return Path(arguments.state).absolute()
    return find_state(find_config(arguments.config, os.environ), os.environ)


class _Manager:
    """The service manager, which gets status and time requests; does nothing without one."""

    def __init__(self) -> None:
        self._notifier: Notifier | None = None

    def report_waiting(self, waiting: str, seconds: float) -> None:
        """Set the status text, and request *seconds* more."""
        if self._notifier is None:
            from reconciled.service.notify import Notifier

            self._notifier = Notifier.from_environ(os.environ)
        self._notifier.set_status(waiting)
        self._notifier.extend_timeout(min(seconds + SLACK, EXTENSION))


def _act_as_owner(state: Path) -> None:
    """As root, act as the owner of *state*: the next daemon has to read the records."""
    status = state.stat()
    # If root is the owner the call is skipped: a sandbox may refuse it.
    if os.geteuid() == 0 and status.st_uid:
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)


def _print(text: str) -> None:
    # A closed standard error, of a journal that has just ended say, must not stop the reaping.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"reconciled reap: {text}\n")
            sys.stderr.flush()


def _refuse(code: int, why: str) -> int:
    _print(why)
    return code
