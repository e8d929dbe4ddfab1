"""Ending what a dead daemon left running, or waiting for it: without a loop, and without trio.

1. Nobody is signalled by number alone: a program is known by its record (``survivors``), a
   stray by its place in the unit's own control group, and signalled through a descriptor.
2. A critical program has its own budget, at most *wait* of it; nothing below it is a stray.
3. Whoever is asked to end has *term* seconds before it is killed.
4. What was ended here and recorded by nobody is recorded as ended by that signal.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs

from reconciled.core.durations import format_duration
from reconciled.programs.processes import Process, look_up
from reconciled.programs.records import Damaged, Identity
from reconciled.programs.survivors import KILL_TAKES, POLL, Survivor, find, send

Tell = Callable[[str], None]
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
    """One pass of ``reconciled reap``.

    group  the control group whose other processes are ended too; None: none are
    """

    wait: float
    term: float
    tell: Tell
    group: Path | None = None
    _killed: bool = attrs.field(default=False, init=False)
    _strays: dict[Identity, Patient] = attrs.field(factory=dict, init=False)

    def reap(self, operations: Path) -> bool:
        """See to everybody of *operations*, the directory; whether force was needed.

        That is: SIGKILL, or any signal for a critical program.
        """
        left = {survivor: self._patient(survivor) for survivor in self._survivors(operations)}
        while True:
            for survivor, patient in list(left.items()):
                if survivor.alive and not patient.given_up:
                    self._press(patient, survivor)
                else:
                    self._note(survivor, patient)
                    survivor.close()
                    del left[survivor]
            if not self._see_to_strays(left) and not left:
                return self._killed
            time.sleep(POLL)

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

    def _see_to_strays(self, left: Iterable[Survivor]) -> bool:
        """End who else is in the control group; whether anybody is."""
        if self.group is None:
            return False
        spared = {survivor.record.program.pid for survivor in left}
        spared |= {survivor.record.parent.pid for survivor in left}
        found = {
            Identity(process.pid, process.started): process
            for process in members_of(self.group)
            if process.alive and not _belongs(process, spared)
        }
        self._strays = {each: self._strays[each] for each in found if each in self._strays}
        for identity, process in found.items():
            patient = self._strays.get(identity)
            if patient is None:
                patient = self._stray(process)
                self._strays[identity] = patient
            self._press(patient, None)
        return any(not patient.given_up for patient in self._strays.values())

    def _stray(self, process: Process) -> Patient:
        def signal_it(number: int) -> bool:
            return send(process, number)

        return Patient(f"{process.name} (pid {process.pid})", False, signal_it, -math.inf)  # noqa: FBT003 plain fields


def members_of(group: Path) -> Iterator[Process]:
    """Who is in the control group *group* or below it, without this process and those above it."""
    above = set(_line_of(os.getpid()))
    for file in sorted(group.rglob("cgroup.procs")):
        try:
            pids = [int(line) for line in file.read_text().split()]
        except OSError:  # the group went meanwhile
            continue
        for pid in pids:
            process = None if pid in above else look_up(pid)
            if process is not None:
                yield process


def own_group() -> Path | None:
    """The unit's control group, where this process is its control process; None: not known.

    A unit with delegation runs its control processes in a leaf of their own, ``.control``.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        place = path.removesuffix("/.control").strip("/")
        if number == "0" and place:
            group = Path("/sys/fs/cgroup") / place
            return group if (group / "cgroup.procs").exists() else None
    return None


def _belongs(process: Process, spared: set[int]) -> bool:
    """Whether *process* is, descends from, or is in the group of one of *spared*."""
    return process.group in spared or not spared.isdisjoint(_line_of(process.pid))


def _line_of(pid: int) -> Iterator[int]:
    """*pid*, its parent, and so on."""
    while pid > 0:
        yield pid
        process = look_up(pid)
        pid = 0 if process is None else process.parent
