"""Runs the daemon as a real process and observes it from outside.

Observed are its log lines, its exit, its processor time and the processes that it leaves.

1. Each wait is for an observable event, within a bound; nothing sleeps to synchronise.
2. A marker in the environment identifies the processes of one daemon, since programs inherit it:
   a process that carries it after the exit was left behind.
3. Processor time is that of the daemon's own clock, read just before the signal and again after
   the exit, before it is reaped; the time of its programs does not count.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

RECONCILED = str(Path(sys.executable).with_name("reconciled"))
PROBE = Path(__file__).with_name("probe.py")
# The bound of each wait. No rule depends on it: it only ends the wait of a test that fails.
PATIENCE = 30.0
POLL = 0.005
# What a stop may take beyond what it has to wait for. A tenth of a second is typical.
SLACK = 3.0
MARKER = "RECONCILED_SUITE"

Line = dict[str, Any]


# Runs a script in this process after it has changed constants of the last resort.
IMPATIENT = """
import runpy, sys
from reconciled.stop import last_resort
for change in sys.argv.pop(1).split(","):
    name, _, seconds = change.partition("=")
    assert hasattr(last_resort, name), name
    setattr(last_resort, name, float(seconds))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def with_last_resort(**constants: float) -> list[str]:
    """The wrapper of a daemon whose last resort has other *constants*, in seconds."""
    changes = ",".join(f"{name}={seconds}" for name, seconds in constants.items())
    return [sys.executable, "-c", IMPATIENT, changes]


@attrs.frozen
class Limits:
    """The ``stop`` section of the configuration, in seconds."""

    drain: float = 0.5
    critical: float = 6.0
    cleanup: float = 0.5

    def as_data(self) -> dict[str, str]:
        """The section as the configuration has it."""
        return {name: f"{round(1000 * value)}ms" for name, value in attrs.asdict(self).items()}


@attrs.frozen
class Stopped:
    """The end of a daemon. wall and cpu count from the signal, in seconds."""

    code: int
    wall: float
    cpu: float
    report: dict[str, Any]  # last-stop.json; empty if it does not exist


def wait_until(seen: Callable[[], object], what: str, within: float = PATIENCE) -> None:
    """Poll until *seen* is true. Fails, naming *what* was waited for."""
    give_up = time.monotonic() + within
    while not seen():
        assert time.monotonic() < give_up, f"{what}: not seen within {within:g} s"
        time.sleep(POLL)  # the interval of the poll; no result depends on it


def marked(marker: str) -> list[int]:
    """The running processes that carry *marker*."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def children_of(pid: int) -> list[int]:
    """The children of *pid*, zombies included."""
    return [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]


def state_of(pid: int) -> str:
    """The state letter in /proc, Z for a zombie; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


@attrs.define(eq=False)
class Workspace:
    """The directory of one daemon: r.yaml, plugins, resources, state. Made by the fixture."""

    root: Path
    daemons: list[Daemon] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        for directory in (self.resources, self.plugins):
            directory.mkdir(mode=0o755)
        shutil.copy(PROBE, self.plugins / "probe.py")
        (self.plugins / "probe.py").chmod(0o644)

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.root / "r.yaml"

    @property
    def resources(self) -> Path:
        """The watched directory."""
        return self.root / "resources"

    @property
    def plugins(self) -> Path:
        """The plugin directory."""
        return self.root / "plugins"

    @property
    def state(self) -> Path:
        """The state directory."""
        return self.root / "state"

    def configure(
        self,
        limits: Limits | None = None,
        *,
        level: str = "info",
        controllers: dict[str, Any] | None = None,
        **controller: Any,
    ) -> None:
        """Write a configuration: one controller ``c`` with the probe, changed by *controller*."""
        default = {"reconciler": "probe:ProbeReconciler", "watch": [{"directory": "resources"}]}
        data = {
            "state": str(self.state),
            "stop": (limits or Limits()).as_data(),
            "log": {"format": "json", "level": level},
            "plugins": {"directories": [str(self.plugins)]},
            "controllers": controllers or {"c": default | controller},
        }
        self.write(self.config, yaml.safe_dump(data))

    def write(self, path: Path, text: str) -> None:
        """Replace a file atomically."""
        new = path.with_name(f".{path.name}.new")
        new.write_text(text)
        new.replace(path)

    def plugin(self, name: str, source: str) -> None:
        """Add the plugin file *name*."""
        self.write(self.plugins / f"{name}.py", source)

    def declare(self, name: str, *, kind: str = "Probe", **spec: Any) -> Path:
        """Write the manifest *name*."""
        path = self.resources / f"{name}.yaml"
        manifest = {"kind": kind, "metadata": {"name": name}, "spec": spec}
        self.write(path, yaml.safe_dump(manifest))
        return path

    def start(self, *arguments: str, wrapper: Sequence[str] = ()) -> Daemon:
        """Start a daemon in this directory, by *wrapper* if there is one."""
        daemon = Daemon(self, [*wrapper, RECONCILED, "--config", "r.yaml", "run", *arguments])
        self.daemons.append(daemon)
        return daemon

    def started(self, *arguments: str) -> Daemon:
        """Start a daemon, and wait until it is ready."""
        daemon = self.start(*arguments)
        daemon.wait_for("daemon.ready")
        return daemon

    def verb(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run another verb to its end."""
        return subprocess.run(
            [RECONCILED, "--config", "r.yaml", *arguments],
            cwd=self.root, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip

    def close(self) -> None:
        """Kill every process of every daemon, whether the test passed or not."""
        for daemon in self.daemons:
            daemon.close()


@attrs.define(eq=False)
class Daemon:
    """One process of ``reconciled run``. pid is its own, unless it has a wrapper."""

    workspace: Workspace
    arguments: list[str]
    marker: str = attrs.field(factory=lambda: uuid.uuid4().hex, init=False)
    process: subprocess.Popen[bytes] = attrs.field(init=False)
    pid: int = attrs.field(init=False)
    lines: list[Line] = attrs.field(factory=list, init=False)
    # Lines of standard error that are not JSON: mainly the stacks of faulthandler.
    other: list[str] = attrs.field(factory=list, init=False)
    _read: int = attrs.field(init=False)
    _wake: int = attrs.field(init=False)
    _reader: threading.Thread = attrs.field(init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)

    def __attrs_post_init__(self) -> None:
        self._read, write = os.pipe()
        self._wake = os.eventfd(0)
        self.process = subprocess.Popen(
            self.arguments,
            cwd=self.workspace.root,
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=write,
            env=os.environ | {MARKER: self.marker},
            # As under a service manager: the process group has no other members.
            start_new_session=True,
        )
        os.close(write)
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read_lines, name=f"lines of {self.pid}")
        self._reader.start()

    # -- log lines -------------------------------------------------------------

    def _read_lines(self) -> None:
        partial = b""
        while True:
            ready, _, _ = select.select([self._read, self._wake], [], [])
            if self._wake in ready:
                return
            data = os.read(self._read, 1 << 16)
            *whole, partial = (partial + data).split(b"\n")
            with self._changed:
                for line in whole:
                    self._take(line.decode("utf-8", "replace"))
                self._changed.notify_all()
            if not data:
                return

    def _take(self, text: str) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            self.other.append(text)
        else:
            self.lines.append(line)

    def all(self, event: str, **fields: Any) -> list[Line]:
        """The lines so far with this event and these fields."""
        with self._changed:
            return [line for line in self.lines if _fits(line, event, fields)]

    def wait_for(
        self, event: str, *, nth: int = 1, within: float = PATIENCE, **fields: Any
    ) -> Line:
        """Wait for line number *nth* with this event and these fields, and return it."""
        give_up = time.monotonic() + within
        with self._changed:
            while True:
                found = [line for line in self.lines if _fits(line, event, fields)]
                if len(found) >= nth:
                    return found[nth - 1]
                left = give_up - time.monotonic()
                ended = not self._reader.is_alive()
                assert left > 0, f"{event} {fields} not seen within {within:g} s:\n{self}"
                assert not ended, f"it ended before {event} {fields}:\n{self}"
                self._changed.wait(min(left, 0.5))

    def last(self, event: str) -> Line:
        """The last line with this event, of a daemon that has ended."""
        found = self.all(event)
        assert found, f"no {event}:\n{self}"
        return found[-1]

    def wait_for_file(self, name: str) -> None:
        """Wait until it has the file *name* of its state directory open."""

        def opened() -> bool:
            links = Path(f"/proc/{self.pid}/fd").iterdir()
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                return any(link.readlink() == self.workspace.state / name for link in links)
            return False

        wait_until(opened, f"{name} open")

    def wait_for_text(self, text: str) -> None:
        """Wait for *text* among the lines that are not JSON."""
        wait_until(lambda: any(text in line for line in self.other.copy()), text)

    def stall(self) -> None:
        """Stop reading its lines, and fill the pipe until it accepts nothing more."""
        os.eventfd_write(self._wake, 1)
        self._reader.join()
        # A new open file description: the one of the daemon must not become non-blocking.
        writer = os.open(f"/proc/{self.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"\n" * 4096)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"\n")
        os.close(writer)

    # -- the end ---------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return state_of(self.pid) not in ("", "Z")

    def cpu(self) -> float:
        """Seconds of processor time that it has used so far; works for a zombie too."""
        # The kernel's number of the CPU clock of another process: clock_getcpuclockid(3).
        return time.clock_gettime((~self.pid << 3) | 2)

    def send(self, number: int) -> None:
        """Send a signal to the daemon alone."""
        os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM, *, within: float = PATIENCE) -> Stopped:
        """Send a signal that begins a stop, and wait for the end."""
        cpu, began = self.cpu(), time.monotonic()
        self.send(number)
        return self.ended(began, cpu, within=within)

    def ended(
        self, began: float | None = None, cpu: float = 0.0, *, within: float = PATIENCE
    ) -> Stopped:
        """Wait until it exits without further signals. wall counts from *began*."""
        began = time.monotonic() if began is None else began
        process = os.pidfd_open(self.process.pid)
        try:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            seen = poll.poll(1000 * max(0.0, began + within - time.monotonic()))
            wall = time.monotonic() - began
            assert seen, f"it has not ended within {within:g} s:\n{self}"
            used = self.cpu() - cpu if self.pid == self.process.pid else 0.0
        finally:
            os.close(process)
        code = self.process.wait()
        if self._reader.is_alive():
            self._reader.join(PATIENCE)
        return Stopped(code, wall, used, self._report())

    def _report(self) -> dict[str, Any]:
        try:
            report: dict[str, Any] = json.loads(
                (self.workspace.state / "last-stop.json").read_text()
            )
        except FileNotFoundError:
            return {}
        return report

    def left(self) -> list[int]:
        """The processes of it that still run."""
        return [pid for pid in marked(self.marker) if state_of(pid) != "Z"]

    def close(self) -> None:
        """Kill it and the processes that it left; for the fixture."""
        for pid in {*self.left(), *([self.process.pid] if self.process.poll() is None else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        os.eventfd_write(self._wake, 1)
        self._reader.join()
        os.close(self._read)
        os.close(self._wake)

    def __str__(self) -> str:
        with self._changed:
            return "\n".join([*(json.dumps(line) for line in self.lines[-40:]), *self.other[-40:]])


def _fits(line: Line, event: str, fields: dict[str, Any]) -> bool:
    if line.get("event") != event:
        return False
    return all(line.get(name) == value for name, value in fields.items())


def workspace_in(root: Path) -> Iterator[Workspace]:
    """A workspace that is closed at the end; for the fixture."""
    workspace = Workspace(root)
    try:
        yield workspace
    finally:
        workspace.close()
