"""Reload: parse, validate and build beside what runs, then swap in one step (case C13).

Until the swap nothing of the running configuration is touched; a new one that has a problem
changes nothing and says so. Controllers whose configuration and code are the same go on
untouched. The others end by their own staged stop while their successors run: a key that is
still running finishes its old run first, since the queue runs no key twice at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import attrs
import trio

from reconciled.config.load import Loaded, load
from reconciled.config.model import Config
from reconciled.core.problems import Invalid, Problem
from reconciled.core.resources import Origin, controller_of
from reconciled.journal.store import Store
from reconciled.observe.bound import BoundLog
from reconciled.runtime.build import Prepared, Ready, prepared_whole

# Cannot change under a running daemon: what they name is open and locked.
FIXED = ("state", "control")


@attrs.frozen(eq=False)
class Swap:
    """What a valid new configuration does to the running controllers."""

    prepared: Prepared
    started: tuple[Ready, ...]  # new ones, and those whose configuration or code changed
    kept: frozenset[str]
    left: frozenset[str]  # names that the new configuration does not have


def compare(running: Mapping[str, Ready], prepared: Prepared) -> Swap:
    """What to swap; pure."""
    kept = frozenset(
        ready.config.name
        for ready in prepared.ready
        if (old := running.get(ready.config.name)) is not None and _same(old, ready)
    )
    started = tuple(ready for ready in prepared.ready if ready.config.name not in kept)
    names = {ready.config.name for ready in prepared.ready}
    names |= {stalled.config.name for stalled in prepared.stalled}
    return Swap(prepared, started, kept, frozenset(running) - names)


def tell_left(log: BoundLog, store: Store, name: str) -> None:
    """Name what the controller *name*, which the configuration has no more, leaves behind."""
    keys = sorted(key for key in store.all_keys() if controller_of(key) == name)
    log.warning(
        "controller.left",
        controller=name,
        count=len(keys),
        keys=keys[:20],
        reason="it left the configuration: what it applied stays as it is",
    )


def _same(old: Ready, new: Ready) -> bool:
    def code(ready: Ready) -> tuple[str, ...]:
        # The module of a plugin file is named after its content.
        return ready.plugin.name, ready.plugin.version, ready.plugin.cls.__module__

    return old.config == new.config and code(old) == code(new)


@attrs.define(eq=False)
class Reloader:
    """The service that reloads when asked; requests during a reload are one more reload.

    swap is the daemon's: it is called with a configuration that has no problem left, and
    answers False where a stop came first.
    """

    path: Path
    environ: Mapping[str, str]
    log: BoundLog
    config: Config
    running: Callable[[], Mapping[str, Ready]]
    swap: Callable[[Swap], Awaitable[bool]]
    _asked: trio.Event = attrs.field(factory=trio.Event, init=False)

    def ask(self) -> None:
        """Reload soon."""
        self._asked.set()

    async def serve(self) -> None:
        """Reload whenever asked, until cancelled; a swap that has begun is brought to its end."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            await self.reload()

    async def reload(self) -> bool:
        """Reload now. False: the old configuration runs on, and the log says why."""
        try:
            loaded = await trio.to_thread.run_sync(
                load, self.path, self.environ, abandon_on_cancel=True, limiter=_one_thread()
            )
            prepared = self._checked(loaded)
        except Invalid as invalid:
            for problem in invalid.problems:
                self.log.error("config.invalid", at=str(problem.origin), reason=problem.message)
            self.log.error(
                "reload.failed",
                problems=len(invalid.problems),
                reason="the configuration as it was runs on",
            )
            return False
        for warning in loaded.warnings:
            self.log.warning("config.warning", at=str(warning.origin), reason=warning.message)
        swap = compare(self.running(), prepared)
        if not await self.swap(swap):
            return False
        self.config = prepared.config
        self.log.info(
            "reload.done",
            started=sorted(ready.config.name for ready in swap.started),
            kept=sorted(swap.kept),
            left=sorted(swap.left),
            stalled=sorted(stalled.config.name for stalled in prepared.stalled),
        )
        return True

    def _checked(self, loaded: Loaded) -> Prepared:
        problems = [
            Problem(
                Origin(str(self.path)),
                f"{name} cannot change while the daemon runs: restart it, or take the change back",
            )
            for name in FIXED
            if getattr(loaded.config, name) != getattr(self.config, name)
        ]
        if problems:
            raise Invalid(problems)
        return prepared_whole(loaded.config)


def _one_thread() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(1)
