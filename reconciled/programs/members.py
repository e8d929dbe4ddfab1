"""The members of one program's session, found and signalled by the daemon, ``reap`` or a start.

1. While the small parent lives, members are found below it; see ``small_parent``, which defines
   them. If it was killed, they are found by the number of its session and by RECONCILED_HANDLE in
   their environment: a session is the program's only if the program is in it, or a process that
   names the program's operation and attempt.
2. Each member is signalled through a descriptor, whatever its process group. The sender of the
   first signal records it before (``signalled``), after it has checked whether the program ended.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from reconciled.programs import small_parent
from reconciled.programs.processes import Process, all_processes, find_process
from reconciled.programs.program_records import Identity
from reconciled.programs.small_parent import Member


@attrs.define(eq=False)
class Members:
    """The session of *program* below its small parent *parent*.

    directory  of its records; None: it has none
    attempt    of the operation that *directory* is named after; 0: it belongs to none
    sender     who signals, for the record
    """

    parent: Identity
    program: Identity
    directory: Path | None
    attempt: int
    sender: str
    # The first signal from here, if the program had not ended before.
    interrupted_by: int | None = attrs.field(default=None, init=False)
    _detached: list[Member] | None = attrs.field(default=None, init=False)
    _sent: bool = attrs.field(default=False, init=False)

    def find(self) -> list[Process]:
        """The living members."""
        self._read_detached()
        if is_alive(self.parent):
            found = self._below_parent()
            # A list of children that shrinks while it is read may lack one.
            return found or self._below_parent()
        if self._is_gone():
            return []
        return list(self._without_parent())

    def signal(self, number: int) -> bool:
        """Send *number* to each member; False if none has received it. For any thread."""
        self._record_signal(number)
        sent = [
            small_parent.send_signal(process.pid, process.started, number)
            for process in self.find()
        ]
        return any(sent)

    def _below_parent(self) -> list[Process]:
        members, _ = small_parent.find_members(self.parent.pid, self._detached)
        found = [find_process(pid) for pid, _, _ in members]
        return [process for process in found if process is not None and process.alive]

    def _is_gone(self) -> bool:
        """Whether the small parent recorded that no member was left."""
        if self.directory is None:
            return False
        wanted = f"{self.parent.pid} {self.parent.started}\n"
        try:
            return (self.directory / small_parent.GONE).read_text("ascii") == wanted
        except (OSError, ValueError):
            return False

    def _without_parent(self) -> Iterator[Process]:
        """The members after the small parent was killed."""
        processes = [each for each in all_processes() if each.alive]
        named = {each.pid for each in processes if self._names_operation(each)}
        inside = [each for each in processes if each.session == self.parent.pid]
        if not any(self._is_program(each) or each.pid in named for each in inside):
            inside = []
        known = {each.pid for each in inside}
        known |= {each.pid for each in processes if self._is_program(each)}
        if self._detached is not None:
            # Orphaned by a signal of ours.
            known |= {
                each.pid
                for each in processes
                if each.pid in named
                and not small_parent.is_detached(
                    (each.pid, each.started, each.session), self._detached
                )
            }
        before = -1
        while before != len(known):
            before = len(known)
            known |= {each.pid for each in processes if each.parent in known}
        yield from (each for each in processes if each.pid in known)

    def _is_program(self, process: Process) -> bool:
        return Identity(process.pid, process.started) == self.program

    def _names_operation(self, process: Process) -> bool:
        """Whether its RECONCILED_HANDLE is the one of the attempt, wherever the state was then."""
        if not self.attempt or self.directory is None:
            return False
        begin = f"RECONCILED_HANDLE={self.attempt}:".encode()
        end = f"/{self.directory.name}".encode()
        try:
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return any(each.startswith(begin) and each.endswith(end) for each in variables)

    def _record_signal(self, number: int) -> None:
        if self._sent:
            return
        self._sent = True
        ended = not is_alive(self.program)
        self.interrupted_by = None if ended else number
        with self._open_directory() as directory:
            self._detached = small_parent.record_signal(
                directory, self.parent.pid, number, self.sender.encode(), ended=ended
            )

    def _read_detached(self) -> None:
        """Take over what an earlier sender recorded."""
        if self._detached is None and self.directory is not None:
            with self._open_directory() as directory:
                found = small_parent.read_signalled(directory) if directory >= 0 else None
            self._detached = None if found is None else found[2]

    @contextlib.contextmanager
    def _open_directory(self) -> Iterator[int]:
        """A descriptor of the records; -1 without them."""
        descriptor = -1
        if self.directory is not None:
            with contextlib.suppress(OSError):
                descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def is_alive(identity: Identity) -> bool:
    """Whether the process with this identity runs; False for a zombie."""
    process = find_process(identity.pid)
    return process is not None and process.started == identity.started and process.alive


def name_all(processes: list[Process]) -> str:
    """The names and pids of *processes*, for a message."""
    return ", ".join(f"{each.name} pid {each.pid}" for each in processes)
