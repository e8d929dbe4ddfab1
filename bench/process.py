"""A daemon as a real process, for the benches that look at it from outside.

Its reconciler is a plugin that has nothing to do, and that says so once as many runs as the
controller's option asks for have begun. Its lines are read from a pipe, as a service manager does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs

RECONCILED = str(Path(sys.executable).with_name("reconciled"))
EACH_FILE = 1000  # documents

PLUGIN = '''
import attrs
from reconciled.api import Reconciler, done

@attrs.frozen
class Idle:
    """Nothing to say."""

@attrs.frozen
class Options:
    runs: int

class IdleReconciler(Reconciler[Idle]):
    """Always as desired."""
    Options = Options
    runs = 0

    async def reconcile(self, request):
        self.runs += 1
        if self.runs == self.options.runs:
            request.log.info("bench.all_ran")
        return done()
'''

CONFIG = """
state: {root}/state
log: {{format: json, level: info}}
limits: {{concurrency: 256}}
plugins: {{directories: [{root}/plugins]}}
controllers:
  bench:
    reconciler: idle:IdleReconciler
    concurrency: 256
    watch: [{{directory: resources}}]
    options: {{runs: {keys}}}
"""

MANIFEST = "---\nkind: Idle\nmetadata: {{name: key-{number}}}\nspec: {{}}\n"

# The least that is a daemon: it takes its signal in the loop, and ends by itself.
FLOOR = """
import os
import signal
import attrs, cattrs, trio, yaml

async def main():
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        print("daemon.ready", flush=True)
        async for _ in signals:
            return

trio.run(main)
"""


def site(root: Path, keys: int) -> Path:
    """Lay out a configuration with *keys* manifests below *root*; the path of it."""
    for directory in ("plugins", "resources"):
        (root / directory).mkdir()
    (root / "plugins" / "idle.py").write_text(PLUGIN)
    for first in range(0, keys, EACH_FILE):
        documents = (
            MANIFEST.format(number=number) for number in range(first, min(keys, first + EACH_FILE))
        )
        (root / "resources" / f"from-{first}.yaml").write_text("".join(documents))
    config = root / "r.yaml"
    config.write_text(CONFIG.format(root=root, keys=keys))
    for path in (root, *root.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return config


def daemon(config: Path) -> Process:
    """Start ``reconciled run``."""
    return Process([RECONCILED, "--config", str(config), "run"])


def floor() -> Process:
    """Start the least that is a daemon."""
    return Process([sys.executable, "-c", FLOOR])


@attrs.define(eq=False)
class Process:
    """A process that was started at construction; began is that instant."""

    arguments: list[str]
    began: float = attrs.field(factory=time.perf_counter, init=False)
    process: subprocess.Popen[bytes] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.process = subprocess.Popen(
            self.arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def wait_for(self, *events: str) -> float:
        """Seconds from the start to the first of *events*; all of them have come, in any order."""
        missing, first = set(events), 0.0
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line.decode())
            if events[0] in seen[-1]:
                first = time.perf_counter() - self.began
            missing = {event for event in missing if event not in seen[-1]}
            if not missing:
                return first
        raise SystemExit(f"it ended before {sorted(missing)}:\n{''.join(seen[-20:])}")

    def stop(self) -> tuple[float, float]:
        """Seconds from SIGTERM until it has ended: by the clock, and on the processor."""
        # The kernel's number of the CPU clock of another process: clock_getcpuclockid(3).
        clock = (~self.process.pid << 3) | 2
        cpu = time.clock_gettime(clock)
        began = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        # Until it has ended and is not reaped yet, which is when its clock has all of it.
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        took, used = time.perf_counter() - began, time.clock_gettime(clock) - cpu
        # An idle daemon's last lines fit into the pipe: it does not wait for this reader.
        output, _ = self.process.communicate(timeout=60)
        if self.process.returncode != 0:
            raise SystemExit(f"exit {self.process.returncode}:\n{output.decode()}")
        return took, used

    def memory(self) -> dict[str, int]:
        """Bytes of memory by the kernel's names: Rss, Pss and others."""
        found = {}
        for line in Path(f"/proc/{self.process.pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) * 1024
        return found

    def cpu(self) -> float:
        """Seconds of processor time of all its threads so far; finer than the clock tick."""
        return sum(
            int((thread / "schedstat").read_text().split()[0]) / 1e9
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir()
        )
