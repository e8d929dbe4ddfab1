"""Credentials of the service manager: redacted from the log, required by controllers' options.

1. The log redacts all of them, whichever code reads one and however it reaches the log.
2. A controller whose options refer to a missing credential stalls; the others run. The fault is
   the machine's and not the configuration's, so that the configuration is accepted.
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
    """Have *redactor* hide every credential; called at the start, before the first log line."""
    for text in passed_credentials():
        redactor.register_credential(text)


def stall_without_secrets(prepared: PreparedConfig) -> PreparedConfig:
    """*prepared*, with the controllers stalled whose options refer to a missing credential."""
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
            location = (*ready.config.path, "options", *path)
            yield ready.config.positions.problem(location, str(error))
