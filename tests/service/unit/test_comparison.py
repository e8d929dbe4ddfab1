"""Findings about a unit that does not fit the stop budget, and their remedies."""

from __future__ import annotations

import configparser
import math
from typing import Any

import attrs
import pytest

from reconciled.core.durations import parse_duration
from reconciled.core.stages import StopLimits
from reconciled.service.unit.comparison import find_mismatches
from reconciled.service.unit.facts import SocketFacts, UnitFacts, parse_timespan, seconds_of
from reconciled.service.unit.findings import Finding, Severity, format_timespan

LIMITS = StopLimits()  # 20 s, 5 min, 5 s: a budget of 308 s
REAP = ("reconciled", "reap", "--wait=5m", "--term=30s")
# The shipped unit, on a machine that waits for the drain.
GOOD = UnitFacts(
    name="reconciled.service",
    source="bus",
    type="notify",
    timeout_stop=360.0,
    timeout_abort=30.0,
    stop_failure_mode="abort",
    kill_mode="process",
    send_sigkill=True,
    watchdog=60.0,
    notify_access="exec",
    restart="always",
    restart_delay=1.0,
    restart_prevent_exit_status=frozenset({78}),
    oom_policy="continue",
    start_limit_interval=0.0,
    start_limit_burst=5,
    exec_start=(("reconciled", "run"),),
    exec_stop_post=(REAP,),
    need_daemon_reload=False,
    user="reconciled",
    inhibit_delay=30.0,
    runtime_directories=("/run/reconciled",),
    sockets=(SocketFacts("reconciled.socket", ("/run/reconciled.sock",), "reconciled"),),
)
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "short": ("TimeoutStopSec", {"timeout_stop": 10.0}, "is below the stop budget of 5m8s:"),
    "no room": ("TimeoutStopSec", {"timeout_stop": 338.0}, "of 5m8s and ten percent"),
    "endless": ("TimeoutStopSec", {"timeout_stop": math.inf}, "a power-off is forced after 30min"),
    "long abort": ("TimeoutStopSec", {"timeout_abort": 1500.0}, "reaper, take 37min"),
    "all at once": ("KillMode", {"kill_mode": "control-group"}, "a stop kills helm"),
    "alone": (
        "KillMode",
        {"kill_mode": "control-group", "exec_stop_post": ()},
        "a stop kills helm",
    ),
    "none": ("KillMode", {"kill_mode": "none"}, "leaves the daemon itself running"),
    "no reaper": ("ExecStopPost", {"exec_stop_post": ()}, "nothing ends them"),
    "others": ("ExecStopPost", {"exec_stop_post": (("logger", "x"),)}, "nothing ends them"),
    "short wait": (
        "ExecStopPost",
        {"exec_stop_post": ((*REAP[:2], "--wait", "1m"),)},
        "below stop.critical",
    ),
    "default wait": ("ExecStopPost", {"exec_stop_post": (REAP[:2],)}, "--term=30s may take longer"),
    "unwatched": ("WatchdogSec", {"watchdog": 0.0}, "lasts for ever"),
    "no access": ("NotifyAccess", {"notify_access": "none"}, "ignores the daemon"),
    "simple": ("NotifyAccess", {"notify_access": "none", "type": "simple"}, "set Type=notify and"),
    "no access of the reaper": ("NotifyAccess", {"notify_access": "main"}, "ignores `reconciled"),
    "no restart": (
        "Restart",
        {"restart": "no", "restart_prevent_exit_status": frozenset()},
        "are not recovered",
    ),
    "exit code 78": (
        "RestartPreventExitStatus",
        {"restart_prevent_exit_status": frozenset({2})},
        "lacks 78",
    ),
    "start limit": ("StartLimitIntervalSec", {"start_limit_interval": 10.0}, "5 crashes in a row"),
    "all or none": ("OOMPolicy", {"oom_policy": "stop"}, "the whole service is stopped"),
    "no SIGKILL": ("SendSIGKILL", {"send_sigkill": False}, "the next start is refused"),
    "not reloaded": ("NeedDaemonReload", {"need_daemon_reload": True}, "systemctl daemon-reload"),
    "cut drain": ("InhibitDelayMaxSec", {"inhibit_delay": 5.0}, "below stop.drain (20s) plus"),
    "inside": (
        "ListenStream",
        {"sockets": (SocketFacts("reconciled.socket", ("/run/reconciled/x",), "reconciled"),)},
        "a stop removes it",
    ),
    "other user": (
        "SocketUser",
        {"sockets": (SocketFacts("reconciled.socket", ("/run/x",), "root"),)},
        "SocketUser=root of reconciled.socket is not User=reconciled",
    ),
}


def only(facts: UnitFacts, limits: StopLimits = LIMITS) -> Finding:
    """The only finding."""
    (finding,) = find_mismatches(facts, limits)
    return finding


def written(facts: UnitFacts, finding: Finding) -> UnitFacts:
    """*facts* after the finding's remedy, as the manager reads it."""
    remedy = finding.remedy
    assert remedy is not None
    if not remedy.path:
        assert remedy.command == "systemctl daemon-reload"
        return attrs.evolve(facts, need_daemon_reload=False)
    changes: dict[str, Any] = {}
    for line in remedy.text.splitlines()[1:]:
        name, _, value = line.partition("=")
        changes |= _read(facts, changes, name, value)
    return attrs.evolve(facts, **changes)


def _read(facts: UnitFacts, changes: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    spans = {"TimeoutStopSec": "timeout_stop", "TimeoutAbortSec": "timeout_abort"}
    spans |= {"WatchdogSec": "watchdog", "InhibitDelayMaxSec": "inhibit_delay"}
    spans |= {"StartLimitIntervalSec": "start_limit_interval", "RestartSec": "restart_delay"}
    words = {"KillMode": "kill_mode", "NotifyAccess": "notify_access", "Type": "type"}
    words |= {"Restart": "restart", "OOMPolicy": "oom_policy"}
    if name in spans:
        return {spans[name]: seconds_of(parse_timespan(value))}
    if name in words:
        return {words[name]: value}
    commands = changes.get("exec_stop_post", facts.exec_stop_post)
    prevented = changes.get("restart_prevent_exit_status", facts.restart_prevent_exit_status)
    (unit,) = facts.sockets
    lists = {
        "ExecStopPost": {"exec_stop_post": (*commands, tuple(value.split())) if value else ()},
        "RestartPreventExitStatus": {
            "restart_prevent_exit_status": {
                *prevented,
                *(int(word) for word in value.split() if word.isdecimal()),
            }
        },
        "SendSIGKILL": {"send_sigkill": value == "yes"},
        "ListenStream": {"sockets": (attrs.evolve(unit, paths=(value,) if value else ()),)},
        "SocketUser": {"sockets": (attrs.evolve(unit, user=value),)},
    }
    return lists[name]


def test_the_shipped_unit_fits() -> None:
    """The shipped unit has no finding."""
    assert find_mismatches(GOOD, LIMITS) == ()


def test_unknown_facts_give_no_finding() -> None:
    """A unit whose facts are all unknown (None) has no findings."""
    assert find_mismatches(UnitFacts("x.service", "environment"), LIMITS) == ()


@pytest.mark.parametrize("case", BAD)
def test_each_misfit_is_named(case: str) -> None:
    """Each wrong directive is one finding, with its name and its effect."""
    directive, changes, part = BAD[case]
    finding = only(attrs.evolve(GOOD, **changes))
    assert finding.directive == directive
    assert part in finding.message
    graded = {"short": Severity.FAULT, "no room": Severity.FAULT, "cut drain": Severity.NOTE}
    assert finding.severity is graded.get(case, Severity.ADVICE)


@pytest.mark.parametrize("case", BAD)
def test_each_remedy_corrects_its_finding(case: str) -> None:
    """With the remedy the finding disappears, and its file is a drop-in."""
    _, changes, _ = BAD[case]
    facts = attrs.evolve(GOOD, **changes)
    finding = only(facts)
    assert find_mismatches(written(facts, finding), LIMITS) == ()
    assert finding.remedy is not None
    if finding.remedy.path:
        assert finding.remedy.path.startswith("/etc/systemd/")
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(finding.remedy.text)
        assert len(parser.sections()) == 1


def test_the_limit_covers_the_budget_and_ten_percent() -> None:
    """A limit of 338.8 s or more fits the budget of 308 s, a lower one does not."""
    assert find_mismatches(attrs.evolve(GOOD, timeout_stop=338.8), LIMITS) == ()
    assert only(attrs.evolve(GOOD, timeout_stop=338.7)).severity is Severity.FAULT


def test_the_shutdown_delay_must_exceed_the_drain_by_a_second() -> None:
    """The lock is released a second before logind's limit: that second is not drain."""
    assert find_mismatches(attrs.evolve(GOOD, inhibit_delay=21.0), LIMITS) == ()
    finding = only(attrs.evolve(GOOD, inhibit_delay=20.5))
    assert finding.remedy is not None
    assert finding.remedy.text == "[Login]\nInhibitDelayMaxSec=21s\n"


def test_short_budgets_get_short_limits() -> None:
    """The proposed limit covers the reaper, and is rounded to 5 s if it is short."""
    limits = StopLimits(drain=1.0, critical=6.0, cleanup=0.5)
    reap = (("reconciled", "reap", "--wait=6s", "--term=2s"),)
    facts = attrs.evolve(GOOD, timeout_stop=10.0, exec_stop_post=reap)
    assert "set 20s, or lower stop.critical" in only(facts, limits).message  # 6 + 2 + 10
    alone = attrs.evolve(facts, kill_mode="mixed", exec_stop_post=(), notify_access="main")
    fault, _ = find_mismatches(alone, limits)
    assert "set 15s, or" in fault.message  # 9.5 s and ten percent


def test_mixed_is_a_choice() -> None:
    """KillMode=mixed gives a note with its consequence, neither a fault nor advice."""
    finding = only(attrs.evolve(GOOD, kill_mode="mixed", exec_stop_post=(), notify_access="main"))
    assert (finding.severity, finding.remedy) == (Severity.NOTE, None)


def test_a_start_limit_that_cannot_be_reached_gives_no_finding() -> None:
    """Five starts in 10 s cannot be reached with 2.5 s between starts."""
    assert (
        find_mismatches(attrs.evolve(GOOD, start_limit_interval=10.0, restart_delay=2.5), LIMITS)
        == ()
    )


def test_a_budget_beyond_a_power_off_has_no_drop_in() -> None:
    """If no limit fits before a forced power-off, the finding asks for a smaller budget."""
    limits = StopLimits(critical=3600.0)
    reap = (("reconciled", "reap", "--wait=1h", "--term=30s"),)
    finding = only(attrs.evolve(GOOD, timeout_stop=4200.0, exec_stop_post=reap), limits)
    assert finding.message.endswith("lower stop.critical")
    assert finding.remedy is None


def test_a_remedy_keeps_other_commands() -> None:
    """A reaper beside other commands gets no drop-in, which would empty the list."""
    facts = attrs.evolve(
        GOOD, exec_stop_post=(("logger", "x"), ("reconciled", "reap", "--wait=1m"))
    )
    assert only(facts).remedy is None


def test_the_reaper_uses_the_daemons_program() -> None:
    """The proposed command has the unit's program, with specifiers escaped."""
    facts = attrs.evolve(GOOD, exec_stop_post=(), exec_start=(("/opt/100% $x/reconciled", "run"),))
    remedy = only(facts).remedy
    assert remedy is not None
    line = "ExecStopPost='/opt/100%% $$x/reconciled' reap --wait=5m --term=30s"
    assert line in remedy.text.splitlines()


def test_a_user_units_remedy_is_below_the_home() -> None:
    """For a user manager the drop-in is below the home, and the command has --user."""
    remedy = only(attrs.evolve(GOOD, is_user_unit=True, timeout_stop=1.0)).remedy
    assert remedy is not None
    assert remedy.path.startswith("~/.config/systemd/user/reconciled.service.d/")
    assert remedy.command == "systemctl --user daemon-reload"


def test_the_worst_comes_first() -> None:
    """Faults come before advice, and advice before notes."""
    facts = attrs.evolve(GOOD, timeout_stop=1.0, kill_mode="mixed", watchdog=0.0)
    assert [each.severity for each in find_mismatches(facts, LIMITS)] == [0, 1, 2]


@pytest.mark.parametrize("seconds", [0.5, 5.0, 90.0, 360.0, 5400.0, math.inf])
def test_spans_are_read_back_unchanged(seconds: float) -> None:
    """A written duration is parsed as the same number of seconds."""
    assert seconds_of(parse_timespan(format_timespan(seconds))) == seconds


def test_reap_accepts_the_options_of_a_remedy() -> None:
    """The durations in the options of a remedy are valid for the reaper."""
    limits = StopLimits(critical=5400.0)
    findings = find_mismatches(attrs.evolve(GOOD, timeout_stop=7200.0), limits)
    texts = [each.remedy.text for each in findings if each.remedy]
    (line,) = [line for text in texts for line in text.splitlines() if "--wait" in line]
    assert parse_duration(line.partition("--wait=")[2].split()[0]) == 5400.0
