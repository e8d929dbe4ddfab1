"""Deploys a site in three steps. It has no recover(): the defaults decide."""

from functools import partial

import attrs
import trio

from reconciled.api import Reconciler, Request, Result, Step, StepKind, done

PAGES = ("index", "news", "about")


@attrs.frozen
class Deploy:
    """The spec. site is relative to the manifest."""

    site: str
    version: str
    slow: str = ""  # the step that takes three seconds


class DeployReconciler(Reconciler[Deploy]):
    """Each version is a directory below the site; the link ``current`` points to one of them."""

    async def reconcile(self, request: Request[Deploy]) -> Result:
        """Observe first; what differs is one operation."""
        site, spec = trio.Path(request.base, request.spec.site), request.spec
        if await current(site) == spec.version and await announced(site, spec):
            return done()
        async with request.operation("deploy") as operation:
            old = await operation.step("look", partial(current, site), kind=StepKind.PURE)
            await operation.step("unpack", partial(unpack, site, spec, old))
            await operation.step("announce", partial(announce, site, spec), kind=StepKind.ONCE)
        return done(f"version {spec.version} is deployed")

    async def undo(self, request: Request[Deploy], step: Step) -> None:
        """Undo one step; safe to repeat."""
        site, version = trio.Path(request.base, request.spec.site), request.spec.version
        if step.name == "unpack":
            if await current(site) == version:
                await point(site / "current", await (site / "previous").readlink())
            for page in PAGES:
                await (site / version / page).unlink(missing_ok=True)
            if await (site / version).exists():
                await (site / version).rmdir()


async def current(site: trio.Path) -> str:
    """The version to which the link points."""
    return str(await (site / "current").readlink())


async def unpack(site: trio.Path, spec: Deploy, old: str) -> None:
    """Write all pages, then replace the link."""
    await point(site / "previous", old)
    await (site / spec.version).mkdir(exist_ok=True)
    for page in PAGES:
        await (site / spec.version / page).write_text(f"{page}, version {spec.version}\n")
        await trio.sleep(1 if spec.slow == "unpack" else 0)
    await point(site / "current", spec.version)


async def announce(site: trio.Path, spec: Deploy) -> None:
    """Stands for a mail to all customers: it must not be sent twice."""
    async with await (site.parent / "announced.txt").open("a") as mails:
        await mails.write(f"{site.name} {spec.version} is out\n")
    await trio.sleep(3 if spec.slow == "announce" else 0)  # until the server has answered


async def announced(site: trio.Path, spec: Deploy) -> bool:
    """Whether the file has the announcement."""
    mails = site.parent / "announced.txt"
    lines = (await mails.read_text()).splitlines() if await mails.exists() else []
    return f"{site.name} {spec.version} is out" in lines


async def point(link: trio.Path, to: str | trio.Path) -> None:
    """Replace *link* in one step."""
    fresh = link.with_name(f"{link.name}.new")
    await fresh.unlink(missing_ok=True)
    await fresh.symlink_to(to)
    await fresh.replace(link)
