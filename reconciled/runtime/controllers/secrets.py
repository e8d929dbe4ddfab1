"""The credentials of the service manager, as the daemon and those who look ahead of it see them.

1. All of them are hidden from the log, whoever reads one and however it gets there.
2. A controller whose options refer to one that is not there stalls, and no other does: it is a
   fault of the machine and not of the configuration, so that nothing is refused for it.
3. From a shell none can be seen. That is no fault of anything: it is said once.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from reconciled.core.errors import SecretUnavailable
from reconciled.core.problems import Problem
from reconciled.observe.redaction import Redactor
from reconciled.runtime.controllers.loading import (
    LoadedController,
    PreparedConfig,
    StalledController,
)
from reconciled.service.credentials import passed_credentials, secrets_in


def redact_credentials(redactor: Redactor) -> None:
    """Have *redactor* hide every credential; for the start, before anything is told."""
    for text in passed_credentials():
        redactor.register_credential(text)


def stall_without_secrets(prepared: PreparedConfig) -> PreparedConfig:
    """*prepared*, with those controllers stalled whose options refer to a secret in vain."""
    ready = []
    stalled = [*prepared.stalled]
    for each in prepared.ready:
        problem = next(_missing(each), None)
        if problem is None:
            ready.append(each)
        else:
            stalled.append(StalledController(each.config, str(problem)))
    return attrs.evolve(prepared, ready=tuple(ready), stalled=tuple(stalled))


def _missing(ready: LoadedController) -> Iterator[Problem]:
    options = ready.plugin.options(ready.config)
    for path, secret in secrets_in(options):
        try:
            secret.reveal_bytes()
        except SecretUnavailable as error:
            place = (*ready.config.path, "options", *path)
            yield ready.config.positions.problem(place, str(error))
