"""Random events of the service in any order: nothing runs twice, is cut, or is left behind.

    CHAOS_SEED=123 pytest tests/systemd/test_chaos.py      the same choices again
    CHAOS_EVENTS=40 pytest tests/systemd/test_chaos.py     longer, by hand

The programs are tests/systemd/chaos_program.py, which tell a ledger what they do.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
from container import Container
from installed import ETC, POLL, STATE, Service, wait_until

SEED = int(os.environ.get("CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
EVENTS = int(os.environ.get("CHAOS_EVENTS", "10"))
PROGRAM = Path(__file__).parent / "chaos_program.py"
BUDGET = "20s"
STOP = {"drain": "200ms", "critical": BUDGET, "cleanup": "1s"}
SOON = "[Service]\nRestartSec=100ms\nLimitCORE=0\n"
# The exit codes that the daemon may have; an end by a signal of the test has none.
CODES = {"0", "3", "75", "78"}
# name: seconds of work, arguments of the program, further fields of the manifest
KEYS: dict[str, tuple[float, list[str], dict[str, object]]] = {
    "grave": (0.6, ["critical"], {"critical": {"budget": BUDGET}}),
    "graver": (1.2, ["critical", "steps"], {"critical": {"budget": BUDGET}}),
    "plain": (0.4, [], {}),
    "stepwise": (0.8, ["steps"], {}),
    "once": (0.3, [], {"once": True}),
    "grave-once": (0.5, ["critical"], {"once": True, "critical": {"budget": BUDGET}}),
}


@attrs.frozen
class Line:
    """One line of the ledger."""

    what: str
    key: str
    operation: str
    attempt: int
    step: str
    pid: int
    at: float


@attrs.define(eq=False)
class Chaos:
    """The service, its manifests, and the events so far."""

    service: Service
    choose: random.Random
    versions: dict[str, int] = attrs.field(factory=dict)
    gone: set[str] = attrs.field(factory=set)
    options: int = 0
    begun: list[subprocess.Popen[str]] = attrs.field(factory=list)
    told: list[str] = attrs.field(factory=list)

    def declare(self, key: str) -> None:
        """Write a manifest of *key* with a new version."""
        seconds, words, spec = KEYS[key]
        self.versions[key] = self.versions.get(key, 0) + 1
        self.gone.discard(key)
        program = [f"{ETC}/programs/chaos", key]
        apply = [*program, str(self.versions[key]), str(seconds), *words]
        remove = [*program, "gone", "0.1", *(word for word in words if word == "critical")]
        self.service.declare(key, apply=apply, remove=remove, **spec)

    def configure(self) -> None:
        """Write the configuration, each time with a changed controller."""
        self.options += 1
        watch = [{"directory": "resources"}]
        controller = {"reconciler": "exec", "watch": watch, "max_recoveries": 3 + self.options % 2}
        self.service.configure(STOP, controllers={"x": controller}, state=STATE)

    def happen(self) -> None:
        """One random event."""
        events = {self.order: 5, self.change: 6, self.kill: 6, self.outside: 2}
        events |= {self.reload_bad: 1, self.reload_other: 2}
        self.choose.choices(list(events), list(events.values()))[0]()
        # A random time for progress before the next event.
        time.sleep(self.choose.choice((0.0, 0.05, 0.2, 0.5)))

    def systemctl(self, *words: str) -> None:
        """Run systemctl, which has to end, successfully or not."""
        try:
            self.service.systemctl(*words, check=False, within=45)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self}\n{words} does not end\n{self.whereabouts()}")

    def order(self) -> None:
        """A command of an administrator, waited for or not."""
        verb = self.choose.choice(("stop", "start", "start", "restart", "reload"))
        if self.choose.random() < 0.5:
            self.told.append(verb)
            self.systemctl(verb, self.service.unit)
        else:
            self.told.append(f"{verb} &")
            self.begun.append(self.service.begin(verb))

    def change(self) -> None:
        """Manifests change; sometimes one is removed."""
        for key in self.choose.sample(sorted(KEYS), self.choose.choice((1, 2, 6))):
            if key not in self.gone and self.choose.random() < 0.1:
                self.told.append(f"withdraw {key}")
                self.service.withdraw(key)
                self.gone.add(key)
            else:
                self.told.append(f"declare {key}")
                self.declare(key)

    def kill(self) -> None:
        """Kill the daemon, the reaper, or both; sometimes with new work waiting."""
        if self.choose.random() < 0.5:
            self.change()
            # A random time for progress.
            time.sleep(self.choose.choice((0.05, 0.1, 0.3)))
        kinds = {"main KILL": 2, "main ABRT": 1, "control KILL": 1, "both": 3}
        what = self.choose.choices(list(kinds), list(kinds.values()))[0]
        self.told.append(f"kill {what}")
        for who in ("main", "control") if what == "both" else (what.split()[0],):
            if what == "both" and who == "control":
                self.wait_for_reaper()
            signal = what.partition(" ")[2] or "KILL"
            words = (f"--kill-who={who}", f"--signal={signal}", self.service.unit)
            self.systemctl("kill", *words)

    def wait_for_reaper(self) -> None:
        """Wait until the reaper runs, if it has something to reap."""
        give_up = time.monotonic() + 1
        while time.monotonic() < give_up and self.service.property("ControlPID") == "0":
            time.sleep(POLL)  # the interval of the poll

    def outside(self) -> None:
        """Restart other services, or let the manager reload."""
        # logind does not always reconnect to a new bus, and the daemon starts after it.
        services = [("restart", "systemd-journald"), ("restart", "dbus", "systemd-logind")]
        words = self.choose.choice([("daemon-reload",), ("daemon-reexec",), *services])
        self.told.append(" ".join(words))
        self.systemctl(*words)

    def reload_bad(self) -> None:
        """A reload with a mistake in the configuration, which is repaired afterwards."""
        self.told.append("reload with a mistake")
        self.service.file("conf.d/wrong.yaml", "stop: {drain: never}\n")
        self.systemctl("reload", self.service.unit)
        (self.service.container.root / ETC.lstrip("/") / "conf.d/wrong.yaml").unlink()

    def __str__(self) -> str:
        return f"CHAOS_SEED={SEED} CHAOS_EVENTS={EVENTS}: {', '.join(self.told)}"

    def whereabouts(self) -> str:
        """The state of the manager, for the message of a failure."""
        asked = (
            ("list-jobs",),
            ("list-units", "--failed"),
            ("status", "--full", self.service.unit),
        )
        told = [self.service.systemctl(*words, check=False).stdout for words in asked]
        return "\n".join([*told, self.service.text()])

    def reload_other(self) -> None:
        """A reload that replaces the controller, and so stops its runs in stages."""
        self.told.append("reload with a change")
        self.configure()
        self.begun.append(self.service.begin("reload"))

    # -- what came of it ------------------------------------------------------------

    def operations(self) -> list[dict[str, object]]:
        """The operations that are open or held."""
        told = self.service.container.run("reconciled", "journal", "list", "--json").stdout
        return [each for each in json.loads(told) if each["state"] in ("open", "held")]

    def state(self, name: str) -> Path:
        """A file of the state directory, from outside."""
        return self.service.container.root / STATE.lstrip("/") / name

    def is_so(self, key: str) -> bool:
        """Whether *key* is as declared."""
        made = self.state(f"keys/{key}")
        if key in self.gone:
            return not made.exists()
        return made.exists() and made.read_text() == str(self.versions[key])

    def settled(self) -> bool:
        """Whether all open operations are held, and all other keys are as declared."""
        if all(self.is_so(key) for key in KEYS) and not self.operations():
            return True
        found = self.operations()
        held = {each["key"] for each in found if each["state"] == "held"}
        others = [key for key in KEYS if f"x/{key}" not in held]
        return len(held) == len(found) and all(map(self.is_so, others))

    def ledger(self) -> list[Line]:
        """The records of the programs."""
        found = []
        for line in self.state("ledger").read_text().splitlines():
            what, key, operation, attempt, step, pid, at, _ = line.split()
            found.append(Line(what, key, operation, int(attempt), step, int(pid), float(at)))
        return found


@pytest.fixture
def chaos(own_container: Container) -> Chaos:
    """The service with all keys declared, in a container that only this test has."""
    service = Service(own_container)
    service.clean()
    program = own_container.root / ETC.lstrip("/") / "programs/chaos"
    program.parent.mkdir()
    program.write_text("#!/opt/reconciled/bin/python3 -IS\n" + PROGRAM.read_text())
    program.chmod(0o755)
    service.drop_in(SOON)
    # This test restarts them more often than the start limit allows.
    for other in ("dbus", "systemd-journald", "systemd-logind"):
        place = f"/etc/systemd/system/{other}.service.d/often.conf"
        own_container.write(place, "[Unit]\nStartLimitIntervalSec=0\n")
    service.systemctl("daemon-reload")
    made = Chaos(service, random.Random(SEED))
    made.configure()
    for key in KEYS:
        made.declare(key)
    return made


def test_whatever_happens(chaos: Chaos) -> None:
    """After any sequence of stops, kills, restarts and changes the rules of this module hold."""
    service = chaos.service
    service.start()
    for _ in range(EVENTS):
        chaos.happen()
    print(chaos)
    for each in chaos.begun:
        each.communicate(timeout=30)
    # A start job fails if its daemon is killed; the unit is restarted all the same.
    service.start(check=False)
    try:
        service.wait_for_state("active")
        wait_until(chaos.settled, "all is settled", within=20)
    except AssertionError as error:
        lines = chaos.state("ledger").read_text()
        told = f"{chaos}\n{error}\n{chaos.operations()}\n{lines}"
        pytest.fail(f"{told}\n{chaos.whereabouts()}")
    service.stop()
    wrong = [
        *wrong_in_ledger(chaos.ledger()),
        *wrong_in_journal(service.text()),
        *wrong_in_unit(service),
    ]
    assert not wrong, f"{chaos}\n" + "\n".join([*wrong, service.text()])


def wrong_in_ledger(lines: Sequence[Line]) -> list[str]:
    """Two programs at once, a critical one that was ended, a repeated run or step."""
    wrong = [f"{line}" for line in lines if line.what == "beside-another" or "refused" in line.what]
    attempts: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == "begin":
            attempts[line.operation].append(line)
    ended = {line.pid for line in lines if line.what == "end"}
    for begins in attempts.values():
        key = begins[0].key
        wrong += [
            f"critical, and did not come to its end: {line}"
            for line in begins
            if "critical" in KEYS[key][1] and line.pid not in ended
        ]
        if "once" in key and len(begins) > 1:
            wrong.append(f"ran more than once: {begins}")
        if len({line.attempt for line in begins}) < len(begins):
            wrong.append(f"two of one attempt: {begins}")
        for line in begins:
            noted = [
                each.step
                for each in lines
                if each.operation == line.operation and each.what == "stepped" and each.at < line.at
            ]
            if line.step < max(noted, default="0"):
                wrong.append(f"step {max(noted)} was done, and forgotten: {line}")
    return wrong + [
        f"critical, and was asked to end: {line}"
        for line in lines
        if line.what == "asked-to-end" and "critical" in KEYS[line.key][1]
    ]


def wrong_in_journal(text: str) -> list[str]:
    """A traceback, an exceeded limit, an exit code that the contract does not have."""
    patterns: Sequence[str | Callable[[str], bool]] = (
        r"Traceback \(most recent call last\)",
        r"timed out|start-limit-hit|Killing process|Failed with result 'timeout'",
        r"daemon\.crashed|still around after|Main process exited, code=dumped.*SEGV",
    )
    wrong = [line for line in text.splitlines() for each in patterns if re.search(each, line)]
    ends = re.findall(r"Main process exited, code=exited, status=(\d+)", text)
    return wrong + [f"exit code {code}" for code in ends if code not in CODES]


def wrong_in_unit(service: Service) -> list[str]:
    """Processes and states that are left after the last stop."""
    shown = service.show("ActiveState", "Result", "ExecMainStatus")
    wrong = [] if shown["ActiveState"] == "inactive" else [f"after the stop: {shown}"]
    group = service.container.root / f"sys/fs/cgroup/system.slice/{service.unit}"
    return wrong + ([f"left over: {service.processes()}"] if group.exists() else [])
