"""Calls of a reconciler's methods, and checks of what they return: nothing is guessed from it.

1. observe() gives an observation whatever it raises or returns; UNKNOWN where it is not one.
2. recover() that raises or returns no decision is a fault, which holds its operation.
3. reconcile() and remove() that return no Result have failed.
"""

from __future__ import annotations

import inspect
from typing import Any

from reconciled.api import Reconciler
from reconciled.core.recovery import Decision, Interrupted, Observation, Observed
from reconciled.core.results import Outcome, Result, retry
from reconciled.runtime.plugin_errors import cancellation_in, failure_of
from reconciled.runtime.runs.request import RunRequest

SUCCESSES = (Outcome.DONE, Outcome.AFTER)


def checked_result(result: object) -> Result:
    """*result* of reconcile() or remove() if it is a Result, else a retry that names it."""
    if isinstance(result, Result):
        return result
    return retry(
        f"reconcile() returned {result!r:.80}: return done(), after(), retry() or terminal()"
    )


async def call_observe(reconciler: Reconciler[Any], request: RunRequest) -> Observation | None:
    """What observe() returns; None: it cannot observe. Raises nothing but a cancellation."""
    try:
        observation: object = await reconciler.observe(request)
        if observation is None or isinstance(observation, Observation):
            return observation
        return Observation(
            Observed.UNKNOWN, f"observe() returned {observation!r:.80}: return an Observation"
        )
    except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for one
        failure = failure_of(error)
        if failure is None or cancellation_in(error) is not None:
            raise
        return Observation(Observed.UNKNOWN, failure.result.reason)  # noqa: ASYNC104 - none


def call_recover(
    reconciler: Reconciler[Any], interrupted: Interrupted, observation: Observation | None
) -> tuple[Decision | None, str]:
    """The decision of recover(), None: no opinion; and its fault, empty: there is none."""
    try:
        decision: object = reconciler.recover(interrupted, observation)
        if decision is None or isinstance(decision, Decision):
            return decision, ""
        if inspect.iscoroutine(decision):
            decision.close()
            return None, "it is an async function: make it a plain def, since it must not wait"
        return None, f"it returned {decision!r:.80}: return a decision such as Complete(), or None"
    except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for one
        failure = failure_of(error)
        if failure is None:
            raise
        return None, failure.result.reason  # noqa: ASYNC104 - it was none
