"""Single directives of a unit, and what each does to a stop, a crash or a restart."""

from __future__ import annotations

import attrs

from reconciled.core.stages import StopLimits
from reconciled.service.findings import (
    Finding,
    Remedy,
    Severity,
    drop_in,
    format_timespan,
    reload_command,
)
from reconciled.service.timing import reap_line
from reconciled.service.unit_facts import UnitFacts

INVALID = 78  # the exit code of a configuration that cannot be used


def kill_mode(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """What becomes of programs when the daemon is stopped."""
    mode = facts.kill_mode
    lines = ["KillMode=process"]
    if facts.exec_stop_post is not None and facts.reaper is None:
        lines.append(f"ExecStopPost={reap_line(facts, limits)}")
    remedy = drop_in(facts, "kill-mode", *lines)
    if mode == "control-group":
        what = (
            "KillMode=control-group sends SIGTERM to all programs in the instant in which the"
            " daemon gets it: it kills helm, or whatever runs, during a stop, although the daemon"
            " would wait for it; set process"
        )
        return Finding(Severity.ADVICE, "KillMode", what, remedy)
    if mode == "none":
        what = "KillMode=none leaves the daemon itself running after a stop; set process"
        return Finding(Severity.ADVICE, "KillMode", what, remedy)
    if mode == "mixed":
        what = (
            "KillMode=mixed waits for programs in a stop, and kills them at once when the daemon"
            " crashes: right where none has to outlive a crash; else set process"
        )
        return Finding(Severity.NOTE, "KillMode", what)
    return None


def no_reaper(facts: UnitFacts, limits: StopLimits) -> Finding | None:
    """Who ends what outlives a crash."""
    if facts.kill_mode != "process" or facts.exec_stop_post is None or facts.reaper is not None:
        return None
    line = reap_line(facts, limits)
    return Finding(
        Severity.ADVICE,
        "ExecStopPost",
        "KillMode=process without `reconciled reap` in ExecStopPost=: what outlives a crash runs"
        f" on beside the next daemon, and nobody ends it; set {line}",
        drop_in(facts, "reaper", f"ExecStopPost={line}"),
    )


def watchdog(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Who notices a daemon that hangs."""
    if facts.watchdog != 0:
        return None
    what = (
        "WatchdogSec=0: nobody outside watches the daemon, and a hang in which the interpreter"
        " itself is stuck lasts for ever; set 60s"
    )
    remedy = drop_in(facts, "watchdog", "WatchdogSec=60s")
    return Finding(Severity.ADVICE, "WatchdogSec", what, remedy)


def notify(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the daemon and its reaper are heard."""
    access = facts.notify_access
    lines = ["NotifyAccess=exec"]
    if facts.type not in (None, "notify", "notify-reload"):
        lines.insert(0, "Type=notify")
    if access == "none":
        what = (
            "NotifyAccess=none: the manager hears neither that the daemon is ready, nor that it"
            f" stops or needs longer; set {' and '.join(lines)}"
        )
    elif access == "main" and facts.reaper is not None:
        what = (
            "NotifyAccess=main: the manager does not hear `reconciled reap`, which tells what it"
            " waits for and asks for more time; set exec"
        )
    else:
        return None
    return Finding(Severity.ADVICE, "NotifyAccess", what, drop_in(facts, "notify", *lines))


def restart(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether it comes back, and when it must not."""
    if facts.restart == "no":
        what = "Restart=no: after a crash nobody recovers what was under way; set always"
        lines = ("Restart=always", "RestartSec=1s", f"RestartPreventExitStatus={INVALID}")
        return Finding(Severity.ADVICE, "Restart", what, drop_in(facts, "restart", *lines))
    if (
        facts.restart is None
        or facts.restart_prevent_exit_status is None
        or INVALID in facts.restart_prevent_exit_status
    ):
        return None
    what = (
        f"RestartPreventExitStatus= lacks {INVALID}: a configuration that is invalid is tried"
        f" again for ever, in place of a unit that has visibly failed; set {INVALID}"
    )
    remedy = drop_in(facts, "exit-status", f"RestartPreventExitStatus={INVALID}")
    return Finding(Severity.ADVICE, "RestartPreventExitStatus", what, remedy)


def start_limit(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether crashes can end it for good."""
    interval, burst, delay = (
        facts.start_limit_interval,
        facts.start_limit_burst,
        facts.restart_delay,
    )
    if facts.restart in (None, "no") or not interval or not burst or delay is None:
        return None
    if burst * delay > interval:
        return None  # not even a daemon that ends at once starts so often
    what = (
        f"StartLimitIntervalSec={format_timespan(interval)} with"
        f" RestartSec={format_timespan(delay)}: {burst} crashes in a row,"
        " and nothing starts the daemon again; set 0"
    )
    remedy = drop_in(facts, "start-limit", "StartLimitIntervalSec=0", section="Unit")
    return Finding(Severity.ADVICE, "StartLimitIntervalSec", what, remedy)


def oom_policy(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """What one program out of memory takes along."""
    if facts.oom_policy in (None, "continue"):
        return None
    what = (
        f"OOMPolicy={facts.oom_policy}: one program that is killed for want of memory takes the"
        " whole service along; set continue"
    )
    return Finding(
        Severity.ADVICE, "OOMPolicy", what, drop_in(facts, "oom", "OOMPolicy=continue")
    )  # fmt: skip


def sigkill(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether a daemon that hangs is ended at all."""
    if facts.send_sigkill is not False:
        return None
    what = "SendSIGKILL=no: a daemon that hangs stays, and the next start is refused; set yes"
    remedy = drop_in(facts, "sigkill", "SendSIGKILL=yes")
    return Finding(Severity.ADVICE, "SendSIGKILL", what, remedy)


def stale(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the manager has read what is written."""
    if not facts.need_daemon_reload:
        return None
    command = reload_command(facts)
    what = f"the unit's files have changed and the manager has not read them: {command}"
    return Finding(Severity.ADVICE, "NeedDaemonReload", what, Remedy("", "", command))


def sockets(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether an activated socket outlives a stop."""
    for unit in facts.sockets:
        for path in unit.paths:
            if not any(path.startswith(f"{directory}/") for directory in facts.runtime_directories):
                continue
            beside = f"/run/{unit.name}".replace(".socket", ".sock")
            what = (
                f"{unit.name} listens on {path}, inside RuntimeDirectory= of {facts.name}: it"
                f" goes with a stop, while the socket unit still says active; set {beside}"
            )
            lines = ("ListenStream=", f"ListenStream={beside}")
            there = attrs.evolve(facts, name=unit.name)
            remedy = drop_in(there, "path", *lines, section="Socket")
            return Finding(Severity.ADVICE, "ListenStream", what, remedy)
    return None


def socket_user(facts: UnitFacts, _limits: StopLimits) -> Finding | None:
    """Whether the daemon's own clients may use an activated socket."""
    user = facts.user
    if user is None or facts.is_user_unit:
        return None
    for unit in facts.sockets:
        if unit.paths and unit.user != user and user not in ("", "root"):
            what = (
                f"SocketUser={unit.user} of {unit.name} is not User={user} of {facts.name}: its"
                f" own `reconciled reload` may not connect; set {user}"
            )
            there = attrs.evolve(facts, name=unit.name)
            remedy = drop_in(there, "user", f"SocketUser={user}", section="Socket")
            return Finding(Severity.ADVICE, "SocketUser", what, remedy)
    return None
