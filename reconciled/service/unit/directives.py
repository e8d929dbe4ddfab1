"""Checks single directives of a unit: what each does to a stop, a crash or a restart."""

from __future__ import annotations

import attrs

from reconciled.core.exit_codes import INVALID
from reconciled.core.stages import StopLimits
from reconciled.service.unit.facts import UnitFacts
from reconciled.service.unit.findings import (
    Finding,
    Remedy,
    Severity,
    drop_in,
    format_timespan,
    reload_command,
)
from reconciled.service.unit.timeouts import reap_line


def kill_mode(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Whether programs outlive a stop of the daemon."""
    mode = facts.kill_mode
    lines = ["KillMode=process"]
    if facts.exec_stop_post is not None and facts.reaper is None:
        lines.append(f"ExecStopPost={reap_line(facts, limits)}")
    remedy = drop_in(facts, "kill-mode", *lines)
    if mode == "control-group":
        what = (
            "KillMode=control-group sends SIGTERM to all programs at the same time as to the"
            " daemon: a stop kills helm, or whatever runs, although the daemon would wait for it;"
            " set process"
        )
        return Finding(Severity.ADVICE, "KillMode", what, remedy)
    if mode == "none":
        what = "KillMode=none leaves the daemon itself running after a stop; set process"
        return Finding(Severity.ADVICE, "KillMode", what, remedy)
    if mode == "mixed":
        what = (
            "KillMode=mixed waits for programs in a stop, and kills them at once when the daemon"
            " crashes: correct where no program has to outlive a crash; otherwise set process"
        )
        return Finding(Severity.NOTE, "KillMode", what)
    return None


def no_reaper(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Whether programs that outlive a crash are ended."""
    if facts.kill_mode != "process" or facts.exec_stop_post is None or facts.reaper is not None:
        return None
    line = reap_line(facts, limits)
    return Finding(
        Severity.ADVICE,
        "ExecStopPost",
        "KillMode=process without `reconciled reap` in ExecStopPost=: programs that outlive a"
        f" crash continue beside the next daemon, and nothing ends them; set {line}",
        drop_in(facts, "reaper", f"ExecStopPost={line}"),
    )


def watchdog(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the manager detects a daemon that hangs."""
    if facts.watchdog != 0:
        return None
    what = (
        "WatchdogSec=0: no other process watches the daemon, and a hang of the interpreter itself"
        " lasts for ever; set 60s"
    )
    remedy = drop_in(facts, "watchdog", "WatchdogSec=60s")
    return Finding(Severity.ADVICE, "WatchdogSec", what, remedy)


def notify_access(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the manager accepts notifications of the daemon and its reaper."""
    access = facts.notify_access
    lines = ["NotifyAccess=exec"]
    if facts.type not in (None, "notify", "notify-reload"):
        lines.insert(0, "Type=notify")
    if access == "none":
        what = (
            "NotifyAccess=none: the manager ignores the daemon's notifications that it is ready,"
            f" that it stops and that it needs longer; set {' and '.join(lines)}"
        )
    elif access == "main" and facts.reaper is not None:
        what = (
            "NotifyAccess=main: the manager ignores `reconciled reap`, which reports what it waits"
            " for and requests more time; set exec"
        )
    else:
        return None
    return Finding(Severity.ADVICE, "NotifyAccess", what, drop_in(facts, "notify", *lines))


def restart(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the manager restarts the daemon after a crash, but not after exit code 78."""
    if facts.restart == "no":
        what = "Restart=no: after a crash, interrupted operations are not recovered; set always"
        lines = ("Restart=always", "RestartSec=1s", f"RestartPreventExitStatus={INVALID}")
        return Finding(Severity.ADVICE, "Restart", what, drop_in(facts, "restart", *lines))
    if (
        facts.restart is None
        or facts.restart_prevent_exit_status is None
        or INVALID in facts.restart_prevent_exit_status
    ):
        return None
    what = (
        f"RestartPreventExitStatus= lacks {INVALID}: with an invalid configuration the daemon is"
        f" restarted for ever, and the unit never shows as failed; set {INVALID}"
    )
    remedy = drop_in(facts, "exit-status", f"RestartPreventExitStatus={INVALID}")
    return Finding(Severity.ADVICE, "RestartPreventExitStatus", what, remedy)


def start_limit(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether repeated crashes end the restarts."""
    interval, burst, delay = (
        facts.start_limit_interval,
        facts.start_limit_burst,
        facts.restart_delay,
    )
    if facts.restart in (None, "no") or not interval or not burst or delay is None:
        return None
    if burst * delay > interval:
        return None  # even a daemon that ends at once does not start that often
    what = (
        f"StartLimitIntervalSec={format_timespan(interval)} with"
        f" RestartSec={format_timespan(delay)}: after {burst} crashes in a row the daemon is not"
        " started again; set 0"
    )
    remedy = drop_in(facts, "start-limit", "StartLimitIntervalSec=0", section="Unit")
    return Finding(Severity.ADVICE, "StartLimitIntervalSec", what, remedy)


def oom_policy(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether one program that is killed for memory ends the service."""
    if facts.oom_policy in (None, "continue"):
        return None
    what = (
        f"OOMPolicy={facts.oom_policy}: when one program is killed for lack of memory, the whole"
        " service is stopped; set continue"
    )
    return Finding(
        Severity.ADVICE, "OOMPolicy", what, drop_in(facts, "oom", "OOMPolicy=continue")
    )  # fmt: skip


def send_sigkill(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether a daemon that hangs is killed."""
    if facts.send_sigkill is not False:
        return None
    what = (
        "SendSIGKILL=no: a daemon that hangs is not killed, and the next start is refused; set yes"
    )
    remedy = drop_in(facts, "sigkill", "SendSIGKILL=yes")
    return Finding(Severity.ADVICE, "SendSIGKILL", what, remedy)


def unread_files(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the manager has read the unit's present files."""
    if not facts.need_daemon_reload:
        return None
    command = reload_command(facts)
    what = f"the unit's files have changed since the manager read them: {command}"
    return Finding(Severity.ADVICE, "NeedDaemonReload", what, Remedy("", "", command))


def socket_path(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether an activated socket outlives a stop."""
    for unit in facts.sockets:
        for path in unit.paths:
            if not any(path.startswith(f"{directory}/") for directory in facts.runtime_directories):
                continue
            beside = f"/run/{unit.name}".replace(".socket", ".sock")
            what = (
                f"{unit.name} listens on {path}, inside RuntimeDirectory= of {facts.name}: a stop"
                f" removes it, while the socket unit is still active; set {beside}"
            )
            lines = ("ListenStream=", f"ListenStream={beside}")
            there = attrs.evolve(facts, name=unit.name)
            remedy = drop_in(there, "path", *lines, section="Socket")
            return Finding(Severity.ADVICE, "ListenStream", what, remedy)
    return None


def socket_user(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the daemon's user can connect to an activated socket."""
    user = facts.user
    if user is None or facts.is_user_unit:
        return None
    for unit in facts.sockets:
        if unit.paths and unit.user != user and user not in ("", "root"):
            what = (
                f"SocketUser={unit.user} of {unit.name} is not User={user} of {facts.name}:"
                f" `reconciled reload`, run by the unit, cannot connect; set {user}"
            )
            there = attrs.evolve(facts, name=unit.name)
            remedy = drop_in(there, "user", f"SocketUser={user}", section="Socket")
            return Finding(Severity.ADVICE, "SocketUser", what, remedy)
    return None
