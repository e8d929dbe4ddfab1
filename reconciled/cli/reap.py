"""``reconciled reap``: end, or wait for, what a dead daemon left running.

Run by the service manager after the daemon's end, or by hand. Exit codes: 0 nothing is left ·
3 something had to be killed, or a critical program was ended before it was done · 75 a daemon
lives: nothing was touched · 78 the state directory cannot be used.

1. The state lock comes first, and is held to the end: no daemon starts meanwhile.
2. Ordinary programs are ended at once; a critical one gets what is left of its own budget, at
   most ``--wait``; both get ``--term`` between SIGTERM and SIGKILL.
3. By hand it looks at recorded identities only. As the service manager's control process it
   ends what else is in the unit's own control group, since nobody else will.
4. While it waits it says for whom, and asks the manager for the time: a unit's own limit need
   not be as long as the longest budget.
5. It runs after every stop. Where its unit's control group holds nobody else there is nothing
   to look for, since our programs are there, and nothing more is imported.
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

# Beyond what is waited for: for the next measure, and for the message that asks for more time.
SLACK = 5.0
# A manager that is asked for more would wait so much longer for a reaper that hangs.
EXTENSION = 30.0


def execute(arguments: argparse.Namespace) -> int:
    """Reap; what is done is told on standard error, line by line."""
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
            USAGE, "no state directory: write --state DIRECTORY, or set $STATE_DIRECTORY"
        )
    if not state.is_dir():
        return 0  # no daemon has ever got so far as to start a program
    return _reap(state, wait, term, group)


def _reap(state: Path, wait: float, term: float, group: Path | None) -> int:
    from reconciled.core.errors import StateLocked, StateRefused
    from reconciled.journal.state_lock import StateLock
    from reconciled.programs.survivor_reaper import SurvivorReaper

    _act_as_owner(state)
    try:
        lock = StateLock.acquire(state, wait=0)
    except StateLocked as held:
        return _refuse(LOCKED, str(held))
    except StateRefused as refused:
        return _refuse(INVALID, str(refused))
    try:
        killed = SurvivorReaper(wait, term, _say, group, _Manager().report_waiting).reap(
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
    """The service manager, as whoever waits speaks to it; silent where there is none."""

    def __init__(self) -> None:
        self._notifier: Notifier | None = None

    def report_waiting(self, waiting: str, seconds: float) -> None:
        """Whom this waits for, and for how many *seconds* at most."""
        if self._notifier is None:
            from reconciled.service.notify import Notifier

            self._notifier = Notifier.from_environ(os.environ)
        self._notifier.set_status(waiting)
        self._notifier.extend_timeout(min(seconds + SLACK, EXTENSION))


def _act_as_owner(state: Path) -> None:
    """As root, be the owner of *state*: the next daemon has to read what is written."""
    status = state.stat()
    # Where root is the owner there is nothing to become, and a sandbox refuses even the call.
    if os.geteuid() == 0 and status.st_uid:
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)


def _say(text: str) -> None:
    # Whoever reads it may be gone, as a journal that has just ended: what has to be ended is not.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"reconciled reap: {text}\n")
            sys.stderr.flush()


def _refuse(code: int, why: str) -> int:
    _say(why)
    return code
