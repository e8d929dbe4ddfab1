"""One controller with its dispatcher, store and stop in this process, for benchmarks of runs.

It is assembled as the daemon is, except for its sources: declare() gives what is desired. The log
level is info, and the lines go to the null device.
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
from reconciled.core.resources import Key, Manifest, Origin, fingerprint_of, key_of
from reconciled.core.sources import Snapshot
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.observe.logs import configure
from reconciled.plugins.loading import Plugin
from reconciled.runtime.context import RuntimeContext
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.controllers.loading import LoadedController
from reconciled.runtime.daemon.assembly import assemble
from reconciled.runtime.runs.dispatcher import Dispatcher
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
    """The running parts."""

    context: RuntimeContext
    controller: Controller
    dispatcher: Dispatcher

    def declare(self, names: list[str]) -> None:
        """Desire exactly the resources *names*, with the typed specs that the parser gives."""
        manifests = (
            Manifest(KIND, name, {}, Origin("x"), FINGERPRINT).with_typed_spec(Nothing())
            for name in names
        )
        (watcher,) = self.controller.watchers
        self.controller.handle_report(watcher, Snapshot(tuple(manifests), complete=True))

    async def record_applied(self, names: list[str]) -> None:
        """Record *names* as applied, so that their runs write nothing."""
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(self._record_applied, key_of("bench", name))

    async def _record_applied(self, key: Key) -> None:
        await self.context.store.record_applied(key, KIND, {}, FINGERPRINT, base="", complete=True)


@asynccontextmanager
async def run_one_controller(
    state: Path, reconciler: Reconciler[Any], *, concurrency: int, stop: str = "{}"
) -> AsyncIterator[OneController]:
    """A ready controller of *reconciler*; the caller starts its dispatcher."""
    gc.freeze()  # as the daemon does after its imports
    path = state / "r.yaml"
    path.write_text(CONFIG.format(state=state, stop=stop, concurrency=concurrency))
    path.chmod(0o600)
    config = load(path, {}).config
    null = os.open(os.devnull, os.O_WRONLY)
    logs = configure("json", "info", environment={}, descriptor=null)
    store = Store.open(state)
    async with trio.open_nursery() as services:
        assembly = assemble(
            state=state,
            limits=config.stop,
            concurrency=concurrency,
            logs=logs,
            signals=SignalHandlers(),
            store=store,
            journal=OperationJournal.load(store),
            services=services,
            rng=random.Random(1),
        )
        context = assembly.context
        await services.start(store.run)
        services.start_soon(logs.serve)  # noqa: ASYNC113 - nothing waits for its first step
        plugin = Plugin("n", "1", "bench", type(reconciler), KIND, Nothing, None)
        loaded = LoadedController(config.controllers["bench"], plugin, reconciler)
        controller = assembly.controllers["bench"] = assembly.build_controller(loaded)
        await services.start(_work, context.stop, controller)
        yield OneController(context, controller, assembly.dispatcher)
        services.cancel_scope.cancel(reason="measured")
    logs.close()
    os.close(null)


async def _work(  # noqa: ASYNC128 - supervise_runs() calls it
    stop: Stop, controller: Controller, *, task_status: trio.TaskStatus[None]
) -> None:
    """What a stop cancels."""
    with stop.scope:
        await controller.supervise_runs(task_status=task_status)
