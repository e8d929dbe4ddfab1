"""A plugin whose import waits until tracer.py has attached to the process."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from reconciled.api import Reconciler, Request, Result, done

if path := os.environ.get("KILLS_BARRIER"):
    with Path(path).open("rb", buffering=0) as barrier:
        barrier.read(1)


@attrs.frozen
class Barrier:
    """The spec of no key."""


class BarrierReconciler(Reconciler[Barrier]):
    """Has no keys: only its import matters."""

    async def reconcile(self, request: Request[Barrier]) -> Result:  # noqa: ARG002
        return done()
