"""Cases of the catalogue that include a kill; each has a daemon with one key or two."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml
from harness import Daemon, wait_until
from scenario import PATIENCE, Scenario

pytestmark = pytest.mark.processes

POISON = """
import os
import signal
import attrs
from reconciled.api import Observation, Observed, Reconciler, RollForward, done

@attrs.frozen
class Poison:
    at: str
    marks: str

class PoisonReconciler(Reconciler[Poison]):
    def kill(self, spec, where):
        with open(spec.marks, "a") as marks:
            marks.write(where + "\\n")
        if where == spec.at or where == "begun":
            os.kill(os.getpid(), signal.SIGKILL)

    async def reconcile(self, request):
        async with request.operation("work") as operation:
            self.kill(request.spec, "begun" if operation.attempt == 1 else "reconcile")
        return done()

    async def observe(self, request):
        self.kill(request.spec, "observe")
        return Observation(Observed.DIFFERENT)

    def recover(self, interrupted, observation):
        self.kill(interrupted.spec, "recover")
        return RollForward()
"""

MOVE = """
import os
import attrs
from reconciled.api import Decision, Reconciler, StepKind, done

@attrs.frozen
class Move:
    source: str
    target: str
    fail: str

class MoveReconciler(Reconciler[Move]):
    async def reconcile(self, request):
        spec = request.spec
        if os.path.exists(spec.target) and os.path.exists(spec.target + ".published"):
            return done()
        async with request.operation("move") as operation:
            async def move():
                # A step that finds out that it is already done.
                if os.path.exists(spec.source):
                    os.rename(spec.source, spec.target)
                return operation.id
            async def publish():
                with open(spec.target + ".tries", "a") as tries:
                    tries.write(f"{operation.id} {operation.attempt} {operation.last_step}\\n")
                if spec.fail == "error" and operation.attempt == 1:
                    raise RuntimeError("the other side is not there")
                if spec.fail == "kill" and operation.attempt == 1:
                    os.kill(os.getpid(), 9)
                with open(spec.target + ".published", "w") as published:
                    published.write(operation.id)
            await operation.step("move", move)
            await operation.step("publish", publish)
        return done()
"""


def only(scenario: Scenario, name: str, source: str, plugin: str, **controller: object) -> None:
    """One controller ``c`` with *plugin*, and one ``f`` with an ordinary file."""
    scenario.workspace.plugin(name, source)
    watch = [{"directory": "resources/x"}]
    fast = {"retry": {"initial": "50ms", "max": "200ms"}}
    scenario.workspace.configure(
        controllers={
            "c": {"reconciler": f"{name}:{plugin}", "watch": watch, **fast, **controller},
            "f": {
                "reconciler": "file",
                "options": {"root": str(scenario.root)},
                "watch": [{"directory": "resources/f"}],
            },
        }
    )


def declare(scenario: Scenario, directory: str, name: str, kind: str, **spec: object) -> None:
    """One manifest."""
    manifest = {"kind": kind, "metadata": {"name": name}, "spec": spec}
    path = scenario.workspace.resources / directory / f"{name}.yaml"
    scenario.workspace.write(path, yaml.safe_dump(manifest))


def killed(daemon: Daemon) -> None:
    """Wait until it has killed itself."""
    assert daemon.ended(within=PATIENCE).code == -signal.SIGKILL


@pytest.mark.parametrize("at", ["observe", "recover", "reconcile"])
def test_c02_a_recovery_that_kills_its_process(scenario: Scenario, at: str) -> None:
    """C02: each attempt is counted before its code runs; at the cap that key alone is held."""
    only(scenario, "poison", POISON, "PoisonReconciler", max_recoveries=3)
    marks = scenario.root / "marks"
    declare(scenario, "x", "bad", "Poison", at=at, marks=str(marks))
    for _ in range(4):  # the first time, and three recoveries
        killed(scenario.workspace.start())
    # However often the daemon starts: a start does not reset the count.
    for number in range(3):
        declare(scenario, "f", "good", "File", path="good.txt", content=str(number))
        daemon = scenario.workspace.started()
        if number == 0:
            held = daemon.wait_for("operation.held", key="c/bad")
            assert "journal resolve" in held["commands"][0]
        daemon.wait_for("reconcile.done", key="f/good")
        assert daemon.stop().code == 0
    assert marks.read_text().splitlines().count(at) == 3
    # A changed spec resets the count.
    declare(scenario, "x", "bad", "Poison", at="nowhere", marks=str(marks))
    daemon = scenario.workspace.started()
    daemon.wait_for("recovery.began", key="c/bad")
    killed(daemon)  # the pinned spec comes first, and still kills
    assert marks.read_text().splitlines().count(at) == 4


@pytest.mark.parametrize("fail", ["error", "kill"])
def test_c03_the_effect_happened_and_the_record_did_not(scenario: Scenario, fail: str) -> None:
    """C03: the second attempt gets the last durable step and the same id, and converges."""
    only(scenario, "move", MOVE, "MoveReconciler")
    source, target = scenario.root / "new", scenario.root / "current"
    source.write_text("x")
    declare(scenario, "x", "a", "Move", source=str(source), target=str(target), fail=fail)
    daemon = scenario.workspace.start()
    if fail == "kill":
        killed(daemon)
        daemon = scenario.workspace.start()
    wait_until(Path(f"{target}.published").exists, "published", PATIENCE)
    assert daemon.stop().code == 0
    tries = [line.split() for line in Path(f"{target}.tries").read_text().splitlines()]
    assert [(attempt, step) for _, attempt, step in tries] == [("1", "move"), ("2", "move")]
    assert len({operation for operation, _, _ in tries}) == 1
    assert Path(f"{target}.published").read_text() == tries[0][0]


@pytest.mark.parametrize("policy", ["roll-forward", "roll-back", "hold"])
def test_c01_2_a_critical_operation_that_was_killed(scenario: Scenario, policy: str) -> None:
    """C01 (2): one operation is found, and its policy is applied before new work on its key."""
    program = (
        "import os,sys,time; a,root=sys.argv[1:];"
        "log=open(root+'/order','a'); log.write(a+' '+os.environ['WANT']+chr(10)); log.flush();"
        "open(root+'/pid','w').write(str(os.getpid())) if a=='apply' else None;"
        "first=os.environ['WANT']=='1' and os.environ['RECONCILED_ATTEMPT']=='1';"
        "time.sleep(60 if a=='apply' and first else 0);"
        "open(root+'/value','w').write(os.environ['WANT'] if a=='apply' else 'back')"
    )
    scenario.configure(interrupted=policy)

    def slow(want: str) -> None:
        act = {name: ["python3", "-c", program, name, str(scenario.root)]
               for name in ("apply", "rollback")}  # fmt: skip
        check = ["sh", "-c", f"grep -sqx {want} {scenario.root}/value || exit 1"]
        declare(
            scenario, "x", "slow", "Exec", check=check, critical={"budget": "60s"},
            environment={"WANT": want}, **act,
        )  # fmt: skip

    slow("1")
    daemon = scenario.workspace.start()
    wait_until((scenario.root / "pid").exists, "begun", PATIENCE)
    daemon.send(signal.SIGKILL)
    daemon.ended()
    # A power cut, as far as the program is concerned: its process tree is killed too.
    for pid in daemon.left():
        os.kill(pid, signal.SIGKILL)
    slow("2")
    declare(scenario, "f", "good", "File", path="good.txt", content="x")
    daemon = scenario.workspace.started()
    began = daemon.wait_for("recovery.began", key="x/slow")
    daemon.wait_for("reconcile.done", key="f/good")
    if policy == "hold":
        held = daemon.wait_for("operation.held", key="x/slow")
        assert f"reconciled journal resolve {began['operation']} --" in held["commands"][0]
    else:
        wait_until(
            lambda: "apply 2\n" in (scenario.root / "order").read_text(), "new work", PATIENCE
        )
    assert len({line["operation"] for line in daemon.all("recovery.began")}) == 1
    assert daemon.stop(within=PATIENCE).code == 0
    lines = (scenario.root / "order").read_text().splitlines()
    first = {
        "roll-forward": ["apply 1", "apply 1", "apply 2"],
        "roll-back": ["apply 1", "rollback 1", "apply 2"],
        "hold": ["apply 1"],
    }[policy]
    assert lines[: len(first)] == first
    assert policy != "hold" or lines == first
