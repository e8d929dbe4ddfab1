"""What verbs can say of the secrets that specs and options refer to."""

from __future__ import annotations

import os

from reconciled.config.yaml.positions import dotted
from reconciled.core.errors import SecretUnavailable
from reconciled.offline.scan import ControllerScan
from reconciled.service.credentials import VARIABLE, secrets_in


def visible() -> bool:
    """Whether credentials can be seen from here: in the unit, or where a person has set them."""
    return bool(os.environ.get(VARIABLE))


def unresolved(scans: list[ControllerScan]) -> list[str]:
    """What to say of the secrets that specs and options refer to, as far as it can be seen."""
    named: set[str] = set()
    lines = []
    for each in scans:
        plugin = each.ready.plugin
        options = plugin.options(each.ready.config)
        named.update(secret.credential for _, secret in secrets_in(options))
        for manifest in each.desired.manifests.values():
            for path, secret in secrets_in(plugin.spec_of(manifest)):
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
