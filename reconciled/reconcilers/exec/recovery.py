"""Decisions about an interrupted operation of an Exec, from its programs' exit codes: pure.

The interrupted program decides first: if it continued without its daemon and ended with an exit
code, that is its outcome. Otherwise ``recover`` decides, and without it there is no decision.
"""

from __future__ import annotations

from collections.abc import Mapping

from reconciled.api import (
    Abandon,
    Complete,
    Decision,
    Hold,
    Interrupted,
    Observation,
    RecoveringOperation,
    Retry,
    RollBack,
    RollForward,
    Wait,
)

# Exit codes of recover; after any other it is run again.
SETTLED, APPLY_AGAIN, ROLL_BACK, HOLD = 0, 10, 11, 12
MAX_WAIT = 300.0  # seconds until recover is run again


def action_of(interrupted: Interrupted | RecoveringOperation) -> str:
    """The value of RECONCILED_ACTION in the interrupted program."""
    return "rollback" if interrupted.undoes else interrupted.name


def has_own_outcome(interrupted: Interrupted | RecoveringOperation) -> bool:
    """Whether its program ended with an exit code: done or failed, but not interrupted."""
    ended = interrupted.ended
    return ended is not None and ended.action == action_of(interrupted) and ended.code is not None


def decide_recovery(
    interrupted: Interrupted, observation: Observation | None, *, has_recover: bool
) -> Decision | None:
    """The decision, or None to leave it to the policy. *has_recover*: the spec has ``recover``."""
    ended = interrupted.ended
    if ended is not None and has_own_outcome(interrupted):
        if ended.code == 0:
            return Complete(f"{ended.action} ended with exit code 0 after its daemon had ended")
        if not interrupted.last_step and not interrupted.began_once:
            # Like a failure in a running daemon: the operation is closed and tried again.
            return Abandon(f"{ended.action} ended with exit code {ended.code}")
    if not has_recover:
        return None
    result = None if observation is None else observation.data
    if isinstance(result, Mapping):
        return _decide_by_exit_code(interrupted, result["code"], result["text"])
    if interrupted.removal or interrupted.undoes:
        return _wait(interrupted, "recover gave no result")
    # The observation is UNKNOWN: it is repeated, and the key held if that happens too often.
    return None


def _decide_by_exit_code(interrupted: Interrupted, code: int | None, text: str) -> Decision:
    if code == SETTLED:
        return Complete(text)
    if code == HOLD:
        return Hold("recover requested a hold", text)
    if code == ROLL_BACK and not interrupted.undoes:
        return RollBack(text)
    if code in {APPLY_AGAIN, ROLL_BACK}:
        # An operation that undoes another one is not undone itself: it continues.
        again = interrupted.undoes or interrupted.began_once
        return RollForward(text) if again else Retry(text)
    return _wait(interrupted, text)


def _wait(interrupted: Interrupted, why: str) -> Wait:
    return Wait(min(MAX_WAIT, 2.0 ** min(interrupted.attempt - 1, 10)), why)
