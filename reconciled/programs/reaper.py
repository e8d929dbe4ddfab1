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
from reconciled.programs.cgroup import belongs, hidden_in, members_of
from reconciled.programs.processes import Process
from reconciled.programs.program_records import Damaged, Identity
from reconciled.programs.survivors import KILL_TAKES, POLL, Survivor, find, is_of, send

Tell = Callable[[str], None]
# Whom this waits for, for people, and for how many seconds it does so at most before the next
# measure. Called as long as it waits, at least every third of those seconds, and when it waits
# for somebody else.
Report = Callable[[str, float], None]
REPORT_EVERY = 5.0
_KILL, _PARENT = 2, 3


@attrs.define(eq=False)
class Patient:
    """Somebody who is left, and when patience with them ends next, in monotonic seconds."""

    name: str
    critical: bool
    signal: Callable[[int], bool]
    until: float
    measure: int = 0  # how far they had to be pressed: 1 SIGTERM, 2 SIGKILL, 3 the parent too
    got: int = 0  # the last signal that reached somebody
    given_up: bool = False


@attrs.define(eq=False)
class Reaper:
    """One pass over what a daemon left running.

    group    the control group whose other processes are ended too; None: none are
    report   told while somebody is waited for
    adopted  operations whose critical programs somebody else waits for: they are left alone
    """

    wait: float
    term: float
    tell: Tell
    group: Path | None = None
    report: Report | None = None
    adopted: frozenset[str] = frozenset()
    _killed: bool = attrs.field(default=False, init=False)
    _strays: dict[Identity, Patient] = attrs.field(factory=dict, init=False)
    _spared: list[Survivor] = attrs.field(factory=list, init=False)
    _report_at: float = attrs.field(default=-math.inf, init=False)
    _reported: str = attrs.field(default="", init=False)

    def reap(self, operations: Path) -> bool:
        """See to everybody of *operations*, the directory; whether force was needed.

        That is: SIGKILL, or any signal for a critical program.
        """
        left: dict[Survivor, Patient] = {}
        for survivor in self._survivors(operations):
            if survivor.assignment.critical and survivor.directory.name in self.adopted:
                self._spared.append(survivor)
            else:
                left[survivor] = self._patient(survivor)
        try:
            while self._pass(left):
                time.sleep(POLL)
        finally:
            for survivor in (*left, *self._spared):
                survivor.close()
        hidden = hidden_in(self.group) if self.group else []
        if hidden:
            numbers = ", ".join(map(str, hidden))
            self.tell(f"processes {numbers} cannot be seen from here, and are left as they are")
        return self._killed

    def _pass(self, left: dict[Survivor, Patient]) -> bool:
        """One look at everybody; whether anybody is left to wait for."""
        for survivor, patient in list(left.items()):
            if survivor.alive and not patient.given_up:
                self._press(patient, survivor)
            else:
                self._note(survivor, patient)
                survivor.close()
                del left[survivor]
        self._see_to_strays((*left, *self._spared))
        waiting = [*left.values(), *(p for p in self._strays.values() if not p.given_up)]
        if waiting:
            self._tell_waiting(waiting)
        return bool(waiting)

    def _tell_waiting(self, waiting: Sequence[Patient]) -> None:
        now = time.monotonic()
        last = max(waiting, key=lambda patient: patient.until)
        seconds = max(0.0, last.until - now)
        doing = "ends" if last.measure else "waits for"
        more = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        whom = f"{doing} {last.name}{more}"
        if self.report is None or (whom == self._reported and now < self._report_at):
            return
        self.report(f"{whom}, {format_duration(round(seconds))} left", seconds)
        self._report_at, self._reported = (
            now + min(REPORT_EVERY, max(seconds, KILL_TAKES) / 3),
            whom,
        )

    def _survivors(self, operations: Path) -> Iterator[Survivor]:
        for directory in sorted(operations.iterdir()) if operations.is_dir() else ():
            try:
                survivor = find(directory)
            except (Damaged, OSError) as error:
                # Who it was cannot be told, and a guess could hit anybody.
                self.tell(f"operation {directory.name} is left alone: {error}")
                continue
            if survivor is not None and survivor.alive:
                yield survivor
            elif survivor is not None:
                survivor.close()

    def _patient(self, survivor: Survivor) -> Patient:
        what = survivor.assignment
        budget = min(survivor.remaining(), self.wait) if what.critical else 0.0
        name = f"{what.action} of operation {survivor.directory.name}"
        if budget:
            self.tell(f"{name} is critical: it may go on for {format_duration(round(budget))}")
        return Patient(name, what.critical, survivor.signal, time.monotonic() + budget)

    def _press(self, patient: Patient, survivor: Survivor | None) -> None:
        """The next stronger measure, if it is time."""
        if time.monotonic() < patient.until:
            return
        patient.measure += 1
        if patient.measure == 1:
            self._send(patient, signal.SIGTERM, self.term)
        elif patient.measure == _KILL:
            self._send(patient, signal.SIGKILL, KILL_TAKES)
        elif patient.measure == _PARENT and survivor is not None:
            survivor.kill_parent()
            patient.until = time.monotonic() + KILL_TAKES
        elif not patient.given_up:
            patient.given_up = True
            self.tell(f"{patient.name} does not end: it is left as it is")

    def _send(self, patient: Patient, number: signal.Signals, patience: float) -> None:
        patient.until = time.monotonic() + patience
        if patient.signal(number):
            patient.got = number
            self._killed |= patient.critical or number is signal.SIGKILL
            self.tell(f"{patient.name} gets {number.name}")

    def _note(self, survivor: Survivor, patient: Patient) -> None:
        if not patient.got:
            self.tell(f"{patient.name} has ended by itself")
            return
        try:
            survivor.note_end(patient.got)
        except (Damaged, OSError) as error:
            self.tell(f"how {patient.name} ended could not be noted: {error}")

    def _see_to_strays(self, known: Sequence[Survivor]) -> None:
        """End who else is in the control group."""
        if self.group is None:
            return
        found = {
            Identity(process.pid, process.started): process
            for process in members_of(self.group)
            if process.alive and not _is_of_one(process, known)
        }
        self._strays = {each: self._strays[each] for each in found if each in self._strays}
        for identity, process in found.items():
            patient = self._strays.get(identity)
            if patient is None:
                patient = self._stray(process)
                self._strays[identity] = patient
            self._press(patient, None)

    def _stray(self, process: Process) -> Patient:
        def signal_it(number: int) -> bool:
            return send(process, number)

        return Patient(f"{process.name} (pid {process.pid})", False, signal_it, -math.inf)  # noqa: FBT003 plain fields


def _is_of_one(process: Process, known: Sequence[Survivor]) -> bool:
    """Whether *process* is part of a program of *known*, which deal with their own.

    By descent and process group; and by what it was told of its operation, for a helper that
    has left both: to end it would tear the program that relies on it.
    """
    pids = {pid for each in known for pid in (each.record.program.pid, each.record.parent.pid)}
    return belongs(process, pids) or any(is_of(process, each.directory) for each in known)
