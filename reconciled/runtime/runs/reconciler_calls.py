"""What a reconciler answers when it is asked about an operation: nothing is guessed from it.

1. Whatever observe() does or gives, the answer is an observation; UNKNOWN where it is of no use.
2. Whatever recover() does or gives that is no decision is a fault, which holds its operation.
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
    """*result*, if a reconciler may answer that."""
    if isinstance(result, Result):
        return result
    return retry(
        f"reconcile() returned {result!r:.80}: return done(), after(), retry() or terminal()"
    )


async def call_observe(reconciler: Reconciler[Any], request: RunRequest) -> Observation | None:
    """What observe() says; None: it cannot. Raises nothing but a cancellation."""
    try:
        seen: object = await reconciler.observe(request)
        if seen is None or isinstance(seen, Observation):
            return seen
        return Observation(Observed.UNKNOWN, f"observe() returned {seen!r:.80}, no Observation")
    except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for one
        failure = failure_of(error)
        if failure is None or cancellation_in(error) is not None:
            raise
        return Observation(Observed.UNKNOWN, failure.result.reason)  # noqa: ASYNC104 - none


def call_recover(
    reconciler: Reconciler[Any], interrupted: Interrupted, observation: Observation | None
) -> tuple[Decision | None, str]:
    """What recover() says, None: no opinion; and what is wrong with it, empty: nothing."""
    try:
        word: object = reconciler.recover(interrupted, observation)
        if word is None or isinstance(word, Decision):
            return word, ""
        if inspect.iscoroutine(word):
            word.close()
            return None, "it is an async def, and may not wait: make it a plain one"
        return None, f"it returned {word!r:.80}: return a decision, as Complete(), or None"
    except BaseException as error:  # noqa: ASYNC103 - failure_of() gives None for one
        failure = failure_of(error)
        if failure is None:
            raise
        return None, failure.result.reason  # noqa: ASYNC104 - it was none
