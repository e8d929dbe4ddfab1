"""Secrets that specs and options refer to: which are missing, as far as a verb can see them."""

from __future__ import annotations

import os

from reconciled.config.yaml.positions import dotted
from reconciled.core.errors import SecretUnavailable
from reconciled.offline.scan import ControllerScan
from reconciled.service.credentials import VARIABLE, secrets_in


def credentials_visible() -> bool:
    """Whether this process has credentials: in the unit, or where a person set the variable."""
    return bool(os.environ.get(VARIABLE))


def check_secrets(scans: list[ControllerScan]) -> list[str]:
    """A line for each missing secret of a spec; without credentials one line that names all."""
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
    if credentials_visible():
        return lines
    if not named:
        return []
    names = ", ".join(sorted(named))
    reason = f"${VARIABLE} is set in the unit alone"
    return [f"these credentials cannot be checked from here: {names}; {reason}"]
