"""Ending the processes that a dead daemon left running, or waiting for them, without trio.

1. No process is signalled by pid alone. A program is identified by its record (``survivors``), a
   stray by its membership in the unit's control group; a stray is signalled through a pidfd.
2. A critical program gets what is left of its own budget, at most *wait*. The processes that it
   started are not strays.
3. A process that got SIGTERM gets SIGKILL *term* seconds later.
4. If a program was ended here and its small parent did not record that, the end is recorded as
   ended by the last signal.
5. A program with a member that cannot be ended counts as force, and its members are named.

``reconciled reap`` uses it after a daemon's end, and so does the next start, which adopts
critical programs and leaves them alone here.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from reconciled.core.durations import format_duration
from reconciled.core.errors import RecordDamaged
from reconciled.programs.cgroup import belongs_to, hidden_in, members_of
from reconciled.programs.members import name_all
from reconciled.programs.processes import Process
from reconciled.programs.program_records import Identity
from reconciled.programs.survivors import (
    KILL_TIMEOUT,
    POLL_INTERVAL,
    Survivor,
    find_survivor,
    has_operation_variable,
    send_signal,
)

Log = Callable[[str], None]
# Called with a text that names the processes that are waited for, and the seconds until the next
# measure at most: when the names change, and at least every third of those seconds.
Report = Callable[[str, float], None]
REPORT_INTERVAL = 5.0
_KILL, _KILL_PARENT = 2, 3


@attrs.define(eq=False)
class ReapTarget:
    """A program or stray to end, and when its next measure is due, in monotonic seconds."""

    name: str
    critical: bool
    signal: Callable[[int], bool]
    deadline: float
    escalation: int = 0  # 1 SIGTERM, 2 SIGKILL, 3 SIGKILL to its small parent
    last_signal: int = 0  # the last signal that reached a process
    given_up: bool = False


@attrs.define(eq=False)
class SurvivorReaper:
    """One pass over the processes that a daemon left running.

    wait     most seconds that a critical program gets of its budget
    term     seconds between SIGTERM and SIGKILL
    cgroup   control group whose other processes are ended too; None: only recorded programs
    report   called while a process is waited for
    adopted  operations whose critical programs are adopted elsewhere: they are left alone
    """

    wait: float
    term: float
    log: Log
    cgroup: Path | None = None
    report: Report | None = None
    adopted: frozenset[str] = frozenset()
    _used_force: bool = attrs.field(default=False, init=False)
    _strays: dict[Identity, ReapTarget] = attrs.field(factory=dict, init=False)
    _spared: list[Survivor] = attrs.field(factory=list, init=False)
    _report_at: float = attrs.field(default=-math.inf, init=False)
    _reported: str = attrs.field(default="", init=False)

    def reap(self, operations: Path) -> bool:
        """End the programs recorded in the directory *operations*; whether force was needed.

        Force is SIGKILL, or any signal to a critical program, or a program that was not ended.
        """
        left: dict[Survivor, ReapTarget] = {}
        for survivor in self._survivors(operations):
            if survivor.assignment.critical and survivor.directory.name in self.adopted:
                self._spared.append(survivor)
            else:
                left[survivor] = self._make_target(survivor)
        try:
            while self._scan(left):
                time.sleep(POLL_INTERVAL)
        finally:
            for survivor in (*left, *self._spared):
                survivor.close()
        hidden = hidden_in(self.cgroup) if self.cgroup else []
        if hidden:
            numbers = ", ".join(map(str, hidden))
            self.log(
                f"processes {numbers} are hidden by the sandbox and were left running: remove"
                " PrivateUsers= from the unit, or end them by hand"
            )
        return self._used_force

    def _scan(self, left: dict[Survivor, ReapTarget]) -> bool:
        """Take each measure that is due; whether a process is left to wait for."""
        for survivor, target in list(left.items()):
            if survivor.alive and not target.given_up:
                self._escalate(target, survivor)
            else:
                self._record_end(survivor, target)
                survivor.close()
                del left[survivor]
        self._end_strays((*left, *self._spared))
        waiting = [*left.values(), *(p for p in self._strays.values() if not p.given_up)]
        if waiting:
            self._report_waiting(waiting)
        return bool(waiting)

    def _report_waiting(self, waiting: Sequence[ReapTarget]) -> None:
        now = time.monotonic()
        last = max(waiting, key=lambda target: target.deadline)
        seconds = max(0.0, last.deadline - now)
        doing = "ending" if last.escalation else "waiting for"
        more = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        text = f"{doing} {last.name}{more}"
        if self.report is None or (text == self._reported and now < self._report_at):
            return
        self.report(f"{text}, {format_duration(round(seconds))} left", seconds)
        self._reported = text
        self._report_at = now + min(REPORT_INTERVAL, max(seconds, KILL_TIMEOUT) / 3)

    def _survivors(self, operations: Path) -> Iterator[Survivor]:
        for directory in sorted(operations.iterdir()) if operations.is_dir() else ():
            try:
                survivor = find_survivor(directory)
            except (RecordDamaged, OSError) as error:
                # The program cannot be identified, and a guess could signal an unrelated process.
                self.log(f"cannot end the program of operation {directory.name}: {error}")
                continue
            if survivor is not None and survivor.alive:
                yield survivor
            elif survivor is not None:
                if survivor.runs_elsewhere:
                    self.log(
                        f"{survivor.assignment.action} of operation {directory.name} was left"
                        " alone: it belongs to the directory that this one is a copy of"
                    )
                survivor.close()

    def _make_target(self, survivor: Survivor) -> ReapTarget:
        assignment = survivor.assignment
        budget = min(survivor.remaining(), self.wait) if assignment.critical else 0.0
        name = f"{assignment.action} of operation {survivor.directory.name}"
        if budget:
            limit = format_duration(round(budget))
            self.log(f"waiting up to {limit} for {name}, which is critical")
        return ReapTarget(name, assignment.critical, survivor.signal, time.monotonic() + budget)

    def _escalate(self, target: ReapTarget, survivor: Survivor | None) -> None:
        """Take the next stronger measure if it is due."""
        if time.monotonic() < target.deadline:
            return
        target.escalation += 1
        if target.escalation == 1:
            self._send(target, signal.SIGTERM, self.term)
        elif target.escalation == _KILL:
            self._send(target, signal.SIGKILL, KILL_TIMEOUT)
        elif target.escalation == _KILL_PARENT and survivor is not None:
            survivor.kill_parent()
            target.deadline = time.monotonic() + KILL_TIMEOUT
        elif not target.given_up:
            target.given_up = True
            self._used_force |= survivor is None or survivor.owned
            left = [] if survivor is None else survivor.members()
            pid = f" ({name_all(left)})" if left else ""
            if survivor is not None and not survivor.owned:
                why = "was left alone: the state directory is on another device than at its start"
            elif target.last_signal:
                why = "did not end after SIGKILL: check the device or file system that it uses"
            else:
                why = "could not be signalled: end it by hand"
            self.log(f"{target.name}{pid} {why}")

    def _send(self, target: ReapTarget, number: signal.Signals, timeout: float) -> None:
        target.deadline = time.monotonic() + timeout
        if target.signal(number):
            target.last_signal = number
            self._used_force |= target.critical or number is signal.SIGKILL
            self.log(f"sent {number.name} to {target.name}")

    def _record_end(self, survivor: Survivor, target: ReapTarget) -> None:
        if not target.last_signal:
            if not target.given_up:
                self.log(f"{target.name} ended before a signal was due")
            return
        try:
            survivor.record_end(target.last_signal)
        except (RecordDamaged, OSError) as error:
            self.log(f"cannot record how {target.name} ended: {error}")

    def _end_strays(self, known: Sequence[Survivor]) -> None:
        """Take due measures against processes of the control group that are not of *known*."""
        if self.cgroup is None:
            return
        found = {
            Identity(process.pid, process.started): process
            for process in members_of(self.cgroup)
            if process.alive and not _belongs_to_survivor(process, known)
        }
        self._strays = {each: self._strays[each] for each in found if each in self._strays}
        for identity, process in found.items():
            target = self._strays.get(identity)
            if target is None:
                target = self._make_stray_target(process)
                self._strays[identity] = target
            self._escalate(target, None)

    def _make_stray_target(self, process: Process) -> ReapTarget:
        def signal_it(number: int) -> bool:
            return send_signal(process, number)

        return ReapTarget(f"{process.name} (pid {process.pid})", False, signal_it, -math.inf)  # noqa: FBT003 plain fields


def _belongs_to_survivor(process: Process, known: Sequence[Survivor]) -> bool:
    """Whether *process* belongs to a program of *known*, which is handled as a whole.

    It does by descent or process group, or if its environment names the operation: a helper may
    have left both, and to end it would break the program that relies on it.
    """
    pids = {pid for each in known for pid in (each.record.program.pid, each.record.parent.pid)}
    return belongs_to(process, pids) or any(
        has_operation_variable(process, each.directory) for each in known
    )
