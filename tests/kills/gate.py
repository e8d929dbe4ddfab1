"""A plugin whose import waits until somebody follows the process: see tracer.py."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from reconciled.api import Reconciler, Request, Result, done

if path := os.environ.get("KILLS_GATE"):
    with Path(path).open("rb", buffering=0) as gate:
        gate.read(1)


@attrs.frozen
class Gate:
    """There is none of these."""


class GateReconciler(Reconciler[Gate]):
    """Has no keys."""

    async def reconcile(self, request: Request[Gate]) -> Result:  # noqa: ARG002
        return done()
