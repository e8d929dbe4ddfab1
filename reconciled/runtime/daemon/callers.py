"""Whether a process was started by a program of an operation: by its environment and ancestors.

A program of an operation has RECONCILED_OPERATION in its environment, and so have its descendants,
also those that have left its group or lost their parent. Where an environment was cleared or
cannot be read, as under sudo, the parents are followed up to one that has it.
"""

from __future__ import annotations

import os
from pathlib import Path

from reconciled.programs.processes import find_process

_VARIABLE = b"RECONCILED_OPERATION="


def find_calling_operation(pid: int) -> str:
    """The id of the operation whose program started process *pid*; empty: none.

    Not beyond this process: its own environment names an operation of another daemon, if any.
    """
    seen: set[int] = set()
    while pid > 1 and pid != os.getpid() and pid not in seen:
        seen.add(pid)
        if operation := _operation_of(pid):
            return operation
        process = find_process(pid)
        if process is None:
            return ""
        pid = process.parent
    return ""


def _operation_of(pid: int) -> str:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    for entry in entries:
        if entry.startswith(_VARIABLE):
            return entry.removeprefix(_VARIABLE).decode("ascii", "replace")
    return ""
