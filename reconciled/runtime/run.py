"""One run of one key, as its reconciler sees it: the Request, with the host behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from reconciled.core.jobs import Job
from reconciled.core.resources import Fingerprint, Key, Manifest, directory_of
from reconciled.runtime.host import Host
from reconciled.runtime.operations import OpenOperation
from reconciled.stop import Work


class Run:
    """A Request. Not an attrs class: 25 thousand of these are made a second.

    acted   whether an operation was opened: a run without one had nothing to do
    """

    __slots__ = ("_host", "acted", "job", "key", "manifest", "number", "spec", "work")

    def __init__(  # noqa: PLR0913, PLR0917 - one argument a field
        self, host: Host, job: Job, manifest: Manifest, spec: Any, number: int, work: Work
    ) -> None:
        self._host = host
        self.job = job
        self.key: Key = job.key
        self.manifest = manifest
        self.spec = spec
        self.number = number
        self.work = work
        self.acted = False

    def __repr__(self) -> str:
        return f"<Run {self.number} of {self.key}>"

    @property
    def name(self) -> str:
        """Of the manifest."""
        return self.manifest.name

    @property
    def namespace(self) -> str | None:
        """Of the manifest."""
        return self.manifest.namespace

    @property
    def labels(self) -> dict[str, str]:
        """Of the manifest."""
        return dict(self.manifest.labels)

    @property
    def annotations(self) -> dict[str, str]:
        """Of the manifest."""
        return dict(self.manifest.annotations)

    @property
    def raw_spec(self) -> dict[str, Any]:
        """The spec as it was declared."""
        return dict(self.manifest.spec)

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the spec."""
        return self.manifest.fingerprint

    @property
    def applied(self) -> Fingerprint | None:
        """Of the spec that was last done."""
        return self._host.store.fingerprint(self.key)

    @property
    def base(self) -> Path:
        """Where relative paths of the spec start."""
        return Path(self.manifest.origin.file).parent

    @property
    def output(self) -> Path:
        """``STATE/output/…``."""
        return self._host.state / "output" / directory_of(self.key)

    @property
    def memory(self) -> Path:
        """``STATE/memory/…``."""
        return self._host.state / "memory" / directory_of(self.key)

    @property
    def causes(self) -> tuple[str, ...]:
        """Why this run happens."""
        return self.job.causes

    @property
    def failures(self) -> int:
        """Failed runs in a row before this one."""
        return self.job.failures

    @property
    def stopping(self) -> bool:
        """True from the instant a stop begins, of whatever size."""
        return self._host.stopping or self.work.stop.began.is_set()

    @property
    def critical_limit(self) -> float:
        """What a stop leaves critical operations."""
        return self.work.stop.limits.critical

    @property
    def log(self) -> Any:
        """A logger with key and run."""
        return self._host.log.bind(key=self.key, run=self.number)

    def operation(self, name: str) -> AbstractAsyncContextManager[OpenOperation]:
        """Open the operation *name*; the key is remembered with it, so that it can be removed."""
        return self._operation(name)

    @asynccontextmanager
    async def _operation(self, name: str) -> AsyncIterator[OpenOperation]:
        self.acted = True
        await self._own()
        opened = self._host.operations.opened(self.work, name, self.raw_spec, self.log)
        async with opened as operation:
            yield operation

    async def _own(self) -> None:
        """Remember the key before the first effect: a kill after it must not orphan the effect."""
        store = self._host.store
        if self.fingerprint not in (store.fingerprint(self.key), store.begun(self.key)):
            await self._remember(complete=False)

    @property
    def remembered(self) -> bool:
        """Whether this spec is remembered as done: then there is nothing to write."""
        return self._host.store.fingerprint(self.key) == self.manifest.fingerprint

    async def remember_done(self) -> None:
        """Remember that the spec is applied, also while cancelled: to lose it repeats work."""
        async with self.work.cleanup("record of what was applied"):
            await self._remember(complete=True)

    async def _remember(self, *, complete: bool) -> None:
        manifest = self.manifest
        await self._host.store.remember(
            self.key,
            manifest.kind,
            manifest.spec,
            manifest.fingerprint,
            base=str(self.base),
            complete=complete,
        )

    @asynccontextmanager
    async def cleanup(self) -> AsyncIterator[None]:
        """A small shielded budget for ``finally`` blocks."""
        async with self.work.cleanup("by the reconciler"):
            yield
