"""Reaping what nobody owns: zombies of processes that our programs left behind.

1. Nobody's exit status is taken: a zombie is reaped only if no owner, and no live object in
   this process, claims it, in two looks at least LOOKS_APART seconds apart. That interval
   also covers a fork which is just being registered.
2. What escaped its group is reported once, never killed: it may be meant to stay.

Rejected: waitpid(-1), which steals the status of children that others wait for, and reports
theirs as 0; and SIGCHLD set to SIG_IGN, which does so for all of them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import trio

from reconciled.programs.children import Children
from reconciled.programs.processes import Process, children_of, set_child_subreaper

SCAN_INTERVAL = 0.5
# A burst of SIGCHLD is one look.
DEBOUNCE = 0.05
# A claimed zombie is somebody's business: to look for the claim costs 10-30 ms.
CLAIM_TTL = 30.0

Identity = tuple[int, int]  # pid and start time


def become_subreaper() -> None:
    """Make this process the one that orphans below it fall to, and exit statuses reliable.

    Called once, in the main thread, before any program is started. Raises OSError.

    A parent that ignores SIGCHLD gives that to us, and then the kernel drops every exit
    status. Other ignored signals would be handed down to our programs, which could then not
    be told to end; Python itself ignores SIGPIPE and SIGXFSZ, and undoes that when it forks.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(OSError):  # taken by the C library
                signal.signal(number, signal.SIG_DFL)
    set_child_subreaper()


@attrs.define(eq=False)
class OrphanReaper:
    """The service that reaps them. The host calls look() at each SIGCHLD, in the loop."""

    children: Children
    log: Any  # with structlog's interface: info(event, **fields)
    clock: Callable[[], float] = trio.current_time
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Unclaimed zombies, with the time of the first look.
    _suspects: dict[Identity, float] = attrs.field(factory=dict, init=False)
    # Zombies that a live object claims, with the time of the claim.
    _claimed: dict[Identity, float] = attrs.field(factory=dict, init=False)
    _unowned: dict[Identity, float] = attrs.field(factory=dict, init=False)
    _reported: set[Identity] = attrs.field(factory=set, init=False)

    def request_scan(self) -> None:
        """Some child changed: have a look soon. Cheap, and harmless when it was none of ours."""
        self._wake.set()

    async def reap(self) -> None:
        """The service task: reap orphans until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._scan():  # noqa: ASYNC110 time itself is what the second look waits for
                await trio.sleep(SCAN_INTERVAL)
            await trio.sleep(DEBOUNCE)

    def _scan(self) -> bool:
        """Look once; whether to look again soon."""
        now = self.clock()
        found = {(p.pid, p.started): p for p in children_of(os.getpid())}
        for past in (self._suspects, self._claimed, self._unowned):
            for identity in past.keys() - found.keys():
                del past[identity]
        self._reported &= found.keys()
        due = []
        for identity, process in found.items():
            first = self._first_seen(identity, process, now)
            if first is not None and now - first >= SCAN_INTERVAL:
                due.append(process)
        if due:
            claims = _claims({process.pid for process in due})
            for process in due:
                self._handle_due(process, now, claimed=process.pid in claims)
        return bool(self._suspects or self._unowned)

    def _first_seen(self, identity: Identity, process: Process, now: float) -> float | None:
        """When this process was first seen without an owner; None while it has one."""
        if self.children.owns(process.pid):
            return None
        if not process.alive:
            self._unowned.pop(identity, None)
            if now - self._claimed.get(identity, -CLAIM_TTL) < CLAIM_TTL:
                return None
            return self._suspects.setdefault(identity, now)
        # In our own group: a helper of this process, such as multiprocessing's.
        if process.group == os.getpgrp() or self.children.owns(process.group):
            return None
        if identity in self._reported:
            return None
        return self._unowned.setdefault(identity, now)

    def _handle_due(self, process: Process, now: float, *, claimed: bool) -> None:
        identity = (process.pid, process.started)
        if process.alive:
            del self._unowned[identity]
            self._reported.add(identity)
            if not claimed:
                self.log.info(
                    "program.detached",
                    pid=process.pid,
                    program=process.name,
                    session=process.session,
                )
            return
        del self._suspects[identity]
        if claimed:
            self._claimed[identity] = now
            return
        self._claimed.pop(identity, None)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)


def _claims(pids: Iterable[int]) -> set[int]:
    """Those of *pids* that an object of this process waits for.

    Plugins start programs by subprocess, trio, asyncio or multiprocessing: at the bottom of
    each is an object of a class named Popen that has a pid and no returncode yet. Its
    attributes are read past its properties, which might reap.
    """
    wanted = set(pids)
    claims = set()
    for thing in gc.get_objects():
        if type(thing).__name__ in ("Popen", "Process"):
            known = getattr(thing, "__dict__", {})
            if known.get("pid") in wanted and known.get("returncode") is None:
                claims.add(known["pid"])
    return claims
