"""The programs that this process has started and not yet reaped: who they are, who owns them.

1. A child is in the registry from the thread that forked it until it is reaped: a
   cancellation can lose the caller, never the child.
2. The leader of a group is reaped after its group is dealt with. Until then it holds the
   number of the group, so that a signal to the group cannot reach a stranger.
3. Signalling and reaping exclude each other by a lock: the last resort is another thread.
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

# Starting a program blocks a thread for 1-3 ms, of which most is the kernel's: more threads
# than this do not start more programs.
START_THREADS = 4


@attrs.frozen
class Owner:
    """For whom a program is started."""

    program: str
    task: str
    critical: bool


class ProgramHandle(Protocol):
    """The program at the head of a group, and whoever tells how it ended."""

    @property
    def pid(self) -> int:
        """Its number, and the group's."""

    @property
    def started(self) -> int:
        """Clock ticks after boot: with the pid, its identity."""

    @property
    def supervisor(self) -> int:
        """The process of ours that stands over it; 0 where none does."""

    @property
    def ended(self) -> bool:
        """Whether it has ended, and how is known; it is not reaped by looking. In the loop."""

    @property
    def holds_pgid(self) -> bool:
        """Whether the number of the group is certainly still the program's."""

    async def wait(self) -> None:
        """Return when something has changed; a cancellation leaves the program alone."""

    async def release(self) -> None:
        """Have whoever else holds the number give it back; the group is over."""

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal; one of them, or none where that was lost."""

    def abandon(self) -> None:
        """Close everything that leads to it."""


@attrs.define(eq=False)
class Child:
    """One program of ours, leader of a process group of its own."""

    program: str  # argument 0; never the others, which may hold secrets
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
        """Of the program itself, and of its group."""
        return self.handle.pid

    @property
    def started(self) -> int:
        """Clock ticks after boot: with the pid, its identity."""
        return self.handle.started

    @property
    def ended(self) -> bool:
        """Whether the program itself has ended; it is not reaped by looking."""
        with self._lock:
            return self._reaped or self.handle.ended

    async def wait(self) -> None:
        """Return when the program itself may have ended; a cancellation leaves it alone."""
        await self.handle.wait()

    def members(self) -> list[Process]:
        """What lives in its group besides the program itself."""
        found = descendants_of(os.getpid()) if is_child_subreaper() else all_processes()
        return [p for p in found if p.group == self.pid and p.pid != self.pid and p.alive]

    def signal_group(self, number: int) -> bool:
        """Send *number* to the whole group; False where nobody is left to get it."""
        with self._lock:
            if self._reaped or not self.handle.holds_pgid:
                return False
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):  # the second: set-uid programs only
                return False
            return True

    def retire(self) -> None:
        """Signal the group no more; the program has ended. Harmless when repeated.

        Kills what may have appeared in the group since it was looked at.
        """
        if self.signal_group(signal.SIGKILL):
            self._reap_members()
        with self._lock:
            self._reaped = True

    async def release(self) -> None:
        """Retire it, and have its number given back by whoever else holds it.

        When cancelled, that is under way; reap() does not depend on it.
        """
        self.retire()
        await self.handle.release()

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal of the program; one of them, or none if its status was lost.

        The number is free afterwards. The program must have ended.
        """
        self.retire()
        return self.handle.reap()

    def abandon(self) -> None:
        """Give up a program that not even SIGKILL ends; when it does end, it is an orphan."""
        with self._lock:
            self._reaped = True
        self.handle.abandon()

    def _reap_members(self) -> None:
        # Members whose parent died became our own children if we adopt orphans: their
        # statuses interest nobody, and they need not wait for the reaper.
        for process in descendants_of(os.getpid()):
            if process.group == self.pid != process.pid and process.parent == os.getpid():
                with contextlib.suppress(ChildProcessError):
                    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)


@attrs.define(eq=False)
class DirectHandle:
    """A program that this process itself has started: its exit status comes from the kernel."""

    pid: int
    started: int
    _pidfd: int
    _popen: subprocess.Popen[bytes]
    supervisor: int = attrs.field(default=0, init=False)
    holds_pgid: bool = attrs.field(default=True, init=False)  # unreaped: nobody else gets it

    @classmethod
    def from_popen(cls, popen: subprocess.Popen[bytes]) -> DirectHandle:
        """Watch *popen*. Raises OSError when descriptors have run out; then it was ended."""
        try:
            pidfd = os.pidfd_open(popen.pid)
        except OSError:
            # It may live for ever and we could not watch it: it must not stay.
            os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
            raise
        process = find_process(popen.pid)
        return cls(popen.pid, 0 if process is None else process.started, pidfd, popen)

    @property
    def ended(self) -> bool:
        """Whether it has ended; it is not reaped by looking."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PIDFD, self._pidfd, options) is not None
        except ChildProcessError:
            return True  # somebody took its status: reap() says so

    async def wait(self) -> None:
        """Return when it has ended."""
        await trio.lowlevel.wait_readable(self._pidfd)

    async def release(self) -> None:
        """Nobody else holds its number. No checkpoint."""

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal; none if somebody else took its status."""
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
        """Close what leads to it."""
        os.close(self._pidfd)
        # We wait past its back (its own wait() reads a lost status as 0): without this it
        # would warn, and go on polling a number that is no longer ours.
        self._popen.returncode = 0


@attrs.frozen
class RemainingProcess:
    """A descendant of ours that is still there; escaped if it left the group it was born in."""

    process: Process
    child: Child | None

    def __str__(self) -> str:
        whose = "nobody's" if self.child is None else f"of {self.child.owner}"
        return f"{self.process.name} (pid {self.process.pid}), {whose}"


@attrs.define(eq=False)
class Children:
    """The registry of one run of trio; made by current_children()."""

    limiter: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(START_THREADS))
    # Small parents over programs of operations: part of the child below them, never a child.
    supervisors: set[int] = attrs.field(factory=set, init=False)
    operations: set[str] = attrs.field(factory=set, init=False)  # ids of those that run one
    # What is quoted of their output goes through it: text in, text without secrets out.
    redact: Callable[[str], str] = attrs.field(default=str, init=False)
    _owned: dict[int, Child] = attrs.field(factory=dict, init=False)

    def start(self, start: Callable[[], ProgramHandle], owner: Owner) -> Child:
        """Start a program, and own it. Blocks: for a thread that is not abandoned.

        Raises what *start* raises; then it must have left nothing running.
        """
        child = Child(owner.program, owner.task, owner.critical, start())
        self._owned[child.pid] = child
        return child

    def forget(self, child: Child) -> None:
        """*child* was reaped, or abandoned."""
        self._owned.pop(child.pid, None)
        self.supervisors.discard(child.handle.supervisor)

    def owned(self) -> list[Child]:
        """Who is owned now; safe in any thread, since copying a dict's values is atomic."""
        return list(self._owned.values())

    def owns(self, pid: int) -> bool:
        """Whether *pid* is a child with an owner who waits for it."""
        return pid in self._owned or pid in self.supervisors

    def end_all(self, number: int = signal.SIGKILL, *, critical: bool = False) -> list[Child]:
        """Signal the groups of all ordinary children, and of critical ones if asked to.

        For any thread, the last resort's above all: nothing here waits or needs the loop.
        Returns those that were signalled.
        """
        chosen = [child for child in self.owned() if critical or not child.critical]
        return [child for child in chosen if child.signal_group(number)]

    def remaining(self) -> list[RemainingProcess]:
        """Who still lives below this process, for the report of a stop; for any thread.

        Complete only for a process that adopts orphans (see orphans.become_reaper()).
        """
        return [
            RemainingProcess(process, self._owned.get(process.group))
            for process in descendants_of(os.getpid())
            if process.alive and process.pid not in self.supervisors
        ]


def current_children() -> Children:
    """The registry of the current run of trio; made when it is first asked for."""
    try:
        return _CHILDREN.get()
    except LookupError:
        children = Children()
        _CHILDREN.set(children)
        return children


_CHILDREN: trio.lowlevel.RunVar[Children] = trio.lowlevel.RunVar("reconciled.programs.children")


@contextlib.contextmanager
def unblocked_signals() -> Iterator[None]:
    """No blocked signals in this thread, and so none in what it forks meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
