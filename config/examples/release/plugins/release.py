"""Puts a page in place, and announces each version once, wherever it may be killed.

Three steps, one of each kind:

    read      PURE         what is there now; its data is durable before the next step starts
    publish   IDEMPOTENT   the new page; may run again, and undo() can take it back
    announce  ONCE         a line in the news; never runs again unless recover() says so
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

# In the key's memory: the page that publish replaced. Its own new file has one name each time, so
# that what a kill leaves behind is what the next attempt replaces.
BEFORE = "before"
NEW_BEFORE = ".before.reconciled-thenext1"


@attrs.frozen
class Release:
    """The spec. page and news are absolute."""

    version: str
    text: str
    page: str
    news: str


class ReleaseReconciler(Reconciler[Release]):
    """Looks first; what differs is released as one operation."""

    async def reconcile(self, request: Request[Release]) -> Result:
        """Make it so. After an interruption this runs again, and steps that are done do not."""
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
        """What is there. An OSError goes its way: it means that it cannot be told now."""
        spec = request.spec
        announced = await _announced(spec)
        detail = f"{spec.version} is {'announced' if announced else 'not announced'}"
        state = Observed.AS_DESIRED if await _as_desired(spec) else Observed.DIFFERENT
        return Observation(state, detail, {"announced": announced})

    def recover(self, interrupted: Interrupted, observation: Observation | None) -> Decision | None:
        """The news tell whether announce happened, so that nobody has to be asked.

        Only a word of ours lets a ONCE step run again; without one the key would be held.
        """
        if interrupted.undoes or observation is None or observation.state is Observed.UNKNOWN:
            return None
        if interrupted.uncertain == "announce" and not observation.data["announced"]:
            return RollForward("the news do not have it: it was not announced")
        return None

    async def undo(self, request: Request[Release], step: Step) -> None:
        """Take one step back. May run again, and for a step that never took effect."""
        spec = request.spec
        if step.name == "announce" and await _announced(spec):
            await trio.to_thread.run_sync(_append, spec.news, f"withdrawn {spec.version}\n")
        if step.name == "publish" and await trio.Path(request.memory, BEFORE).exists():
            plan = json.loads(await trio.Path(request.memory, BEFORE).read_text())
            await remove_temporary(spec.page, plan["temporary"])
            if await _page(spec) != spec.text:
                return  # ours never came into place, or is gone already
            if plan["page"] is None:
                await trio.Path(spec.page).unlink()
            else:
                await replace_file(spec.page, plan["page"], temporary=plan["temporary"])


async def _read(spec: Release) -> dict[str, str | None]:
    """The page as it is, and a name for the new one while it is being written."""
    return {"page": await _page(spec), "temporary": temporary_name(spec.page)}


async def _publish(request: Request[Release], plan: dict[str, str]) -> None:
    spec = request.spec
    await make_directory(request.memory)
    # Durable before the page is touched. From the data of read: by now it may be the new page.
    await replace_file(BEFORE, json.dumps(plan), root=request.memory, temporary=NEW_BEFORE)
    # What a kill left of the last attempt.
    await remove_temporary(spec.page, plan["temporary"])
    await replace_file(spec.page, spec.text, temporary=plan["temporary"])


async def _announce(spec: Release) -> None:
    await trio.to_thread.run_sync(_append, spec.news, f"announced {spec.version}\n")


def _append(path: str, line: str) -> None:
    """One line, whole and durable when this returns."""
    with Path(path).open("a") as news:
        news.write(line)
        news.flush()
        os.fsync(news.fileno())
    directory = os.open(Path(path).parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the first line makes the file
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
    """What the last line about this version says."""
    try:
        lines = (await trio.Path(spec.news).read_text()).splitlines()
    except FileNotFoundError:
        return False
    about = [line for line in lines if line.partition(" ")[2] == spec.version]
    return bool(about) and about[-1].startswith("announced ")
