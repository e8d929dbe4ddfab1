"""Keeps the message of the day as declared."""

import attrs
import trio

from reconciled.api import Change, Reconciler, Request, Result, done, replace_file


@attrs.frozen
class Motd:
    """The spec; the name of the class is the kind."""

    path: str
    text: str


class MotdReconciler(Reconciler[Motd]):
    """Compares first, and writes only if the file differs."""

    async def reconcile(self, request: Request[Motd]) -> Result:
        """Write the file if it differs."""
        if await _as_desired(request.spec):
            return done()
        async with (
            request.operation("write") as operation,
            operation.critical(budget="10s"),
        ):
            await replace_file(request.spec.path, request.spec.text)
        return done("written")

    async def plan(self, request: Request[Motd]) -> list[Change]:
        """What reconcile() would do."""
        if await _as_desired(request.spec):
            return []
        return [Change("change", request.spec.path)]


async def _as_desired(spec: Motd) -> bool:
    path = trio.Path(spec.path)
    return await path.exists() and await path.read_text() == spec.text
