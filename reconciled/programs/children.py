"""The registry of programs that this process has started and not yet reaped, with their owners.

1. The thread that forks a child registers it, and it stays registered until it is reaped: a
   cancellation can end the caller, but never loses the child.
2. Each program has a small parent, which leads its session. Members are signalled as ``members``
   finds them, through descriptors, so a signal cannot reach an unrelated process.
3. A program that was given up stays registered as long as its small parent lives: the report of a
   stop names its members.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import attrs
import trio

from reconciled.programs.processes import (
    Process,
    descendants_of,
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
    """A program below its small parent, and the source of its exit status."""

    @property
    def pid(self) -> int:
        """Its pid."""

    @property
    def started(self) -> int:
        """Start time in clock ticks after boot; identifies it together with the pid."""

    @property
    def supervisor(self) -> int:
        """The pid of its small parent, which is the id of its session."""

    @property
    def ended(self) -> bool:
        """Whether it has ended and its status is known. Does not reap it. For the event loop."""

    def members(self) -> list[Process]:
        """The living members of its session, the program included."""

    def signal(self, number: int) -> bool:
        """Send *number* to every member; False if none received it. For any thread."""

    async def wait(self) -> None:
        """Return when ``ended`` may have changed; a cancellation does not affect the program."""

    async def release(self) -> None:
        """Make its small parent end what is left and exit, and wait for that."""

    async def wait_gone(self) -> None:
        """Return when the small parent has ended, which outlives every member."""

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal: one is None, or both if the status was lost."""

    def abandon(self) -> None:
        """Close all descriptors for it."""


@attrs.define(eq=False)
class Child:
    """One program that this process started, with the session that it runs in."""

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
        """The pid of the program."""
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
        """The living members of its session, the program included."""
        return self.handle.members()

    def signal(self, number: int) -> bool:
        """Send *number* to every member; False if none received it. For any thread."""
        with self._lock:
            return not self._reaped and self.handle.signal(number)

    async def release(self) -> None:
        """Make its small parent end every member and exit.

        A cancellation leaves that in progress; reap() does not depend on it.
        """
        await self.handle.release()

    async def wait_gone(self) -> None:
        """Return when no member is left. A cancellation ends the wait only."""
        await self.handle.wait_gone()

    def reap(self) -> tuple[int | None, int | None]:
        """Exit code and signal of the program: one is None, or both if the status was lost.

        The program must have ended. Its pid may be reused afterwards.
        """
        with self._lock:
            self._reaped = True
        return self.handle.reap()

    def abandon(self) -> None:
        """Give up a program that SIGKILL did not end; once it ends, the orphan reaper reaps it."""
        with self._lock:
            self._reaped = True
        self.handle.abandon()


@attrs.frozen
class RemainingProcess:
    """A live descendant of this process; child is None if it is a member of no program.

    detached  it has a session of its own and no owner
    """

    process: Process
    child: Child | None
    detached: bool = False

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
    # Given up while members were alive, by the small parent's pid.
    _given_up: dict[int, Child] = attrs.field(factory=dict, init=False)

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
        if child.members():
            self._given_up[child.handle.supervisor] = child
        else:
            self._given_up.pop(child.handle.supervisor, None)
            self.supervisors.discard(child.handle.supervisor)

    def given_up(self, owner: str) -> list[Child]:
        """The children of task *owner* that were given up and have living members."""
        return [
            child for child in self._given_up.values() if child.owner == owner and child.members()
        ]

    def owned(self) -> list[Child]:
        """The owned children; safe in any thread, since copying a dict's values is atomic."""
        return list(self._owned.values())

    def owns(self, pid: int) -> bool:
        """Whether *pid* is a registered child or its small parent, which an owner waits for."""
        return pid in self._owned or (pid in self.supervisors and pid not in self._given_up)

    def end_all(self, number: int = signal.SIGKILL, *, critical: bool = False) -> list[Child]:
        """Signal the members of all ordinary children, and with *critical* of all others.

        For any thread, in particular the last resort's: it neither waits nor needs the event
        loop. Returns the children that were signalled.
        """
        chosen = [child for child in self.owned() if critical or not child.critical]
        return [child for child in chosen if child.signal(number)]

    def remaining(self) -> list[RemainingProcess]:
        """The live descendants of this process, for the stop report; for any thread.

        Complete only in a process that adopts orphans (see orphan_reaper.become_subreaper()).
        """
        children = {child.handle.supervisor: child for child in self.owned()} | self._given_up
        members = {process.pid: child for child in children.values() for process in child.members()}
        return [
            RemainingProcess(
                process,
                members.get(process.pid),
                process.pid not in members and process.session != os.getsid(0),
            )
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
