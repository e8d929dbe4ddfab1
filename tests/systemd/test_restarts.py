"""Exit codes as the manager treats them, and restarts without a limit (case 22)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import ETC, STATE, UNITS, Service, wait_until

LIMITS = {"drain": "200ms", "critical": "6s", "cleanup": "500ms"}
# The shipped unit waits 1 s before a restart; these tests count restarts, not delays.
SOON = "[Service]\nRestartSec=100ms\n"


def restarted(service: Service, times: int = 1) -> None:
    """Wait until the manager has restarted it so many times."""
    wait_until(lambda: int(service.property("NRestarts")) >= times, f"restart {times}")


def state(service: Service) -> tuple[str, str, str]:
    """ActiveState, Result and the daemon's last exit code."""
    shown = service.show("ActiveState", "Result", "ExecMainStatus")
    return shown["ActiveState"], shown["Result"], shown["ExecMainStatus"]


def begun(service: Service) -> None:
    """Start it with a run that becomes critical when cut() creates a file."""
    service.configure({"drain": "1s", "critical": "1500ms", "cleanup": "500ms"})
    service.declare("held", kind="Probe", do="late", seconds=60, budget="1500ms", path=f"{ETC}/go")
    service.start()
    service.wait_for("probe.began")


def cut(service: Service) -> None:
    """Let the run become critical in the drain, so that its budget ends after the hard limit."""
    service.wait_for("stop.began")
    service.file("go", "")
    service.wait_for("operation.cut")


# -- exit codes ------------------------------------------------------------------------------


def test_a_clean_stop_is_no_failure(service: Service) -> None:
    """Exit code 0 after ``systemctl stop``: inactive, and not restarted."""
    service.configure(LIMITS)
    service.start()
    service.stop()
    assert state(service) == ("inactive", "success", "0")
    assert service.property("NRestarts") == "0"


def test_an_unrequested_end_is_followed_by_a_start(service: Service) -> None:
    """Exit code 0 without ``systemctl stop``, after a SIGTERM of another process: restarted."""
    service.configure(LIMITS)
    service.start()
    service.kill("TERM")
    restarted(service)
    service.wait_for_state("active")
    assert service.property("Result") == "success"


def test_a_start_that_fails_is_tried_again(service: Service) -> None:
    """Exit code 1: restarted until the obstacle is removed."""
    service.drop_in(SOON)
    service.configure(LIMITS)
    # A file in place of the directory of the store.
    service.container.write(f"{STATE}/store", "")
    assert service.start(check=False).returncode == 1
    restarted(service, 2)
    assert "status=1/FAILURE" in service.text()
    (service.container.root / f"{STATE.lstrip('/')}/store").unlink()
    service.wait_for_state("active")


def test_what_was_cut_by_a_stop_is_a_failure(service: Service) -> None:
    """Exit code 3 after ``systemctl stop``: failed, for monitoring, and not restarted."""
    begun(service)
    stopping = service.begin("stop")
    cut(service)
    stopping.communicate(timeout=15)
    assert state(service) == ("failed", "exit-code", "3")
    assert service.property("NRestarts") == "0"


def test_what_was_cut_is_taken_up_by_a_restart(service: Service) -> None:
    """Exit code 3 without ``systemctl stop``: restarted, and the cut operation is recovered."""
    begun(service)
    service.kill("TERM")
    cut(service)
    restarted(service)
    service.wait_for("operation.found_open", key="c/held")
    service.wait_for_state("active")


def test_a_state_that_another_holds_is_waited_for(service: Service) -> None:
    """Exit code 75: restarted until the other daemon has ended."""
    service.drop_in(SOON)
    service.configure(LIMITS)
    service.start()
    service.stop()
    holding = "touch /run/other-holds && sleep 60"
    words = ("systemd-run", "--quiet", "--collect", "--unit=other", "flock", f"{STATE}/lock")
    service.container.run(*words, "sh", "-c", holding)
    try:
        wait_until((service.container.root / "run/other-holds").exists, "the lock of another")
        assert service.start(check=False).returncode == 1
        service.wait_for("daemon.locked")
        assert "status=75/TEMPFAIL" in service.text()
    finally:
        service.systemctl("stop", "other")
    service.wait_for_state("active")


@pytest.mark.parametrize("wrong", ["configuration", "usage"])
def test_what_a_restart_cannot_repair_is_not_restarted(service: Service, wrong: str) -> None:
    """Exit code 78: failed at once, not restarted, with the mistake in the journal."""
    service.configure(LIMITS)
    if wrong == "configuration":
        path = service.file("reconciled.yaml", "stop: {drian: 1s}\n")
        told = f"{path}:1:"
    else:
        service.drop_in("[Service]\nExecStart=\nExecStart=reconciled run --forever\n")
        told = "--forever"
    assert service.start(check=False).returncode == 1
    assert state(service) == ("failed", "exit-code", "78")
    assert service.property("NRestarts") == "0"
    assert told in service.text()
    # After the repair a plain start works.
    service.configure(LIMITS)
    service.drop_in("")
    service.start()


# -- a crash loop ----------------------------------------------------------------------------


def newer(service: Service) -> list[Path]:
    """The drop-ins that an installation adds for this version of systemd."""
    version = int(service.container.run("systemctl", "--version").stdout.split()[1])
    paths = sorted(UNITS.glob("[0-9][0-9][0-9]-*.conf"))
    return [path for path in paths if int(path.name.partition("-")[0]) <= version]


def test_a_crash_loop_never_ends_the_restarts(service: Service) -> None:
    """After more failures than the manager's limit (5 in 10 s) it is still started again."""
    service.configure(LIMITS)
    # A shell in place of the daemon, and no reaper, to save time.
    crash = "ExecStart=\nExecStart=/bin/sh -c 'exit 1'\nExecStopPost=\n"
    service.drop_in(f"{SOON}{crash}")
    service.start(check=False)
    restarted(service, 8)
    service.drop_in(SOON)
    service.wait_for_state("active")


def delays(service: Service) -> list[float]:
    """Seconds from each failure to the next start."""
    ends: list[float] = []
    found: list[float] = []
    for line in service.journal("-o", "json").splitlines():
        entry = json.loads(line)
        at = int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
        if "Main process exited" in entry["MESSAGE"]:
            ends.append(at)
        elif "Scheduled restart job" in entry["MESSAGE"]:
            found.append(at - ends[-1])
    return found


def test_a_crash_loop_backs_off(service: Service) -> None:
    """RestartSec= passes between restarts, and grows where the manager supports it."""
    service.configure(LIMITS)
    growing = newer(service)
    for path in growing:
        service.drop_in(path.read_text(), f"10-newer-{path.name}")
    short = "RestartSec=100ms\n" + (
        "RestartSteps=4\nRestartMaxDelaySec=1600ms\n" if growing else ""
    )
    crash = "ExecStart=\nExecStart=/bin/sh -c 'exit 1'\nExecStopPost=\n"
    service.drop_in(f"[Service]\n{short}{crash}")
    service.start(check=False)
    restarted(service, 5)
    measured = delays(service)[:5]
    assert all(delay >= 0.1 for delay in measured)
    if growing:
        assert measured == sorted(measured)
        assert measured[4] >= 1.6


# -- the variant -----------------------------------------------------------------------------


@pytest.fixture
def variant(service: Service) -> Service:
    """The variant for KillMode=mixed, with a critical program that runs until the file ``go``."""
    service.drop_in((UNITS / "60-mixed.conf").read_text(), "60-mixed.conf")
    service.configure({**LIMITS, "critical": "20s"})
    work = "until [ -e go ]; do sleep 0.02; done; echo done >>done"
    script = service.script("apply", f"cd $STATE_DIRECTORY; echo $$ >>begun; {work}")
    service.declare("site", apply=[script], critical={"budget": "20s"})
    service.start()
    wait_until(lambda: len(lines(service, "begun")) == 1, "the program")
    return service


def lines(service: Service, name: str) -> list[str]:
    """The lines of a file of the state directory."""
    path = service.container.root / f"{STATE.lstrip('/')}/{name}"
    return path.read_text().split() if path.exists() else []


def test_the_variant_waits_in_a_stop(variant: Service) -> None:
    """KillMode=mixed: a stop waits for a critical program."""
    stopping = variant.begin("stop")
    variant.wait_for("stop.began", critical=1)
    variant.container.write(f"{STATE}/go", "")
    stopping.communicate(timeout=15)
    assert state(variant) == ("inactive", "success", "0")
    assert lines(variant, "done") == ["done"]


def test_the_variant_leaves_no_program_after_a_crash(variant: Service) -> None:
    """KillMode=mixed: programs of a killed daemon are killed; the next daemon resumes the work."""
    before = variant.processes()
    variant.kill("KILL")
    wait_until(lambda: len(lines(variant, "begun")) == 2, "the second attempt")
    assert set(variant.processes()).isdisjoint(before)
    variant.wait_for("operation.found_open", key="x/site")
    variant.container.write(f"{STATE}/go", "")
    wait_until(lambda: lines(variant, "done"), "the end")
    assert lines(variant, "done") == ["done"]
