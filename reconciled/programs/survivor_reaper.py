"""Ending what a dead daemon left running, or waiting for it: without a loop, and without trio.

1. Nobody is signalled by number alone: a program is known by its record (``survivors``), a
   stray by its place in the unit's own control group, and signalled through a descriptor.
2. A critical program has its own budget, at most *wait* of it; nothing that it has started is
   a stray.
3. Whoever is asked to end has *term* seconds before it is killed.
4. What was ended here and recorded by nobody is recorded as ended by that signal.

Two use it: ``reconciled reap`` after a daemon's end, and the next start, which leaves critical
programs to their adoption.
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
# Whom this waits for, for people, and for how many seconds it does so at most before the next
# measure. Called as long as it waits, at least every third of those seconds, and when it waits
# for somebody else.
Report = Callable[[str, float], None]
REPORT_INTERVAL = 5.0
_KILL, _PARENT = 2, 3


@attrs.define(eq=False)
class ReapTarget:
    """Somebody who is left, and when patience with them ends next, in monotonic seconds."""

    name: str
    critical: bool
    signal: Callable[[int], bool]
    deadline: float
    escalation: int = 0  # how far they had to be pressed: 1 SIGTERM, 2 SIGKILL, 3 the parent too
    last_signal: int = 0  # the last signal that reached somebody
    given_up: bool = False


@attrs.define(eq=False)
class SurvivorReaper:
    """One pass over what a daemon left running.

    group    the control group whose other processes are ended too; None: none are
    report   told while somebody is waited for
    adopted  operations whose critical programs somebody else waits for: they are left alone
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
        """See to everybody of *operations*, the directory; whether force was needed.

        That is: SIGKILL, or any signal for a critical program.
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
            self.log(f"processes {numbers} cannot be seen from here, and are left as they are")
        return self._used_force

    def _scan(self, left: dict[Survivor, ReapTarget]) -> bool:
        """One look at everybody; whether anybody is left to wait for."""
        for survivor, patient in list(left.items()):
            if survivor.alive and not patient.given_up:
                self._escalate(patient, survivor)
            else:
                self._record_end(survivor, patient)
                survivor.close()
                del left[survivor]
        self._end_strays((*left, *self._spared))
        waiting = [*left.values(), *(p for p in self._strays.values() if not p.given_up)]
        if waiting:
            self._report_waiting(waiting)
        return bool(waiting)

    def _report_waiting(self, waiting: Sequence[ReapTarget]) -> None:
        now = time.monotonic()
        last = max(waiting, key=lambda patient: patient.deadline)
        seconds = max(0.0, last.deadline - now)
        doing = "ends" if last.escalation else "waits for"
        more = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        whom = f"{doing} {last.name}{more}"
        if self.report is None or (whom == self._reported and now < self._report_at):
            return
        self.report(f"{whom}, {format_duration(round(seconds))} left", seconds)
        self._report_at, self._reported = (
            now + min(REPORT_INTERVAL, max(seconds, KILL_TIMEOUT) / 3),
            whom,
        )

    def _survivors(self, operations: Path) -> Iterator[Survivor]:
        for directory in sorted(operations.iterdir()) if operations.is_dir() else ():
            try:
                survivor = find_survivor(directory)
            except (RecordDamaged, OSError) as error:
                # Who it was cannot be told, and a guess could hit anybody.
                self.log(f"operation {directory.name} is left alone: {error}")
                continue
            if survivor is not None and survivor.alive:
                yield survivor
            elif survivor is not None:
                survivor.close()

    def _make_target(self, survivor: Survivor) -> ReapTarget:
        what = survivor.assignment
        budget = min(survivor.remaining(), self.wait) if what.critical else 0.0
        name = f"{what.action} of operation {survivor.directory.name}"
        if budget:
            self.log(f"{name} is critical: it may go on for {format_duration(round(budget))}")
        return ReapTarget(name, what.critical, survivor.signal, time.monotonic() + budget)

    def _escalate(self, patient: ReapTarget, survivor: Survivor | None) -> None:
        """The next stronger measure, if it is time."""
        if time.monotonic() < patient.deadline:
            return
        patient.escalation += 1
        if patient.escalation == 1:
            self._send(patient, signal.SIGTERM, self.term)
        elif patient.escalation == _KILL:
            self._send(patient, signal.SIGKILL, KILL_TIMEOUT)
        elif patient.escalation == _PARENT and survivor is not None:
            survivor.kill_parent()
            patient.deadline = time.monotonic() + KILL_TIMEOUT
        elif not patient.given_up:
            patient.given_up = True
            self.log(f"{patient.name} does not end: it is left as it is")

    def _send(self, patient: ReapTarget, number: signal.Signals, timeout: float) -> None:
        patient.deadline = time.monotonic() + timeout
        if patient.signal(number):
            patient.last_signal = number
            self._used_force |= patient.critical or number is signal.SIGKILL
            self.log(f"{patient.name} gets {number.name}")

    def _record_end(self, survivor: Survivor, patient: ReapTarget) -> None:
        if not patient.last_signal:
            self.log(f"{patient.name} has ended by itself")
            return
        try:
            survivor.record_end(patient.last_signal)
        except (RecordDamaged, OSError) as error:
            self.log(f"how {patient.name} ended could not be noted: {error}")

    def _end_strays(self, known: Sequence[Survivor]) -> None:
        """End who else is in the control group."""
        if self.cgroup is None:
            return
        found = {
            Identity(process.pid, process.started): process
            for process in members_of(self.cgroup)
            if process.alive and not _belongs_to_survivor(process, known)
        }
        self._strays = {each: self._strays[each] for each in found if each in self._strays}
        for identity, process in found.items():
            patient = self._strays.get(identity)
            if patient is None:
                patient = self._make_stray_target(process)
                self._strays[identity] = patient
            self._escalate(patient, None)

    def _make_stray_target(self, process: Process) -> ReapTarget:
        def signal_it(number: int) -> bool:
            return send_signal(process, number)

        return ReapTarget(f"{process.name} (pid {process.pid})", False, signal_it, -math.inf)  # noqa: FBT003 plain fields


def _belongs_to_survivor(process: Process, known: Sequence[Survivor]) -> bool:
    """Whether *process* is part of a program of *known*, which deal with their own.

    By descent and process group; and by what it was told of its operation, for a helper that
    has left both: to end it would tear the program that relies on it.
    """
    pids = {pid for each in known for pid in (each.record.program.pid, each.record.parent.pid)}
    return belongs_to(process, pids) or any(
        has_operation_variable(process, each.directory) for each in known
    )
