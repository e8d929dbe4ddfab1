"""The registry of programs that this process has started and not yet reaped, with their owners.

1. The thread that forks a child registers it, and it stays registered until it is reaped: a
   cancellation can end the caller, but never loses the child.
2. The leader of a process group is reaped after the rest of the group has ended. Until then it
   keeps the group's number, so a signal to the group cannot reach an unrelated process.
3. A lock excludes signalling during reaping: the last resort signals from another thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import trio

from reconciled.programs.processes import (
    Process,
    all_processes,
    descendants_of,
    find_process,
    is_child_subreaper,
)

# Starting a program blocks a thread for 1-3 ms, most of it in the kernel: more threads than
# this do not start programs faster.
START_THREADS = 4


@attrs.frozen
class Owner:
    """The task that a program is started for."""

    program: str
    task: str
    critical: bool


class ProgramHandle(Protocol):
    """The leader of a process group, and the source of its exit status."""

    @property
    def pid(self) -> int:
        """Its pid, which is also the process group's id."""

    @property
    def started(self) -> int:
        """Start time in clock ticks after boot; identifies it together with the pid."""

    @property
    def supervisor(self) -> int:
        """The pid of its small parent; 0 if it has none."""

    @property
    def ended(self) -> bool:
        """Whether it has ended and its status is known. Does not reap it. For the event loop."""

    @property
    def holds_pgid(self) -> bool:
        """Whether the group's id certainly still belongs to the program."""

    async def wait(self) -> None:
        """Return when ``ended`` may have changed; a cancellation does not affect the program."""

    async def release(self) -> None:
        """Make any supervisor reap it, which frees the pid; the group must have ended."""

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal: one is None, or both if the status was lost."""

    def abandon(self) -> None:
        """Close all descriptors for it."""


@attrs.define(eq=False)
class Child:
    """One program that this process started, leader of a process group of its own."""

    program: str  # argument 0 only: the others may hold secrets
    owner: str  # the task that runs it
    critical: bool
    handle: ProgramHandle = attrs.field(repr=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)
    _reaped: bool = attrs.field(default=False, init=False)

    def __repr__(self) -> str:
        kind = "critical " if self.critical else ""
        return f"<Child {self.program} ({kind}pid {self.pid}) of {self.owner}>"

    @property
    def pid(self) -> int:
        """The pid of the program, and the id of its group."""
        return self.handle.pid

    @property
    def started(self) -> int:
        """Start time in clock ticks after boot; identifies it together with the pid."""
        return self.handle.started

    @property
    def ended(self) -> bool:
        """Whether the program itself has ended. Does not reap it."""
        with self._lock:
            return self._reaped or self.handle.ended

    async def wait(self) -> None:
        """Return when the program itself may have ended; a cancellation does not affect it."""
        await self.handle.wait()

    def members(self) -> list[Process]:
        """The live processes of its group besides the program itself."""
        found = descendants_of(os.getpid()) if is_child_subreaper() else all_processes()
        return [p for p in found if p.group == self.pid and p.pid != self.pid and p.alive]

    def signal_group(self, number: int) -> bool:
        """Send *number* to the whole group; False if no process is left to receive it."""
        with self._lock:
            if self._reaped or not self.handle.holds_pgid:
                return False
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):  # the second: set-uid programs only
                return False
            return True

    def retire(self) -> None:
        """Rule out further signals to the group; the program has ended. May be repeated.

        Kills processes that were forked in the group since the last scan.
        """
        if self.signal_group(signal.SIGKILL):
            self._reap_members()
        with self._lock:
            self._reaped = True

    async def release(self) -> None:
        """Retire it, and make its small parent, if any, reap it.

        A cancellation leaves that in progress; reap() does not depend on it.
        """
        self.retire()
        await self.handle.release()

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal of the program: one is None, or both if the status was lost.

        The program must have ended. Its pid may be reused afterwards.
        """
        self.retire()
        return self.handle.reap()

    def abandon(self) -> None:
        """Give up a program that SIGKILL did not end; once it ends, the orphan reaper reaps it."""
        with self._lock:
            self._reaped = True
        self.handle.abandon()

    def _reap_members(self) -> None:
        # Members whose parent ended are children of this process if it adopts orphans. Their
        # statuses are not needed, so they are reaped here and not by the orphan reaper.
        for process in descendants_of(os.getpid()):
            if process.group == self.pid != process.pid and process.parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)


@attrs.define(eq=False)
class DirectHandle:
    """A program that is a direct child of this process: its exit status comes from the kernel."""

    pid: int
    started: int
    _pidfd: int
    _popen: subprocess.Popen[bytes]
    supervisor: int = attrs.field(default=0, init=False)
    holds_pgid: bool = attrs.field(default=True, init=False)  # unreaped, so not reused

    @classmethod
    def from_popen(cls, popen: subprocess.Popen[bytes]) -> DirectHandle:
        """Watch *popen*. Raises OSError when descriptors have run out; *popen* is killed then."""
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError:
            # It may run for ever, and its end could not be observed.
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            raise
        process = find_process(popen.pid)
        return cls(popen.pid, 0 if process is None else process.started, pidfd, popen)

    @property
    def ended(self) -> bool:
        """Whether it has ended. Does not reap it."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PIDFD, self._pidfd, options) is not None
        except ChildProcessError:
            return True  # other code took its status: reap() returns no status

    async def wait(self) -> None:
        """Return when it has ended."""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def release(self) -> None:
        """Does nothing: it has no supervisor. No checkpoint."""

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal; both None if other code took its status."""
        try:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            status = None
        self.abandon()
        if status is None:
            return None, None
        if status.si_code == os.CLD_EXITED:
            return status.si_status, None
        return None, status.si_status

    def abandon(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)
        # The status is read without Popen, whose wait() reports a lost status as 0. Without this
        # Popen would warn, and poll a pid that may be reused.
        self._popen.returncode = 0


@attrs.frozen
class RemainingProcess:
    """A live descendant of this process; child is None if it left the groups of owned programs."""

    process: Process
    child: Child | None

    def __str__(self) -> str:
        whose = "no owner" if self.child is None else f"of {self.child.owner}"
        return f"{self.process.name} (pid {self.process.pid}), {whose}"


@attrs.define(eq=False)
class Children:
    """The registry of one trio run; made by current_children()."""

    limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(START_THREADS))
    # Pids of small parents: each belongs to the child that it supervises and is not one itself.
    supervisors: set[int] = attrs.field(factory=set, init=False)
    # Ids of operations that run a program.
    operations: set[str] = attrs.field(factory=set, init=False)
    # Applied to each quotation of output: removes secrets from a text.
    redact: Callable[[str], str] = attrs.field(default=str, init=False)
    _owned: dict[int, Child] = attrs.field(factory=dict, init=False)

    def start(self, start: Callable[[], ProgramHandle], owner: Owner) -> Child:
        """Start a program and register it. Blocks: call it in a thread that is not abandoned.

        Raises what *start* raises; *start* must not leave a program running then.
        """
        child = Child(owner.program, owner.task, owner.critical, start())
        self._owned[child.pid] = child
        return child

    def forget(self, child: Child) -> None:
        """Remove *child*, which was reaped or abandoned."""
        self._owned.pop(child.pid, None)
        self.supervisors.discard(child.handle.supervisor)

    def owned(self) -> list[Child]:
        """The owned children; safe in any thread, since copying a dict's values is atomic."""
        return list(self._owned.values())

    def owns(self, pid: int) -> bool:
        """Whether *pid* is a registered child or its small parent, which an owner waits for."""
        return pid in self._owned or pid in self.supervisors

    def end_all(self, number: int = signal.SIGKILL, *, critical: bool = False) -> list[Child]:
        """Signal the groups of all ordinary children, and with *critical* of all others.

        For any thread, in particular the last resort's: it neither waits nor needs the event
        loop. Returns the children that were signalled.
        """
        chosen = [child for child in self.owned() if critical or not child.critical]
        return [child for child in chosen if child.signal_group(number)]

    def remaining(self) -> list[RemainingProcess]:
        """The live descendants of this process, for the stop report; for any thread.

        Complete only in a process that adopts orphans (see orphan_reaper.become_subreaper()).
        """
        return [
            RemainingProcess(process, self._owned.get(process.group))
            for process in descendants_of(os.getpid())
            if process.alive and process.pid not in self.supervisors
        ]


def current_children() -> Children:
    """The registry of the current trio run; made at the first call."""
    try:
        return _CHILDREN.get()
    except LookupError:
        children = Children()
        _CHILDREN.set(children)
        return children


_CHILDREN: trio.lowlevel.RunVar[Children] = trio.lowlevel.RunVar("reconciled.programs.children")


@contextlib.contextmanager
def unblocked_signals() -> Iterator[None]:
    """Unblock all signals in this thread, and so in processes that it forks meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
