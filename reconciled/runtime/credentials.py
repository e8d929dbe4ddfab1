"""The credentials of the service manager, as the daemon and those who look ahead of it see them.

1. All of them are hidden from the log, whoever reads one and however it gets there.
2. A controller whose options refer to one that is not there stalls, and no other does: it is a
   fault of the machine and not of the configuration, so that nothing is refused for it.
3. From a shell none can be seen. That is no fault of anything: it is said once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from reconciled.config.positions import dotted
from reconciled.core.problems import Problem
from reconciled.observe.redaction import Redactor
from reconciled.runtime.build import Prepared, Ready, Stalled
from reconciled.service.credentials import VARIABLE, SecretUnavailable, handed_in, secrets_in

if TYPE_CHECKING:
    from reconciled.runtime.survey import Surveyed


def hide(redactor: Redactor) -> None:
    """Have *redactor* hide every credential; for the start, before anything is told."""
    for text in handed_in():
        redactor.register_credential(text)


def with_secrets(prepared: Prepared) -> Prepared:
    """*prepared*, with those controllers stalled whose options refer to a secret in vain."""
    ready = []
    stalled = [*prepared.stalled]
    for each in prepared.ready:
        problem = next(_missing(each), None)
        if problem is None:
            ready.append(each)
        else:
            stalled.append(Stalled(each.config, str(problem)))
    return attrs.evolve(prepared, ready=tuple(ready), stalled=tuple(stalled))


def _missing(ready: Ready) -> Iterator[Problem]:
    options = ready.plugin.options(ready.config)
    for path, secret in secrets_in(options):
        try:
            secret.reveal_bytes()
        except SecretUnavailable as error:
            place = (*ready.config.path, "options", *path)
            yield ready.config.positions.problem(place, str(error))


def visible() -> bool:
    """Whether credentials can be seen from here: in the unit, or where a person has set them."""
    return bool(os.environ.get(VARIABLE))


def unresolved(surveyed: list[Surveyed]) -> list[str]:
    """What to say of the secrets that specs and options refer to, as far as it can be seen."""
    named: set[str] = set()
    lines = []
    for each in surveyed:
        plugin = each.ready.plugin
        options = plugin.options(each.ready.config)
        named.update(secret.credential for _, secret in secrets_in(options))
        for manifest in each.desired.manifests.values():
            for path, secret in secrets_in(plugin.spec(manifest)):
                named.add(secret.credential)
                try:
                    secret.reveal_bytes()
                except SecretUnavailable as error:
                    lines.append(f"{manifest.origin}: {dotted(('spec', *path))}: {error}")
    if visible():
        return lines
    if not named:
        return []
    names = ", ".join(sorted(named))
    why = f"${VARIABLE} is set for the unit alone"
    return [f"whether these credentials are there cannot be seen from here: {names}; {why}"]
