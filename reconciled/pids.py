"""Whether a process with a given number exists: the one predicate on a bare pid.

A pid may have been reused meanwhile. Where the identity matters, compare the start time as well
(``programs/processes.py``).
"""

from __future__ import annotations

import os


def pid_exists(pid: int) -> bool:
    """Whether there is a process *pid*, visible to this one or not; a zombie counts.

    0, which the kernel reports for a process of an outer pid namespace, always exists.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
