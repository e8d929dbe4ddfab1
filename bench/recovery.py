"""Recovery of many operations at a start, and ordinary runs while the store's disk stalls.

Run: ``python bench/recovery.py``. A store with open operations of a three-step plugin, each
stopped after its first step, is made in this process; then a real daemon starts on it. The
floor is the start of the same daemon with nothing to recover.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import trio
from one_controller import KIND, Nothing, run_one_controller
from process import daemon
from table import heading, row

from reconciled.api import Reconciler, Request, Result, done
from reconciled.core.resources import Key, Manifest, Origin, fingerprint_of
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.sqlite.store import Store
from reconciled.journal.sqlite.writer import PendingWrite
from reconciled.runtime.operations.pinned import pin

OPERATIONS = 1000
ROUNDS = 3
STALL = 1.0
EVERY = 0.005

PLUGIN = '''
import attrs
from reconciled.api import Reconciler, done

@attrs.frozen
class Steps:
    """Nothing to say."""

@attrs.frozen
class Options:
    runs: int

class StepsReconciler(Reconciler[Steps]):
    """Three steps without an effect."""
    Options = Options
    ended = 0

    async def reconcile(self, request):
        if request.applied == request.fingerprint:
            return done()
        async with request.operation("steps") as operation:
            for name in ("one", "two", "three"):
                await operation.step(name, self.nothing)
        self.ended += 1
        if self.ended == self.options.runs:
            request.log.info("bench.all_recovered")
        return done()

    async def nothing(self):
        return None
'''

CONFIG = """
state: {root}/state
log: {{format: json, level: info}}
limits: {{concurrency: 64}}
plugins: {{directories: [{root}/plugins]}}
controllers:
  bench:
    reconciler: steps:StepsReconciler
    concurrency: 64
    watch: [{{directory: resources}}]
    options: {{runs: {runs}}}
"""


def lay_out(root: Path, runs: int) -> Path:
    """Configuration and plugin; the configuration's path."""
    for directory in ("plugins", "resources", "state"):
        (root / directory).mkdir(mode=0o700)
    (root / "plugins" / "steps.py").write_text(PLUGIN)
    config = root / "r.yaml"
    config.write_text(CONFIG.format(root=root, runs=runs))
    for path in (root / "plugins" / "steps.py", config):
        path.chmod(0o600)
    return config


async def leave_open(state: Path, count: int) -> None:
    """Open operations that have done their first step, as a killed daemon leaves them."""
    store = Store.open(state)
    operations = OperationJournal.load(store)

    async def one(number: int) -> None:
        fingerprint = fingerprint_of({"kind": "Steps", "spec": {}})
        manifest = Manifest("Steps", f"k{number}", {}, Origin("/none/x.yaml"), fingerprint)
        key = Key(f"bench/k{number}")
        record = await operations.begin(key, "steps", pin(manifest, removal=False))
        await operations.record_step_done(record.id, "one", "idempotent")
        await operations.flush(record.id)

    async with trio.open_nursery() as services:
        await services.start(store.run)
        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(one, number)
        services.cancel_scope.cancel(reason="laid out")


def start_to(event: str, count: int) -> float:
    """Seconds from the start of a daemon that finds *count* open operations to *event*."""
    with tempfile.TemporaryDirectory() as folder:
        config = lay_out(Path(folder), count)
        if count:
            trio.run(leave_open, Path(folder) / "state", count)
        process = daemon(config)
        try:
            return process.wait_for(event)
        finally:
            process.stop()


class NothingReconciler(Reconciler[Nothing]):
    """Always as desired."""

    kind = KIND

    async def reconcile(self, request: Request[Nothing]) -> Result:  # noqa: ARG002
        """Nothing to do."""
        return done()


async def latencies(state: Path, *, stalled: bool) -> list[float]:
    """Milliseconds from the wish for a run to its end, one every 5 ms for a second."""
    found: list[float] = []
    async with run_one_controller(state, NothingReconciler(), concurrency=16) as runtime:
        await runtime.record_applied(["k"])
        ended = trio.Event()
        runtime.context.on_outcome = lambda *_: ended.set()
        runtime.declare(["k"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(runtime.dispatcher.run)
            await ended.wait()
            if stalled:
                stall = PendingWrite(lambda _: time.sleep(STALL))
                nursery.start_soon(runtime.context.store.writer.write, stall)
            until = trio.current_time() + STALL
            while trio.current_time() < until:
                ended = trio.Event()
                began = time.perf_counter()
                runtime.controller.lane.add(Key("bench/k"), trio.current_time(), "again")
                await ended.wait()
                found.append((time.perf_counter() - began) * 1000)
                await trio.sleep(EVERY)
            nursery.cancel_scope.cancel(reason="measured")
    return found


def p99(values: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    """Print every row."""
    heading()
    rounds = [
        (start_to("bench.all_recovered", OPERATIONS), start_to("daemon.ready", 0))
        for _ in range(ROUNDS)
    ]
    row(
        "start to 1,000 operations recovered",
        statistics.median(ours for ours, _ in rounds),
        statistics.median(floor for _, floor in rounds),
        "s",
        "<= 5 s",
    )
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        stalled = trio.run(partial(latencies, Path(one), stalled=True))
        free = trio.run(partial(latencies, Path(two), stalled=False))
    row("p99 of a run while the disk stalls", p99(stalled), p99(free), "ms", "<= floor + 10 ms")


if __name__ == "__main__":
    main()
