"""Reaping orphans: zombies of processes that programs left behind and that have no owner.

1. A zombie is reaped only if two scans at least SCAN_INTERVAL seconds apart find that no owner
   and no live object in this process claims it. So no owner loses an exit status, and the
   interval also covers a fork that is not registered yet.
2. A process that left its group is reported once and never killed: it may be a daemon that is
   meant to continue.

Rejected: waitpid(-1), which steals the status of children that other code waits for and makes
that code read 0; and SIGCHLD set to SIG_IGN, which does so for all of them.
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
# A burst of SIGCHLD causes one scan.
DEBOUNCE = 0.05
# Seconds for which a claim on a zombie is not checked again: a check costs 10-30 ms.
CLAIM_TTL = 30.0

Identity = tuple[int, int]  # pid and start time


def become_subreaper() -> None:
    """Make this process adopt orphans below it, and make exit statuses reliable.

    Call it once, in the main thread, before any program is started. Raises OSError.

    This process inherits an ignored SIGCHLD from its parent, and then the kernel drops every exit
    status. Programs would inherit other ignored signals, such as SIGTERM, and could not be
    stopped by them. Python itself ignores SIGPIPE and SIGXFSZ, and restores them when it forks.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            with contextlib.suppress(OSError):  # reserved by the C library
                signal.signal(number, signal.SIG_DFL)
    set_child_subreaper()


@attrs.define(eq=False)
class OrphanReaper:
    """The service that reaps orphans. The daemon calls request_scan() at each SIGCHLD."""

    children: Children
    log: Any  # with structlog's interface: info(event, **fields)
    clock: Callable[[], float] = trio.current_time
    _wake: trio.Event = attrs.field(factory=trio.Event, init=False)
    # Unclaimed zombies, with the time of the first scan that found them.
    _suspects: dict[Identity, float] = attrs.field(factory=dict, init=False)
    # Zombies that a live object claims, with the time of the claim.
    _claimed: dict[Identity, float] = attrs.field(factory=dict, init=False)
    # Live processes without an owner, with the time of the first scan that found them.
    _unowned: dict[Identity, float] = attrs.field(factory=dict, init=False)
    _reported: set[Identity] = attrs.field(factory=set, init=False)

    def request_scan(self) -> None:
        """Scan soon, because some child changed. Cheap; a needless call is harmless."""
        self._wake.set()

    async def reap(self) -> None:
        """The service task: reap orphans until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._scan():  # noqa: ASYNC110 the second scan waits for time alone
                await trio.sleep(SCAN_INTERVAL)
            await trio.sleep(DEBOUNCE)

    def _scan(self) -> bool:
        """Scan once; whether another scan is due soon."""
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
        # In the daemon's own group: its own helper, such as multiprocessing's.
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

    Plugins may start programs by subprocess, trio, asyncio or multiprocessing: each uses an
    object of a class named Popen or Process that has a pid and no returncode yet. Its __dict__ is
    read, because its properties might reap.
    """
    wanted = set(pids)
    claims = set()
    for thing in gc.get_objects():
        if type(thing).__name__ in ("Popen", "Process"):
            known = getattr(thing, "__dict__", {})
            if known.get("pid") in wanted and known.get("returncode") is None:
                claims.add(known["pid"])
    return claims
