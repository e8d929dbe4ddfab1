"""What follows from the answers of an Exec's programs after an interruption: pure.

The program that was interrupted comes first: if it went on without its daemon and ended with an
exit code, that is its outcome. Then ``recover`` has the say. Only then is there no opinion.
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

# Exit codes of recover; any other: ask again.
SETTLED, APPLY_AGAIN, ROLL_BACK, HOLD = 0, 10, 11, 12
MAX_WAIT = 300.0  # seconds until it is asked again


def action_of(interrupted: Interrupted | RecoveringOperation) -> str:
    """What its program does, as that is told what it does."""
    return "rollback" if interrupted.undoes else interrupted.name


def has_own_outcome(interrupted: Interrupted | RecoveringOperation) -> bool:
    """Whether its program ended with an exit code: done or failed, but not interrupted."""
    ended = interrupted.ended
    return ended is not None and ended.action == action_of(interrupted) and ended.code is not None


def decide_recovery(
    interrupted: Interrupted, observation: Observation | None, *, has_recover: bool
) -> Decision | None:
    """What to do, None for no opinion. asked: whether there is a ``recover`` to ask."""
    ended = interrupted.ended
    if ended is not None and has_own_outcome(interrupted):
        if ended.code == 0:
            return Complete(f"{ended.action} ended with exit code 0 after its daemon was gone")
        if not interrupted.last_step and not interrupted.began_once:
            # As a failure that the daemon saw itself: closed, and tried anew.
            return Abandon(f"{ended.action} ended with exit code {ended.code}")
    if not has_recover:
        return None
    answer = None if observation is None else observation.data
    if isinstance(answer, Mapping):
        return _decide_by_exit_code(interrupted, answer["code"], answer["said"])
    if interrupted.removal or interrupted.undoes:
        return _wait(interrupted, "recover gave no answer")
    # UNKNOWN then: looked at again, and held when that happens too often.
    return None


def _decide_by_exit_code(interrupted: Interrupted, code: int | None, said: str) -> Decision:
    if code == SETTLED:
        return Complete(said)
    if code == HOLD:
        return Hold("recover wants a person to look", said)
    if code == ROLL_BACK and not interrupted.undoes:
        return RollBack(said)
    if code in {APPLY_AGAIN, ROLL_BACK}:
        # What takes another operation back is not itself taken back: it goes on.
        again = interrupted.undoes or interrupted.began_once
        return RollForward(said) if again else Retry(said)
    return _wait(interrupted, said)


def _wait(interrupted: Interrupted, why: str) -> Wait:
    return Wait(min(MAX_WAIT, 2.0 ** min(interrupted.attempt - 1, 10)), why)
