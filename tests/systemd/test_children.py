"""Programs under a real manager: which are waited for in a stop or after a crash, which are ended.

The shell programs write to the state directory; a file ``go`` there is the word to go on.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from installed import STATE, STOP, Service, wait_until

HERE = "cd $STATE_DIRECTORY; echo $RECONCILED_ATTEMPT >>runs"
WAITS = "touch running; until [ -e go ]; do sleep 0.02; done"
DONE = "cut -d' ' -f1 /proc/uptime >done"
IGNORES = "trap '' TERM; touch running; while :; do sleep 0.1; done"
DAEMON_DIES = "[Service]\nRestartSec=100ms\n"


def state(service: Service, name: str) -> Path:
    """A file of the state directory, from outside."""
    return service.container.root / STATE.lstrip("/") / name


def started(service: Service, apply: str, dropin: str = DAEMON_DIES, **spec: Any) -> None:
    """The daemon, with the shell program *apply* of key x/site running."""
    service.configure({**STOP, "critical": "60s"})
    service.declare("site", apply=[service.script("apply", f"{HERE}; {apply}")], **spec)
    service.drop_in(dropin)
    service.start()
    wait_until(state(service, "running").exists, "the program")


def go(service: Service) -> None:
    """Create the file that the programs wait for."""
    state(service, "go").touch()


def runs(service: Service) -> list[str]:
    """The attempts that began."""
    return state(service, "runs").read_text().split()


def reaper_said(service: Service, text: str) -> bool:
    """Whether ``reap`` wrote a line with *text*, a pattern."""
    return any(re.search(f"^reconciled reap: {text}", entry.message) for entry in service.entries())


def wait_for_reaper(service: Service, text: str) -> None:
    """Wait for such a line."""
    wait_until(lambda: reaper_said(service, text), f"reap: {text}")


def nothing_left(service: Service) -> bool:
    """Whether the unit's control group was removed, and so has no process."""
    return not (service.container.root / f"sys/fs/cgroup/system.slice/{service.unit}").exists()


# -- a stop ----------------------------------------------------------------------


def test_a_stop_waits_for_a_critical_program(service: Service) -> None:
    """C07a: a critical program finishes, its exit code counts, and the unit leaves nothing."""
    started(service, f"{WAITS}; touch done; exit 7", critical={"budget": "20s"})
    stopping = service.begin("stop")
    service.wait_for("stop.began", critical=1)
    go(service)
    stopping.communicate(timeout=20)
    assert stopping.returncode == 0
    assert state(service, "done").exists()
    assert (
        "ended with exit code 7"
        in service.all("reconcile.failed", key="x/site")[0].fields["reason"]
    )
    assert service.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert not reaper_said(service, "")
    assert nothing_left(service)


def test_a_stop_ends_ordinary_programs(service: Service) -> None:
    """C07b: every process of an endless pipeline ends within cleanup; the unit succeeds."""
    started(service, "(setsid sleep 998 &); trap '' TERM; touch running; sleep 999 | cat")
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 30
    assert service.show("Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}
    # It left the program's group by setsid: the daemon reports it, and the reaper ends it.
    assert reaper_said(service, r"sent SIGTERM to sleep \(pid \d+\)")
    assert nothing_left(service)


def test_a_stop_ends_an_endless_critical_program_at_its_deadline(service: Service) -> None:
    """It gets its budget and no more: the unit fails with 3, and leaves nothing."""
    started(service, IGNORES, critical={"budget": "2s"})
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 30
    assert service.show("Result", "ExecMainStatus") == {
        "Result": "exit-code",
        "ExecMainStatus": "3",
    }
    assert nothing_left(service)


def test_orphans_are_reaped(service: Service) -> None:
    """C07c: 50 double-forked orphans are reaped after their end, and the exit code is kept."""
    started(service, "for i in $(seq 50); do (setsid sleep 0.2 &) ; done; touch running; exit 0")
    service.wait_for("reconcile.done", key="x/site")
    main = service.property("MainPID")
    children = service.container.root / f"proc/{main}/task/{main}/children"
    wait_until(lambda: len(service.processes()) == 1, "the end of the orphans")
    wait_until(lambda: not children.read_text(), "no zombies")


# -- the end of the daemon ---------------------------------------------------------


@pytest.mark.parametrize("limit", ["6min", "1s"])
def test_a_critical_program_completes_after_a_kill(service: Service, limit: str) -> None:
    """After a SIGKILL of the daemon a critical program completes once; the restart waits for it.

    Whatever the unit's limit is: the reaper asks for what the program's budget needs. And the
    program notes its steps, though no daemon lives that it could wait for.
    """
    apply = f"{WAITS}; sleep 1.5; reconciled step one && touch noted; {DONE}"
    dropin = f"{DAEMON_DIES}TimeoutStopSec={limit}\n"
    started(service, apply, dropin, critical={"budget": "20s"})
    service.kill("KILL")
    wait_for_reaper(service, "waiting up to .* for apply of operation .*, which is critical")
    status = service.show("SubState", "StatusText")
    assert status["SubState"] == "stop-post"
    assert re.fullmatch(r"waiting for apply of operation \w+, \d+s left", status["StatusText"])
    go(service)
    service.wait_for("daemon.ready", nth=2)
    service.wait_for("recovery.done", key="x/site")
    assert state(service, "noted").exists()
    assert runs(service) == ["1"]
    again = int(service.property("ExecMainStartTimestampMonotonic")) / 1e6
    assert float(state(service, "done").read_text()) <= again
    assert service.property("NRestarts") == "1"
    assert service.all("program.adopted") == []


def test_a_critical_program_completes_after_a_watchdog_abort(service: Service) -> None:
    """The same after the manager's watchdog ended a daemon whose loop hung."""
    dropin = f"{DAEMON_DIES}WatchdogSec=1s\nLimitCORE=0\n"
    started(service, f"{WAITS}; {DONE}", dropin, critical={"budget": "20s"})
    service.declare("hang", kind="Probe", do="block", seconds=60.0)
    wait_for_reaper(service, "waiting up to .* for apply of operation .*, which is critical")
    assert service.property("Result") == "watchdog"
    service.withdraw("hang")
    go(service)
    service.wait_for("recovery.done", key="x/site")
    assert runs(service) == ["1"]
    assert state(service, "done").exists()


def test_an_endless_critical_program_is_ended_after_a_kill(service: Service) -> None:
    """Past its time it gets SIGTERM, then SIGKILL; both are recorded, and recovery follows."""
    reap = "ExecStopPost=\nExecStopPost=reconciled reap --wait=500ms --term=300ms\n"
    apply = f"[ $RECONCILED_ATTEMPT = 2 ] || {{ {IGNORES}; }}"
    started(service, apply, DAEMON_DIES + reap, critical={"budget": "60s"})
    service.kill("KILL")
    wait_for_reaper(service, "sent SIGTERM to apply of operation .*")
    wait_for_reaper(service, "sent SIGKILL to apply of operation .*")
    service.wait_for("recovery.done", key="x/site")
    assert runs(service) == ["1", "2"]
    assert "Control process exited, code=exited, status=3" in service.text()


@pytest.mark.parametrize("delegation", ["", "Delegate=yes\nProtectControlGroups=no\n"])
def test_after_a_kill_ordinary_programs_and_strays_are_ended(
    service: Service, delegation: str
) -> None:
    """Processes that are not critical do not delay the restart; with delegation too."""
    apply = (
        "[ $RECONCILED_ATTEMPT = 2 ] || { env -i setsid -f sleep 998; touch running; sleep 999; }"
    )
    started(service, apply, DAEMON_DIES + delegation)
    before = set(service.processes())
    service.kill("KILL")
    service.wait_for("recovery.done", key="x/site")
    assert reaper_said(service, "sent SIGTERM to apply of operation .*")
    assert reaper_said(service, r"sent SIGTERM to sleep \(pid \d+\)")
    assert before.isdisjoint(service.processes())
    assert service.all("program.left_over") == []


# -- the start after it --------------------------------------------------------------


def test_a_killed_reaper_leaves_adoption_to_the_next_start(service: Service) -> None:
    """If the reaper is killed too, the next start adopts a critical program, and runs it once."""
    started(service, f"{WAITS}; {DONE}", critical={"budget": "30s"})
    service.kill("KILL")
    wait_for_reaper(service, "waiting up to .* for apply of operation .*, which is critical")
    service.systemctl("kill", "--kill-who=control", "--signal=KILL", service.unit)
    adopted = service.wait_for("program.adopted", key="x/site")
    assert (service.container.root / "proc" / adopted.fields["pid"]).is_dir()
    assert service.all("program.left_over") == []
    go(service)
    service.wait_for("recovery.done", key="x/site")
    assert runs(service) == ["1"]
    assert state(service, "done").exists()


def test_without_a_reaper_the_start_ends_what_is_left(service: Service) -> None:
    """Without a reaper the start ends ordinary programs and strays before the first run."""
    apply = (
        "[ $RECONCILED_ATTEMPT = 2 ] || { env -i setsid -f sleep 998; touch running; sleep 999; }"
    )
    started(service, apply, f"{DAEMON_DIES}ExecStopPost=\n")
    before = set(service.processes())
    service.kill("KILL")
    service.wait_for("recovery.done", key="x/site")
    told = [entry.fields["reason"] for entry in service.all("program.left_over")]
    assert sorted(re.sub(r"\b(\d+|[0-9A-Z]{26})\b", "…", each) for each in told) == [
        "sent SIGTERM to apply of operation …",
        "sent SIGTERM to sleep (pid …)",
    ]
    assert before.isdisjoint(service.processes())
    events = [entry.event for entry in service.entries()]
    assert events.index("recovery.began") > max(
        at for at, event in enumerate(events) if event == "program.left_over"
    )


def test_a_sandbox_that_hides_programs_holds_their_keys(service: Service) -> None:
    """Programs that PrivateUsers= hides are left alone, and their keys are held."""
    dropin = f"{DAEMON_DIES}PrivateUsers=yes\n"
    started(service, f"{WAITS}; {DONE}", dropin, critical={"budget": "30s"})
    service.kill("KILL")
    service.wait_for("program.unreadable", key="x/site")
    service.wait_for("operation.held", key="x/site")
    assert reaper_said(
        service,
        r"cannot end the program of operation \w+: the sandbox hides its process \d+",
    )
    hidden = service.all("program.left_over")[-1].fields["reason"]
    assert re.match(
        r"processes \d+, \d+(, \d+)? are hidden by the sandbox and were left running", hidden
    )
    assert runs(service) == ["1"]
    go(service)


# -- what a program finds --------------------------------------------------------------


def test_no_program_finds_the_managers_variables(service: Service) -> None:
    """No program of a reconciler, and no small parent, can notify the manager as the daemon."""
    service.configure(
        controllers={
            name: {"reconciler": name, "watch": [{"directory": "resources"}]}
            for name in ("file", "exec")
        }
    )
    for name in ("apply", "check", "validate", "after"):
        parent = "cat /proc/$PPID/environ" if name == "apply" else "true"
        tell = f"cd $STATE_DIRECTORY; env >{name}; {parent} >>parents"
        service.script(name, f"{tell}; [ {name} != check ] || [ -e apply ]")
    programs = {name: [f"/etc/reconciled/programs/{name}"] for name in ("apply", "check")}
    service.declare("site", **programs)
    hooks = {name: [f"/etc/reconciled/programs/{name}"] for name in ("validate", "after")}
    service.declare("file", kind="File", path=f"{STATE}/file", content="x", **hooks)
    service.drop_in("[Service]\nSetCredential=token:secret\n")
    service.start()
    for key in ("exec/site", "file/file"):
        service.wait_for("reconcile.done", key=key)
    manager = ("NOTIFY_SOCKET", "WATCHDOG_", "LISTEN_", "CREDENTIALS_DIRECTORY")
    for name in ("apply", "check", "validate", "after", "parents"):
        found = state(service, name).read_text().replace("\0", "\n").splitlines()
        assert any(line.startswith("STATE_DIRECTORY=") for line in found), name
        assert [line for line in found if line.startswith(manager)] == [], name
