"""``reconciled reap``: end, or wait for, what a dead daemon left running.

Run by the service manager after the daemon's end, or by hand. Exit codes: 0 nothing is left ·
3 something had to be killed, or a critical program was ended before it was done · 75 a daemon
lives: nothing was touched · 78 the state directory cannot be used.

1. The state lock comes first, and is held to the end: no daemon starts meanwhile.
2. Ordinary programs are ended at once; a critical one gets what is left of its own budget, at
   most ``--wait``; both get ``--term`` between SIGTERM and SIGKILL.
3. By hand it looks at recorded identities only. As the service manager's control process it
   ends what else is in the unit's own control group, since nobody else will.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from reconciled.core.durations import parse_duration
from reconciled.journal.lock import Locked, StateLock, StateRefused
from reconciled.programs.reaper import Reaper, own_group

USAGE, KILLED, LIVES, REFUSED = 2, 3, 75, 78


def execute(arguments: argparse.Namespace) -> int:
    """Reap; what is done is told on standard error, line by line."""
    try:
        wait, term = parse_duration(arguments.wait), parse_duration(arguments.term)
    except ValueError as error:
        return _refuse(USAGE, str(error))
    written = arguments.state or os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if not written:
        return _refuse(
            USAGE, "no state directory: write --state DIRECTORY, or set $STATE_DIRECTORY"
        )
    state = Path(written).absolute()
    if not state.is_dir():
        return 0  # no daemon has ever got so far as to start a program
    _act_as_owner(state)
    try:
        lock = StateLock.acquire(state, wait=0)
    except Locked as held:
        return _refuse(LIVES, str(held))
    except StateRefused as refused:
        return _refuse(REFUSED, str(refused))
    try:
        # Only a service manager sets it, and only for its own control processes.
        group = own_group() if "SERVICE_RESULT" in os.environ else None
        killed = Reaper(wait, term, _say, group).reap(state / "operations")
    finally:
        lock.release()
    return KILLED if killed else 0


def _act_as_owner(state: Path) -> None:
    """As root, be the owner of *state*: the next daemon has to read what is written."""
    if os.geteuid() == 0:
        status = state.stat()
        os.setegid(status.st_gid)
        os.seteuid(status.st_uid)


def _say(text: str) -> None:
    sys.stderr.write(f"reconciled reap: {text}\n")
    sys.stderr.flush()


def _refuse(code: int, why: str) -> int:
    _say(why)
    return code
