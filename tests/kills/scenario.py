"""The keys of the daemon in the kill suite, and the rules that hold whenever it is killed.

1. Each start gets a new generation of all manifests, so that there is new work besides recovery.
2. What happened is read from the effects themselves, never from the daemon.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import yaml
from harness import POLL, Daemon, Limits, Workspace

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "config/examples/release/plugins/release.py"
# Convergence takes several starts of programs, maybe on a busy machine.
PATIENCE = 60.0
# Keys that may end held: nothing can tell whether their program had its effect.
MAY_BE_HELD = frozenset({"x/once", "x/plain"})
PROGRAMS: dict[str, dict[str, Any]] = {
    "checked": {"check": True},
    "plain": {},
    "critical": {"check": True, "critical": {"budget": "5s"}},
    "once": {"once": True, "critical": {"budget": "5s"}},
    "sure": {"once": True, "critical": {"budget": "5s"}, "recover": True},
    "steps": {"check": True, "critical": {"budget": "5s"}, "apply": "steps"},
}


@attrs.frozen
class Effect:
    """One line of the log of effects."""

    what: str
    name: str
    action: str
    operation: str
    attempt: int
    want: str
    pid: int


@attrs.define(eq=False)
class Scenario:
    """A workspace with keys of all kinds, and the record of their effects."""

    workspace: Workspace
    generation: int = attrs.field(default=0, init=False)
    keys: frozenset[str] = attrs.field(factory=frozenset)
    may_be_held: frozenset[str] = MAY_BE_HELD

    def __attrs_post_init__(self) -> None:
        for name in ("values", "locks"):
            (self.root / name).mkdir()
        for plugin in (EXAMPLE, HERE / "start_barrier.py"):
            self.workspace.plugin(plugin.stem, plugin.read_text())
        for name in ("x", "b", "f", "r", "g"):
            (self.workspace.resources / name).mkdir(mode=0o755)
        self.configure()

    @property
    def root(self) -> Path:
        """The directory of everything."""
        return self.workspace.root

    def configure(self, **changes: Any) -> None:
        """Write the configuration; *changes* go to each controller."""
        fast = {"retry": {"initial": "50ms", "max": "200ms"}, "max_recoveries": 16} | changes
        reconcilers = {
            "x": {"reconciler": "exec"},
            "b": {"reconciler": "exec", "interrupted": "roll-back"},
            "f": {"reconciler": "file", "options": {"root": str(self.root)}},
            "r": {"reconciler": "release:ReleaseReconciler"},
            "g": {"reconciler": "start_barrier:BarrierReconciler"},
        }
        controllers = {
            name: each | fast | {"watch": [{"directory": f"resources/{name}"}]}
            for name, each in reconcilers.items()
        }
        self.workspace.configure(Limits(drain=5, critical=60, cleanup=2), controllers=controllers)

    # -- manifests --------------------------------------------------------

    def want(self, name: str) -> str:
        """The desired value of *name* in this generation."""
        return f"{name}-{self.generation}"

    def declare(self) -> None:
        """Write a new generation of all manifests."""
        self.generation += 1
        for name, spec in PROGRAMS.items():
            self._declare("x", name, "Exec", self._program(name, **spec))
        self._declare("b", "undone", "Exec", self._program("undone", check=True, rollback=True))
        page = {
            "path": "page.txt",
            "content": self.want("page"),
            "mode": "0644",
            "after": self._program_of("page", "after"),
        }
        self._declare("f", "page", "File", page)
        release = {
            "version": str(self.generation),
            "text": self.want("shop"),
            "page": str(self.root / "values/shop"),
            "news": str(self.root / "news"),
        }
        self._declare("r", "shop", "Release", release)

    def _declare(self, controller: str, name: str, kind: str, spec: dict[str, Any]) -> None:
        if self.keys and f"{controller}/{name}" not in self.keys:
            return
        manifest = {"kind": kind, "metadata": {"name": name}, "spec": spec}
        path = self.workspace.resources / controller / f"{name}.yaml"
        self.workspace.write(path, yaml.safe_dump(manifest))

    def _program_of(self, name: str, action: str) -> list[str]:
        program = str(HERE / "effect_program.py")
        return [sys.executable, "-I", "-S", "-E", program, str(self.root), name, action]

    def _program(self, name: str, apply: str = "apply", **spec: Any) -> dict[str, Any]:
        own = {
            action: self._program_of(name, action)
            for action in ("check", "recover", "rollback")
            if spec.pop(action, False)
        }
        environment = {"environment": {"WANT": self.want(name)}}
        return {"apply": self._program_of(name, apply), **own, **spec, **environment}

    # -- starts ---------------------------------------------------------------------

    def start_next_generation(self) -> Daemon:
        """Start the daemon with a new generation."""
        self.declare()
        return self.workspace.start()

    def run_until_call(self, count: int) -> tuple[Daemon, str]:
        """Start the daemon with a new generation, and kill it at its system call number *count*.

        Returns the daemon and that call. If it makes fewer calls, it is killed once everything
        is as desired.
        """
        self.declare()
        number = len(self.workspace.daemons)
        barrier, report = self.root / f"barrier-{number}", self.root / f"calls-{number}"
        os.mkfifo(barrier)
        daemon = self.workspace.start(wrapper=["env", f"KILLS_BARRIER={barrier}"])
        tracer = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "tracer.py"), str(daemon.pid), str(count),
             str(report), str(barrier)],
        )  # fmt: skip
        try:
            self.wait_for(daemon, lambda: not daemon.alive)
            if daemon.alive:
                daemon.send(signal.SIGKILL)
            assert tracer.wait(PATIENCE) == 0
        finally:
            tracer.kill()
        calls = report.read_text().splitlines()
        return daemon, calls[-1] if len(calls) == count else f"none of {len(calls)}"

    def wait_for(self, daemon: Daemon, over: Any = lambda: False) -> None:
        """Wait until everything is as desired, or until *over*."""
        give_up = time.monotonic() + PATIENCE
        while not over():
            missing = self.missing(daemon)
            if not missing:
                return
            assert time.monotonic() < give_up, f"not as desired: {missing}\n{daemon}"
            # In this order: the daemon may be killed between the two.
            assert daemon.alive or over(), f"it ended\n{daemon}"
            time.sleep(5 * POLL)  # the interval of the poll

    def missing(self, daemon: Daemon) -> dict[str, str]:
        """Values that are not as desired, except those of keys that may be held and are."""
        # Held by this daemon, or found held at its start, which is not logged as a new hold.
        found_open = [line for line in daemon.all("operation.found_open") if line["held"]]
        lines = [*daemon.all("operation.held"), *found_open]
        held = {line["key"] for line in lines} & self.may_be_held
        names = {"checked", "plain", "critical", "once", "sure", "steps", "undone", "page", "shop"}
        if self.keys:
            names &= {key.partition("/")[2] for key in self.keys}
        wrong = {}
        for name in sorted(names - {key.partition("/")[2] for key in held}):
            found = ""
            with contextlib.suppress(FileNotFoundError):
                found = (self.root / "values" / name).read_text()
            if found != self.want(name):
                wrong[name] = found
        return wrong

    def effects(self) -> list[Effect]:
        """The log so far."""
        try:
            lines = (self.root / "effects").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [
            Effect(what, name, action, operation, int(attempt), want, int(pid))
            for what, name, action, operation, attempt, want, pid in map(str.split, lines)
        ]

    # -- the rules -------------------------------------------------------------------

    def converge(self) -> None:
        """Start once more: everything becomes as desired, and every rule holds."""
        daemon = self.workspace.start()
        daemon.wait_for("daemon.ready", within=PATIENCE)
        self.wait_for(daemon)
        # A stop waits for critical operations, and so for their outcomes.
        stopped = daemon.stop(within=PATIENCE)
        assert stopped.code == 0, f"{stopped}\n{daemon}"
        assert stopped.report["interrupted"] == [], daemon
        assert daemon.left() == []
        self.check()

    def check(self) -> None:
        """The rules after a clean stop, whatever happened before."""
        self.check_effects()
        held = self._held()
        assert {each["key"] for each in held} <= self.may_be_held, held
        planned = self.workspace.verb("plan", "--json")
        assert planned.returncode in (0, 1), planned.stderr
        changing = {each["key"] for each in yaml.safe_load(planned.stdout) if each["changes"]}
        assert changing <= {each["key"] for each in held}, planned.stdout
        left = list(self.root.rglob(".*reconciled-*"))
        assert left == []

    def _held(self) -> list[dict[str, Any]]:
        listed = self.workspace.verb("journal", "list", "--json")
        assert listed.returncode == 0, listed.stderr
        data = yaml.safe_load(listed.stdout)
        opened: list[dict[str, Any]] = [each for each in data if not each.get("ended")]
        assert [each for each in opened if not each["hold"]] == []
        return opened

    def check_effects(self) -> None:
        """A key has at most one program at a time, and what runs once did not run twice."""
        effects = self.effects()
        assert [each for each in effects if each.what == "clash"] == []
        began = Counter(
            each.operation
            for each in effects
            if each.what == "begin" and each.name in ("once", "sure") and each.action == "apply"
        )
        assert [operation for operation, times in began.items() if times > 1] == []
        news = self.root / "news"
        lines = Counter(news.read_text().splitlines()) if news.exists() else Counter()
        assert [line for line, times in lines.items() if times > 1] == []
        self.check_order(effects)

    def check_order(self, effects: list[Effect]) -> None:
        """Between the begin and the end of a program no other acts on its key."""
        acting: dict[str, Effect] = {}
        for each in effects:
            if each.what == "begin":
                acting[each.name] = each
            elif each.what == "end":
                assert acting[each.name].pid == each.pid, (acting[each.name], each)


def scenario_in(root: Path) -> Iterator[Scenario]:
    """A scenario that is closed at the end; for the fixture."""
    workspace = Workspace(root)
    try:
        yield Scenario(workspace)
    finally:
        workspace.close()
