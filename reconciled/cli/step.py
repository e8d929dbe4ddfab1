"""``reconciled step NAME``: a program of an operation records that NAME is done.

It needs RECONCILED_HANDLE alone: no daemon, configuration or store. A program may call it between
any two effects, so it imports nothing heavy.

Exit codes: 0 NAME is durable · 1 it is not: stop · 2 usage · 3 the caller's attempt is not the
current one: stop without effects.
"""

from __future__ import annotations

import os
import sys

from reconciled.core.errors import StaleAttempt, StepsDamaged
from reconciled.core.exit_codes import FAILED, STALE_ATTEMPT, USAGE
from reconciled.programs import steps
from reconciled.programs.steps import check_name, parse_handle

TYPE_CHECKING = False  # typing itself takes 4 ms
if TYPE_CHECKING:
    import argparse


def execute(arguments: argparse.Namespace) -> int:
    """Record the step named on the command line; returns the exit code."""
    return record_step(arguments.name)


def record_step(name: str) -> int:
    """Record step *name*; returns the exit code, after one line on standard error if it fails."""
    handle = os.environ.get("RECONCILED_HANDLE")
    if handle is None:
        return _refuse(
            USAGE,
            "RECONCILED_HANDLE is not set: only a program that reconciled runs in an operation can"
            " record steps; pass its environment on to the processes that it starts",
        )
    try:
        check_name(name)
        directory, attempt = parse_handle(handle)
    except ValueError as error:
        return _refuse(USAGE, str(error))
    try:
        steps.record_step(directory, attempt, name)
    except StaleAttempt as error:
        return _refuse(
            STALE_ATTEMPT, f"step {name} is refused: {error}; stop without further effects"
        )
    except (StepsDamaged, OSError) as error:
        return _refuse(FAILED, f"step {name} is not durable: {error}; stop")
    return 0


def _refuse(code: int, why: str) -> int:
    sys.stderr.write(f"reconciled step: {why}\n")
    return code
