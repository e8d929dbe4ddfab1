"""Unattended keys: an operation is open or a run goes on, and no controller of that name runs.

A controller is unattended when the configuration has it no more (it was removed or renamed), or
when its reconciler is broken. Its operations keep their key:

1. A program or run of the key goes on to its end, as for any other key.
2. Then the operation is held, so that it is logged and listed, and a person can resolve it.
3. The hold is lifted when a controller of that name runs again: the key is recovered.
4. A renamed controller declares the same manifest under another key. That key, the successor,
   waits for the program or run of its predecessor, and is held while the operation is open: two
   keys for one thing would be two actors on it, and would repeat a step that must run only once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import trio

from reconciled.core.queue.states import Priority
from reconciled.core.recovery import resolve_commands
from reconciled.core.resources import Key, Manifest, controller_of
from reconciled.journal.operation_record import CONTROLLER_MISSING, Hold, OperationRecord
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller

# What identifies a manifest whatever controller reads it: its kind and directory.
_Origin = tuple[str, str]


@attrs.frozen
class Predecessor:
    """What keeps a key from running: the key that a removed controller had for its manifest.

    operation  the open one; empty: only a run goes on
    active     a program or run of it goes on
    """

    key: Key
    operation: str
    active: bool


@attrs.define(eq=False)
class UnattendedKeys:
    """The unattended keys of a daemon. controllers() gives the running controllers by name."""

    context: RuntimeContext
    controllers: Callable[[], Mapping[str, Controller]]
    # Controllers of the configuration that run, or are about to be started.
    _configured: frozenset[str] = attrs.field(default=frozenset(), init=False)
    # Why a configured controller does not run.
    _stalled: Mapping[str, str] = attrs.field(factory=dict, init=False)
    # Removed controllers with runs that have not ended.
    _retired: list[Controller] = attrs.field(factory=list, init=False)
    # Names of unattended controllers with an open operation or a run. Usually empty: each run
    # of any key reads it.
    _names: frozenset[str] = attrs.field(default=frozenset(), init=False)

    def configure(self, names: frozenset[str], stalled: Mapping[str, str]) -> None:
        """Set which controllers run from here on, and why those of *stalled* do not.

        Called before the first of them is started.
        """
        self._configured = names
        self._stalled = stalled
        self._refresh()

    def retire(self, controller: Controller) -> None:
        """*controller* was replaced or removed; its runs go on until ended()."""
        self._retired.append(controller)
        self._refresh()

    def ended(self, controller: Controller) -> None:
        """The last run of *controller*, which was retired, has ended."""
        self._retired.remove(controller)
        self.hold_all()

    def run_ended(self, controller: Controller, key: Key) -> None:
        """A run of *key* has ended; its controller may have been removed meanwhile."""
        if self._retired and controller in self._retired:
            self.attend(key, "its run has ended")

    def attend(self, key: Key, cause: str) -> None:
        """Nothing works on *key* any more: queue it, or hold its operation if it is unattended."""
        name = controller_of(key)
        controller = self.controllers().get(name)
        if controller is not None:
            controller.lane.add(key, trio.current_time(), cause, Priority.RECOVERY)
        elif not self._is_attended(name) and not self.context.stopping:
            self.context.start_background(f"hold of {key}", self._hold, key)

    def hold_all(self) -> None:
        """Hold each open operation that is unattended, once its program and run have ended."""
        self._refresh()
        if self._names and not self.context.stopping:
            self.context.start_background("hold of unattended operations", self._hold_all)

    def is_unattended(self, key: Key) -> bool:
        """Whether no controller runs for *key*, nor is about to be started."""
        return not self._is_attended(controller_of(key))

    def resolved(self, record: OperationRecord) -> None:
        """A person has decided about *record*: if that closed it, its successor may run."""
        if self.is_unattended(record.key):
            self._refresh()
            self._release(record.key)

    def find_predecessor(self, controller: Controller, key: Key) -> Predecessor | None:
        """What keeps *key* of *controller* from running; None: nothing."""
        if not self._names:
            return None
        manifest = controller.manifests.get(key) or controller.absent.get(key)
        if manifest is None:
            return None
        name = key.partition("/")[2]
        wanted = _origin_of(manifest)
        for gone in self._names:
            predecessor = Key(f"{gone}/{name}")
            record = self._open_operation(predecessor)
            active = self._is_active(predecessor)
            if record is not None and _pinned_origin(record) == wanted:
                return Predecessor(predecessor, record.id, active)
            if record is None and active and wanted in self._retired_origins(predecessor):
                return Predecessor(predecessor, "", active)
        return None

    # -- inside --------------------------------------------------------------

    def _is_attended(self, name: str) -> bool:
        return name in self._configured or name in self.controllers()

    def _refresh(self) -> None:
        journal = self.context.operations.journal
        names = {controller_of(record.key) for record in journal.list_open()}
        names |= {controller.name for controller in self._retired}
        self._names = frozenset(name for name in names if not self._is_attended(name))

    def _open_operation(self, key: Key) -> OperationRecord | None:
        """The open operation of *key*; None also where only its outcome is not durable yet."""
        journal = self.context.operations.journal
        record = journal.find_by_key(key)
        return None if record is None or journal.is_closing(record.id) else record

    def _is_active(self, key: Key) -> bool:
        """Whether a program of an earlier daemon, or a run of a removed controller, goes on."""
        return key in self.context.adopting or any(
            work.key == key for each in self._retired for work in each.stop.all_works()
        )

    def _retired_origins(self, key: Key) -> Iterator[_Origin]:
        for controller in self._retired:
            manifest = controller.manifests.get(key) or controller.absent.get(key)
            if manifest is not None:
                yield _origin_of(manifest)

    async def _hold_all(self) -> None:
        for record in self.context.operations.journal.list_open():
            if controller_of(record.key) in self._names:
                await self._hold(record.key)

    async def _hold(self, key: Key) -> None:
        """Hold the operation of *key* if it is unattended; then queue the successor."""
        name = controller_of(key)
        record = self._open_operation(key)
        # Read again: this runs in a task of its own, and a reload may have come before it.
        if self._is_attended(name) or self._is_active(key):
            return
        if record is not None and record.hold is None and not record.pending_resolution:
            reason = self._reason(name)
            hold = Hold(reason, CONTROLLER_MISSING, "", time.time())
            await self.context.operations.journal.hold(record.id, hold)
            self.context.log.error(
                "operation.held",
                key=key,
                operation=record.id,
                name=record.name,
                last_step=record.last_step or None,
                reason=reason,
                commands=list(resolve_commands(record.id, can_undo=False)),
            )
        self._refresh()
        self._release(key)

    def _reason(self, name: str) -> str:
        if name in self._stalled:
            return f"its controller {name} does not run: {self._stalled[name]}"
        return f"its controller {name} is not configured: it was removed or renamed"

    def _release(self, predecessor: Key) -> None:
        """Queue the keys that have waited for *predecessor*; each run checks the facts again."""
        now = trio.current_time()
        name = predecessor.partition("/")[2]
        for controller in self.controllers().values():
            key = Key(f"{controller.name}/{name}")
            if key in controller.manifests or key in controller.removing:
                controller.lane.add(key, now, f"{predecessor} has ended", Priority.RECOVERY)


def _origin_of(manifest: Manifest) -> _Origin:
    return manifest.kind, str(Path(manifest.origin.file).parent)


def _pinned_origin(record: OperationRecord) -> _Origin:
    return record.pinned["kind"], record.pinned["base"]
