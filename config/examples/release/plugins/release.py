"""Publishes a page and announces each version exactly once, wherever the daemon is killed.

Three steps, one of each kind:

    read      PURE         the present page; its data is durable before the next step starts
    publish   IDEMPOTENT   the new page; may run again, and undo() can undo it
    announce  ONCE         a line in the news file; runs again only if recover() decides so
"""

import json
import os
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.api import (
    Change,
    Decision,
    Interrupted,
    Observation,
    Observed,
    Reconciler,
    Request,
    Result,
    RollForward,
    Step,
    StepKind,
    done,
    make_directory,
    remove_temporary,
    replace_file,
    temporary_name,
)

# In the key's memory: the page that publish replaced. Its temporary file always has this name, so
# that the next attempt replaces what a kill left behind.
BEFORE = "before"
NEW_BEFORE = ".before.reconciled-thenext1"


@attrs.frozen
class Release:
    """The spec. page and news are absolute paths."""

    version: str
    text: str
    page: str
    news: str


class ReleaseReconciler(Reconciler[Release]):
    """Observes first; what differs is released as one operation."""

    async def reconcile(self, request: Request[Release]) -> Result:
        """Release the version. After an interruption it runs again, without steps that are done."""
        spec = request.spec
        if await _as_desired(spec):
            return done()
        async with request.operation("release") as operation, operation.critical(budget="30s"):
            plan = await operation.step("read", partial(_read, spec), kind=StepKind.PURE)
            await operation.step("publish", partial(_publish, request, plan))
            if not await _announced(spec):
                await operation.step("announce", partial(_announce, spec), kind=StepKind.ONCE)
        return done(f"released {spec.version}")

    async def plan(self, request: Request[Release]) -> list[Change]:
        """What reconcile() would do."""
        if await _as_desired(request.spec):
            return []
        return [Change("release", request.spec.version)]

    async def observe(self, request: Request[Release]) -> Observation:
        """The present state. An OSError passes: it counts as unknown."""
        spec = request.spec
        announced = await _announced(spec)
        detail = f"{spec.version} is {'announced' if announced else 'not announced'}"
        state = Observed.AS_DESIRED if await _as_desired(spec) else Observed.DIFFERENT
        return Observation(state, detail, {"announced": announced})

    def recover(self, interrupted: Interrupted, observation: Observation | None) -> Decision | None:
        """The news file shows whether announce happened, so no person has to decide.

        Only a decision of recover() lets a ONCE step run again; otherwise the key is held.
        """
        if interrupted.undoes or observation is None or observation.state is Observed.UNKNOWN:
            return None
        if interrupted.uncertain == "announce" and not observation.data["announced"]:
            return RollForward("it is not in the news file: it was not announced")
        return None

    async def undo(self, request: Request[Release], step: Step) -> None:
        """Undo one step. Safe to repeat, and safe for a step that had no effect."""
        spec = request.spec
        if step.name == "announce" and await _announced(spec):
            await trio.to_thread.run_sync(_append, spec.news, f"withdrawn {spec.version}\n")
        if step.name == "publish" and await trio.Path(request.memory, BEFORE).exists():
            plan = json.loads(await trio.Path(request.memory, BEFORE).read_text())
            await remove_temporary(spec.page, plan["temporary"])
            if await _page(spec) != spec.text:
                return  # the new page was never published, or is undone already
            if plan["page"] is None:
                await trio.Path(spec.page).unlink()
            else:
                await replace_file(spec.page, plan["page"], temporary=plan["temporary"])


async def _read(spec: Release) -> dict[str, str | None]:
    """The present page, and the name of the temporary file for the new one."""
    return {"page": await _page(spec), "temporary": temporary_name(spec.page)}


async def _publish(request: Request[Release], plan: dict[str, str]) -> None:
    spec = request.spec
    await make_directory(request.memory)
    # Durable before the page is changed. From the data of read: by now it may be the new page.
    await replace_file(BEFORE, json.dumps(plan), root=request.memory, temporary=NEW_BEFORE)
    # A kill may have left the temporary file of the last attempt.
    await remove_temporary(spec.page, plan["temporary"])
    await replace_file(spec.page, spec.text, temporary=plan["temporary"])


async def _announce(spec: Release) -> None:
    await trio.to_thread.run_sync(_append, spec.news, f"announced {spec.version}\n")


def _append(path: str, line: str) -> None:
    """Append one line; it is whole and durable when this returns."""
    with Path(path).open("a") as news:
        news.write(line)
        news.flush()
        os.fsync(news.fileno())
    directory = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the first line creates the file
    finally:
        os.close(directory)


async def _as_desired(spec: Release) -> bool:
    return await _page(spec) == spec.text and await _announced(spec)


async def _page(spec: Release) -> str | None:
    try:
        return await trio.Path(spec.page).read_text()
    except FileNotFoundError:
        return None


async def _announced(spec: Release) -> bool:
    """Whether the last line about this version announces it."""
    try:
        lines = (await trio.Path(spec.news).read_text()).splitlines()
    except FileNotFoundError:
        return False
    about = [line for line in lines if line.partition(" ")[2] == spec.version]
    return bool(about) and about[-1].startswith("announced ")
