"""No-op reconciles: through queue, dispatcher, task, result and status, at log level info.

The floor is what trio itself takes for the same number of tasks: start_soon and finish.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import attrs
import trio
import trio.testing
from table import row

from reconciled.api import Reconciler, Request, Result, done
from reconciled.programs.children import current_children
from reconciled.config.load import load
from reconciled.core.jobs import Priority
from reconciled.core.loops import LoopDetector
from reconciled.core.queue import WorkQueue
from reconciled.core.resources import Key, Manifest, Origin, fingerprint_of
from reconciled.core.sources import Snapshot
from reconciled.instant import Signals
from reconciled.journal.operations import VolatileOperations
from reconciled.journal.store import Store
from reconciled.observe.logs import configure
from reconciled.plugins import Plugin
from reconciled.runtime.build import Ready, build
from reconciled.runtime.dispatcher import Dispatcher
from reconciled.runtime.host import Host
from reconciled.runtime.operations import Operations
from reconciled.runtime.permits import Permits
from reconciled.runtime.record import StopRecord
from reconciled.stop import Stop

KEYS = 1000
ROUNDS = 7
PASSES = 10
CONFIG = """
state: {state}
limits: {{concurrency: 64}}
controllers:
  bench: {{reconciler: exec, concurrency: 64, watch: [{{directory: .}}]}}
"""


@attrs.frozen
class Nothing:
    """A spec with nothing in it."""


class NothingReconciler(Reconciler[Nothing]):
    """Always as desired."""

    kind = "Nothing"

    async def reconcile(self, request: Request[Nothing]) -> Result:  # noqa: ARG002
        """Nothing to do."""
        return done()


async def ours(state: Path) -> float:
    """Reconciles a second."""
    (state / "r.yaml").write_text(CONFIG.format(state=state))
    (state / "r.yaml").chmod(0o600)
    config = load(state / "r.yaml", {}).config
    logs = configure("json", "info", environment={}, descriptor=os.open(os.devnull, os.O_WRONLY))
    store = Store.open(state)
    left = KEYS * PASSES
    finished = trio.Event()

    def outcome(key: Key, result: Any, failures: int) -> None:  # noqa: ARG001
        nonlocal left
        left -= 1
        if left == 0:
            finished.set()
        elif left >= KEYS:
            controller.lane.add(key, trio.current_time(), "again", Priority.CHANGED)

    async with trio.open_nursery() as services:
        stop = Stop("daemon", config.stop)
        stop.install()
        host = Host(
            state,
            logs,
            Signals(),
            stop,
            WorkQueue(64, random.Random(1)),
            store,
            Operations(VolatileOperations(1), state / "operations"),
            current_children(),
            LoopDetector(),
            StopRecord(stop),
            services,
        )
        await services.start(store.run)
        permits = Permits(state, logs.log, lambda *_: None)
        permits.prepare()
        plugin = Plugin("n", "1", "bench", NothingReconciler, "Nothing", Nothing, None)
        ready = Ready(config.controllers["bench"], plugin, NothingReconciler())
        controller = build(ready, host, stop, permits)
        dispatcher = Dispatcher(host, lambda: {"bench": controller})
        await services.start(controller.hold)
        fingerprint = fingerprint_of({"kind": "Nothing", "spec": {}})
        manifests = []
        async with trio.open_nursery() as nursery:
            for number in range(KEYS):
                manifests.append(Manifest("Nothing", f"k{number}", {}, Origin("x"), fingerprint))
                nursery.start_soon(store_done, store, Key(f"bench/k{number}"), fingerprint)
        (watcher,) = controller.watchers
        controller.take(watcher, Snapshot(tuple(manifests), complete=True))
        host.on_outcome = outcome
        began = time.perf_counter()
        services.start_soon(dispatcher.run)
        await finished.wait()
        took = time.perf_counter() - began
        services.cancel_scope.cancel(reason="measured")
    logs.close()
    return KEYS * PASSES / took


async def store_done(store: Store, key: Key, fingerprint: Any) -> None:
    """As applied before, so that the runs write nothing."""
    await store.remember(key, "Nothing", {}, fingerprint, base="", complete=True)


async def floor() -> float:
    """Tasks a second."""

    async def nothing() -> None:
        pass

    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(PASSES):
            for _ in range(KEYS):
                nursery.start_soon(nothing)
            await trio.testing.wait_all_tasks_blocked()
    return KEYS * PASSES / (time.perf_counter() - began)


def main() -> None:
    """Both, in turn."""
    rates, floors = [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as state:
            rates.append(trio.run(ours, Path(state)))
        floors.append(trio.run(floor))
    row(
        "no-op reconciles a second",
        statistics.median(rates),
        statistics.median(floors),
        "/s",
        ">= 25,000 and >= 1/4 of start_soon",
    )


if __name__ == "__main__":
    main()
