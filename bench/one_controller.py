"""One controller with its dispatcher, store and stop in this process, for the benches of runs.

Everything is what the daemon itself puts together, but for the sources: what is desired is
told by declare(). Log lines are made at level info and go to the null device.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.api import Reconciler
from reconciled.config.load import load
from reconciled.core.loop_detector import LoopDetector
from reconciled.core.queue.queue import WorkQueue
from reconciled.core.resources import Key, Manifest, Origin, fingerprint_of, key_of
from reconciled.core.sources import Snapshot
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.observe.logs import configure
from reconciled.plugins.loading import Plugin
from reconciled.programs.children import current_children
from reconciled.runtime.adoption_registry import AdoptionRegistry
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.factory import build
from reconciled.runtime.controllers.loading import LoadedController
from reconciled.runtime.decisions.removals import RemovalApprovals
from reconciled.runtime.operations.operation import Operations
from reconciled.runtime.runs.dispatcher import Dispatcher
from reconciled.runtime.stop_recorder import StopRecorder
from reconciled.signal_handlers import SignalHandlers
from reconciled.stop import Stop

KIND = "Nothing"
FINGERPRINT = fingerprint_of({"kind": KIND, "spec": {}})
CONFIG = """
state: {state}
stop: {stop}
limits: {{concurrency: {concurrency}}}
controllers:
  bench: {{reconciler: exec, concurrency: {concurrency}, watch: [{{directory: .}}]}}
"""


@attrs.frozen
class Nothing:
    """A spec with nothing in it."""


@attrs.frozen(eq=False)
class OneController:
    """What runs."""

    context: RuntimeContext
    controller: Controller
    dispatcher: Dispatcher

    def declare(self, names: list[str]) -> None:
        """Desire exactly the resources *names*."""
        manifests = (Manifest(KIND, name, {}, Origin("x"), FINGERPRINT) for name in names)
        (watcher,) = self.controller.watchers
        self.controller.handle_report(watcher, Snapshot(tuple(manifests), complete=True))

    async def remember(self, names: list[str]) -> None:
        """Have *names* applied before, so that their runs write nothing."""
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self._remember, key_of("bench", name))

    async def _remember(self, key: Key) -> None:
        await self.context.store.record_applied(key, KIND, {}, FINGERPRINT, base="", complete=True)


@asynccontextmanager
async def run_one_controller(
    state: Path, reconciler: Reconciler[Any], *, concurrency: int, stop: str = "{}"
) -> AsyncIterator[OneController]:
    """A controller of *reconciler* that is ready; its dispatcher is the caller's to start."""
    gc.freeze()  # as the daemon does after its imports
    path = state / "r.yaml"
    path.write_text(CONFIG.format(state=state, stop=stop, concurrency=concurrency))
    path.chmod(0o600)
    config = load(path, {}).config
    null = os.open(os.devnull, os.O_WRONLY)
    logs = configure("json", "info", environment={}, descriptor=null)
    store = Store.open(state)
    root = Stop("daemon", config.stop)
    async with trio.open_nursery() as services:
        root.install()
        host = RuntimeContext(
            state,
            logs,
            SignalHandlers(),
            root,
            WorkQueue(concurrency, random.Random(1)),
            store,
            Operations(OperationJournal.load(store), state / "operations"),
            AdoptionRegistry(),
            current_children(),
            LoopDetector(),
            StopRecorder(root),
            services,
        )
        await services.start(store.run)
        services.start_soon(logs.serve)  # noqa: ASYNC113 - nobody waits for its first step
        permits = RemovalApprovals(state, logs.log, lambda *_: None)
        await permits.prepare()
        plugin = Plugin("n", "1", "bench", type(reconciler), KIND, Nothing, None)
        ready = LoadedController(config.controllers["bench"], plugin, reconciler)
        controller = build(ready, host, root, permits)
        await services.start(_work, root, controller)
        yield OneController(host, controller, Dispatcher(host, lambda: {"bench": controller}))
        services.cancel_scope.cancel(reason="measured")
    logs.close()
    os.close(null)


async def _work(  # noqa: ASYNC128 - hold() calls it
    root: Stop, controller: Controller, *, task_status: trio.TaskStatus[None]
) -> None:
    """What a stop cancels."""
    with root.scope:
        await controller.supervise_runs(task_status=task_status)
