"""``reconciled step NAME``: a program of an operation says that NAME is done.

It needs nothing but RECONCILED_HANDLE: no daemon, configuration or store. It may be called
between any two effects of a program, so that it imports nothing heavy.

Exit codes: 0 NAME is durable · 1 it is not: stop · 2 usage · 3 the attempt of the caller is not
the current one: stop without effects.
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
    """As the command line wants it."""
    return record_step(arguments.name)


def record_step(name: str) -> int:
    """Note step *name*; one line on standard error where that cannot be done."""
    handle = os.environ.get("RECONCILED_HANDLE")
    if handle is None:
        return _refuse(
            USAGE,
            "RECONCILED_HANDLE is not set: only a program that reconciled runs in an operation,"
            " and what that starts with its environment, can note steps",
        )
    try:
        check_name(name)
        directory, attempt = parse_handle(handle)
    except ValueError as error:
        return _refuse(USAGE, str(error))
    try:
        steps.record_step(directory, attempt, name)
    except StaleAttempt as error:
        return _refuse(STALE_ATTEMPT, f"{error}: stop without effects")
    except (StepsDamaged, OSError) as error:
        return _refuse(FAILED, f"step {name} is not durable: {error}")
    return 0


def _refuse(code: int, why: str) -> int:
    sys.stderr.write(f"reconciled step: {why}\n")
    return code
