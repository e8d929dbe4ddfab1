"""The plugin of the tests with real processes: the spec of a key names what its run does.

Each run logs ``probe.began`` first, which a test can wait for.
"""

# The methods share one interface, nest what a reader should see nested, and misbehave on purpose.
# ruff: noqa: ARG002, SIM117

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import trio

from reconciled.api import (
    Reconciler,
    Request,
    Result,
    after,
    done,
    retry,
    run_program,
    terminal,
)


@attrs.frozen
class Probe:
    """do names the method that runs; the other fields are its arguments."""

    do: str = "nothing"
    seconds: float = 600.0
    budget: str = "5s"
    path: str = ""
    argv: list[str] = attrs.field(factory=list)
    count: int = 0
    delay: float = 0.0


class ProbeReconciler(Reconciler[Probe]):
    """Does what is asked of it, well-behaved or not."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.runs: dict[str, int] = {}
        self.leaked: list[bytearray] = []

    async def reconcile(self, request: Request[Probe]) -> Result:
        self.runs[request.key] = self.runs.get(request.key, 0) + 1
        request.log.debug("probe.run", turn=self.runs[request.key])
        if request.spec.do != "nothing":
            request.log.info("probe.began", do=request.spec.do)
        result: Result = await getattr(self, request.spec.do)(request)
        return result

    async def remove(self, request: Request[Probe]) -> Result:
        request.log.info("probe.removed")
        return done()

    # -- well-behaved ------------------------------------------------------------

    async def nothing(self, request: Request[Probe]) -> Result:
        return done()

    async def sleep(self, request: Request[Probe]) -> Result:
        await trio.sleep(request.spec.seconds)
        return done()

    async def clean(self, request: Request[Probe]) -> Result:
        """Ordinary work whose cleanup takes its time."""
        try:
            await trio.sleep(600)
        finally:
            async with request.cleanup():  # noqa: ASYNC102 - it is that scope
                await trio.sleep(request.spec.seconds)  # noqa: ASYNC102 - see above
                request.log.info("probe.cleaned")
        return done()

    async def critical(self, request: Request[Probe]) -> Result:
        async with request.operation("hold") as operation:
            async with operation.critical(budget=request.spec.budget):
                request.log.info("probe.critical")
                await trio.sleep(request.spec.seconds)
                request.log.info("probe.finished")
        return done("held to the end")

    async def late(self, request: Request[Probe]) -> Result:
        """Begins its critical section when the file *path* exists."""
        while not os.path.lexists(request.spec.path):  # noqa: ASYNC110, ASYNC240, PTH - a test makes it
            await trio.sleep(0.01)
        return await self.critical(request)

    async def delayed(self, request: Request[Probe]) -> Result:
        """Begins its critical section *delay* seconds after the run began."""
        await trio.sleep(request.spec.delay)
        return await self.critical(request)

    async def program(self, request: Request[Probe]) -> Result:
        ended = await run_program(request.spec.argv, output=request.output)
        request.log.info("probe.ended", code=ended.code, signal=ended.signal)
        return done()

    async def critical_program(self, request: Request[Probe]) -> Result:
        async with request.operation("run") as operation:
            async with operation.critical(budget=request.spec.budget):
                ended = await run_program(request.spec.argv, output=operation.directory)
        request.log.info("probe.ended", code=ended.code, signal=ended.signal)
        return done()

    async def outliving_program(self, request: Request[Probe]) -> Result:
        async with request.operation("run") as operation:
            async with operation.critical(budget=request.spec.budget):
                ended = await run_program(request.spec.argv, operation=operation)
        request.log.info("probe.ended", code=ended.code, signal=ended.signal)
        return done()

    async def ordinary_program(self, request: Request[Probe]) -> Result:
        async with request.operation("run") as operation:
            ended = await run_program(request.spec.argv, operation=operation)
        request.log.info("probe.ended", code=ended.code, signal=ended.signal)
        return done()

    async def fail(self, request: Request[Probe]) -> Result:
        """Fails *count* times, always for one reason."""
        if self.runs[request.key] <= request.spec.count:
            return retry("the server does not answer")
        return done()

    async def refuse(self, request: Request[Probe]) -> Result:
        return terminal("it can never be so")

    async def log(self, request: Request[Probe]) -> Result:
        for _ in range(request.spec.count):
            request.log.warning("probe.noise", reason="the same each time")
        return done()

    # -- self-triggered runs -------------------------------------------------------

    async def touch(self, request: Request[Probe]) -> Result:
        """Rewrites its own manifest: only a comment differs."""
        _comment(Path(request.spec.path))
        return done()

    async def rewrite(self, request: Request[Probe]) -> Result:
        """Rewrites its own spec, each time with another value."""
        _count(Path(request.spec.path), request.spec.count + 1)
        return done()

    async def stamp(self, request: Request[Probe]) -> Result:
        """Finds its own time stamp outdated each time, and writes it again."""
        async with request.operation("stamp"):
            pass
        return after(0.01, f"last run: {time.time()}")

    # -- runs that block or ignore their cancellation --------------------------

    async def spin(self, request: Request[Probe]) -> Result:
        end = time.monotonic() + request.spec.seconds
        while time.monotonic() < end:
            pass
        return done()

    async def block(self, request: Request[Probe]) -> Result:
        time.sleep(request.spec.seconds)  # noqa: ASYNC251 - to block the loop is the point
        return done()

    async def match(self, request: Request[Probe]) -> Result:
        """One C call that keeps the interpreter's lock, but lets signal handlers run."""
        re.match(r"(a+)+$", "a" * 60 + "b")
        return done()

    async def thread(self, request: Request[Probe]) -> Result:
        await trio.to_thread.run_sync(
            time.sleep, request.spec.seconds, limiter=trio.CapacityLimiter(1)
        )
        return done()

    async def swallow(self, request: Request[Probe]) -> Result:
        while True:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:  # noqa: ASYNC103 - to swallow it is the point
                with trio.CancelScope(shield=True):  # noqa: ASYNC102 - and to stay without end
                    await trio.sleep(request.spec.seconds)

    # -- faults that must not end the daemon ------------------------------------------

    async def exit(self, request: Request[Probe]) -> Result:
        sys.exit(3)

    async def interrupt(self, request: Request[Probe]) -> Result:
        raise KeyboardInterrupt

    async def group(self, request: Request[Probe]) -> Result:
        raise ExceptionGroup("two at once", [ValueError("one"), OSError("two")])

    async def base_group(self, request: Request[Probe]) -> Result:
        raise BaseExceptionGroup("worse", [SystemExit(3), ValueError("two")])

    async def garbage(self, request: Request[Probe]) -> Any:
        return 42

    async def crash(self, request: Request[Probe]) -> Result:
        raise ValueError("no such thing")

    async def leak(self, request: Request[Probe]) -> Result:
        self.leaked.append(bytearray(1 << 30))
        return done()

    async def cancel(self, request: Request[Probe]) -> Result:
        """Cancels its own scope, and lets the cancellation propagate to it."""
        with trio.CancelScope() as scope:
            scope.cancel(reason="a plugin's own")
            await trio.lowlevel.checkpoint()
        return done()

    async def patch(self, request: Request[Probe]) -> Result:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return done()

    async def leave(self, request: Request[Probe]) -> Result:
        os._exit(9)


def _comment(path: Path) -> None:
    text = "\n".join(line for line in path.read_text().splitlines() if line[:1] != "#")
    path.write_text(f"{text}\n# last run: {time.time()}\n")


def _count(path: Path, count: int) -> None:
    new = path.with_name(f".{path.name}")
    new.write_text(re.sub(r"count: \d+", f"count: {count}", path.read_text()))
    new.replace(path)
