"""Reload: parse, validate and build beside what runs, then swap in one step (case C13).

Nothing of the running configuration changes before the swap; a new one with a problem is rejected
and changes nothing. Controllers whose configuration and code are the same continue. The others end
by their own staged stop while their successors run: a key that is running finishes that run first,
because the queue never runs a key twice at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import attrs
import trio

from reconciled.config.load import LoadedConfig, load
from reconciled.config.model import Config
from reconciled.core.errors import Invalid, ListenRefused, NoThread
from reconciled.core.problems import Problem
from reconciled.core.resources import controller_of
from reconciled.journal.sqlite.store import Store
from reconciled.observe.bound_log import BoundLog
from reconciled.runtime.controllers.loading import LoadedController, PreparedConfig, prepare_valid
from reconciled.runtime.controllers.secrets import stall_without_secrets
from reconciled.runtime.host.listeners import Change, Listeners
from reconciled.threads import in_thread

# Sections that cannot change while the daemon runs: it holds their files open and locked.
FIXED = ("state", "control")


@attrs.frozen(eq=False)
class Swap:
    """What a valid new configuration does to the running controllers."""

    prepared: PreparedConfig
    started: tuple[LoadedController, ...]  # new ones, and those whose configuration or code changed
    kept: frozenset[str]
    removed: frozenset[str]  # names that the new configuration does not have


def compare(running: Mapping[str, LoadedController], prepared: PreparedConfig) -> Swap:
    """What *prepared* changes; pure."""
    kept = frozenset(
        ready.config.name
        for ready in prepared.ready
        if (old := running.get(ready.config.name)) is not None and _same(old, ready)
    )
    started = tuple(ready for ready in prepared.ready if ready.config.name not in kept)
    names = {ready.config.name for ready in prepared.ready}
    names |= {stalled.config.name for stalled in prepared.stalled}
    return Swap(prepared, started, kept, frozenset(running) - names)


def log_removed_controller(log: BoundLog, store: Store, name: str) -> None:
    """Log which keys the removed controller *name* leaves as they were applied."""
    keys = sorted(key for key in store.all_keys() if controller_of(key) == name)
    log.warning(
        "controller.removed",
        controller=name,
        count=len(keys),
        keys=keys[:20],
        reason="removed from the configuration: what it applied is not changed",
    )


def _same(old: LoadedController, new: LoadedController) -> bool:
    def code(ready: LoadedController) -> tuple[str, ...]:
        # The module of a plugin file is named after its content.
        return ready.plugin.name, ready.plugin.version, ready.plugin.cls.__module__

    return old.config == new.config and code(old) == code(new)


@attrs.frozen
class ReloadResult:
    """How a reload ended: the new configuration is in force, or why it is not.

    reason    why a valid configuration was not swapped in, for example a stop in progress
    problems  the problems of the new configuration
    lines     what the reload did, for the output of the command
    """

    reason: str = ""
    problems: tuple[Problem, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether the new configuration is in force."""
        return not self.reason and not self.problems


@attrs.define(eq=False)
class ReloadRequest:
    """One reload, shared by all requests that arrive before it begins."""

    _requested: trio.Event = attrs.field(factory=trio.Event, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    _result: ReloadResult = attrs.field(factory=ReloadResult, init=False)

    def request(self) -> None:
        """Request this reload."""
        self._requested.set()

    async def wait_requested(self) -> None:
        """Wait until this reload is requested."""
        await self._requested.wait()

    def finish(self, result: ReloadResult) -> None:
        """The reload has ended with *outcome*."""
        self._result = result
        self._ended.set()

    async def wait_finished(self) -> ReloadResult:
        """Wait for the end of this reload; its result."""
        await self._ended.wait()
        return self._result


@attrs.define(eq=False)
class Reloader:
    """The service that reloads on request; requests during a reload share the next one.

    running  gives the running controllers, by name
    swap     puts a valid configuration in force; False if a stop is in progress
    """

    path: Path
    environ: Mapping[str, str]
    log: BoundLog
    config: Config
    running: Callable[[], Mapping[str, LoadedController]]
    swap: Callable[[Swap], Awaitable[bool]]
    # None: the daemon does not listen.
    listeners: Listeners | None = None
    # Called with None when a reload begins, and with its result when it has ended.
    on_reload: Callable[[ReloadResult | None], None] | None = attrs.field(default=None, init=False)
    _next: ReloadRequest = attrs.field(factory=ReloadRequest, init=False)

    def request(self) -> ReloadRequest:
        """Request a reload, which reads the files as they are now or later."""
        self._next.request()
        return self._next

    async def serve(self) -> None:
        """Reload at each request, until cancelled."""
        while True:
            current = self._next
            await current.wait_requested()
            # Later requests need another reload: the files may change after they are read here.
            self._next = ReloadRequest()
            self._notify(None)
            result = await self.reload()
            self._notify(result)
            current.finish(result)

    def _notify(self, result: ReloadResult | None) -> None:
        if self.on_reload is not None:
            self.on_reload(result)

    async def reload(self) -> ReloadResult:
        """Reload now; problems are logged as well."""
        try:
            loaded = await in_thread(
                partial(load, self.path, self.environ),
                limiter=_one_thread(),
                abandon_on_cancel=True,
            )
            prepared = self._checked(loaded)
            change = await self._listening(loaded.config)
        except Invalid as invalid:
            return self._rejected(invalid)
        except NoThread as error:
            self.log.error("reload.failed", problems=0, reason=str(error))
            return ReloadResult(reason=str(error))
        except Exception as error:
            # A fault of the daemon, but nothing has changed yet: it can continue.
            reason = f"internal error while reading the configuration: {error!r}"
            self.log.error("reload.failed", problems=0, reason=reason, exc_info=error)
            return ReloadResult(reason=reason)
        for warning in loaded.warnings:
            self.log.warning("config.warning", at=str(warning.origin), reason=warning.message)
        swap = compare(self.running(), prepared)
        if not await self.swap(swap):
            if change is not None:
                change.discard()
            return ReloadResult(reason="stop in progress")
        if change is not None:
            change.commit()
        self.config = prepared.config
        return self._swapped(swap)

    async def _listening(self, config: Config) -> Change | None:
        """Open the listeners of *config* beside the open ones. Raises Invalid."""
        if self.listeners is None:
            return None
        try:
            return await self.listeners.change(config)
        except ListenRefused as refused:
            raise Invalid([Problem(config.origin_of("http", "listen"), str(refused))]) from refused

    def _rejected(self, invalid: Invalid) -> ReloadResult:
        for problem in invalid.problems:
            self.log.error("config.invalid", at=str(problem.origin), reason=problem.message)
        self.log.error(
            "reload.failed",
            problems=len(invalid.problems),
            reason="the previous configuration stays in force",
        )
        return ReloadResult(problems=tuple(invalid.problems))

    def _swapped(self, swap: Swap) -> ReloadResult:
        stalled = [each.config.name for each in swap.prepared.stalled]
        names = {
            "started": sorted(ready.config.name for ready in swap.started),
            "kept": sorted(swap.kept),
            "removed": sorted(swap.removed),
            "stalled": sorted(stalled),
        }
        self.log.info("reload.done", **names)
        lines = [f"{what}: {', '.join(each)}" for what, each in names.items() if each]
        return ReloadResult(lines=("The new configuration is in force.", *lines))

    def _checked(self, loaded: LoadedConfig) -> PreparedConfig:
        problems = [
            Problem(
                loaded.config.origin_of(name),
                f"{name} cannot change while the daemon runs: restart it, or undo the change",
            )
            for name in FIXED
            if getattr(loaded.config, name) != getattr(self.config, name)
        ]
        if problems:
            raise Invalid(problems)
        return stall_without_secrets(prepare_valid(loaded.config))


def _one_thread() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(1)
