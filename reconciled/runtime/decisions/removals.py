"""Held removals and the permission for them, told through two small files a controller.

``STATE/removals/NAME.held`` says which removals wait; ``NAME.allow``, written by the ``allow``
verb with the daemon up or down, permits exactly the keys in it, once. A file of its own for
each side: neither ever writes what the other one wrote, and no socket is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncinotify
import attrs
import trio

from reconciled.core.removals import HeldRemovals
from reconciled.core.resources import Key
from reconciled.durability import replace
from reconciled.observe.bound_log import BoundLog

DIRECTORY = "removals"
LONGEST = 16 * 1024 * 1024
SHOWN = 20
_NOT_OURS = "{} is not what reconciled writes: remove it"
POLL_INTERVAL = 5.0  # seconds between looks for permits, where the kernel does not tell of them


@attrs.frozen
class PendingApproval:
    """What a person is asked to decide about."""

    controller: str
    keys: tuple[Key, ...]
    owned: int


def read_pending(state: Path, controller: str) -> PendingApproval | None:
    """The removals of *controller* that wait, as the daemon wrote them; None: nothing waits.

    Raises OSError, and ValueError for what the daemon did not write.
    """
    file = state / DIRECTORY / f"{controller}.held"
    data = _read(file)
    if data is None:
        return None
    owned = data.get("owned")
    if not isinstance(owned, int):
        raise ValueError(_NOT_OURS.format(file))  # noqa: TRY004 - it is the content that is wrong
    return PendingApproval(controller, tuple(Key(key) for key in data["keys"]), owned)


def write_approval(state: Path, held: PendingApproval) -> None:
    """Permit exactly what *held* shows; durable when this returns."""
    replace(
        state / DIRECTORY / f"{held.controller}.allow",
        json.dumps({"keys": list(held.keys)}).encode(),
    )


@attrs.define(eq=False)
class RemovalApprovals:
    """The daemon's side. allow(controller, keys) is called in the loop for each permit."""

    state: Path
    log: BoundLog
    on_approved: Callable[[str, frozenset[Key]], None]
    _reported: dict[str, tuple[Key, ...]] = attrs.field(factory=dict, init=False)

    @property
    def directory(self) -> Path:
        """Where both files are."""
        return self.state / DIRECTORY

    def prepare(self) -> None:
        """Make the directory; files of an earlier life stay until they are settled."""
        self.directory.mkdir(mode=0o700, exist_ok=True)

    def report_held(self, controller: str, held: HeldRemovals | None) -> None:
        """Tell people that removals are held, or not any more; again only when it changed.

        None also settles what an earlier life held: not before it is known that nothing is.
        """
        keys = () if held is None else held.keys
        if self._reported.get(controller) == keys:
            return
        self._reported[controller] = keys
        file = self.directory / f"{controller}.held"
        if held is None:
            self._settled(controller, file)
            return
        try:
            replace(file, json.dumps({"keys": list(keys), "owned": held.owned}).encode())
        except OSError as error:
            self.log.error("removals.unwritable", controller=controller, reason=str(error))
        self.log.warning(
            "removals.held",
            controller=controller,
            count=len(keys),
            owned=held.owned,
            keys=list(keys[:SHOWN]),
            reason=str(held),
            settle=f"reconciled allow {controller}",
        )

    def _settled(self, controller: str, file: Path) -> None:
        try:
            file.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self.log.error("removals.unwritable", controller=controller, reason=str(error))
        self.log.info("removals.released", controller=controller)

    async def serve(self) -> None:
        """Take permits as they come; for a service nursery. Runs until cancelled."""
        with contextlib.ExitStack() as stack:
            try:
                inotify = stack.enter_context(asyncinotify.Inotify(sync_timeout=0))
                inotify.add_watch(self.directory, asyncinotify.Mask.MOVED_TO)
            except OSError as error:
                # Other programs have used up the kernel's limit: slower, and nothing is lost.
                reason = f"the kernel gives no notice of it: {error}"
                self.log.warning("removals.polling", reason=reason, look_every_s=POLL_INTERVAL)
                while True:
                    self.poll()
                    await trio.sleep(POLL_INTERVAL)
            while True:
                self.poll()
                await trio.lowlevel.wait_readable(inotify.fd)
                while inotify.sync_get() is not None:
                    pass

    def poll(self, controller: str = "*") -> None:
        """Act on every permit that is there, or on that of *controller* alone."""
        for file in sorted(self.directory.glob(f"{controller}.allow")):
            try:
                data = _read(file)
            except (OSError, ValueError) as error:
                self.log.error("removals.bad_approval", file=str(file), reason=str(error))
                data = None
            # Used once: gone before it takes effect, so that a kill in between only asks again.
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                self.log.error("removals.bad_approval", file=str(file), reason=str(error))
                data = None
            if data is not None:
                keys = frozenset(Key(key) for key in data["keys"])
                self.log.info("removals.approved", controller=file.stem, count=len(keys))
                self.on_approved(file.stem, keys)


def describe(held: PendingApproval) -> str:
    """*held* for a person, bounded."""
    shown = [f"  {key}" for key in held.keys[:SHOWN]]
    if len(held.keys) > SHOWN:
        shown.append(f"  … and {len(held.keys) - SHOWN} more")
    return "\n".join(shown)


def _read(file: Path) -> dict[str, Any] | None:
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as opened:
        try:
            data = json.loads(opened.read(LONGEST))
        except ValueError as error:
            raise ValueError(_NOT_OURS.format(file)) from error
    given = data.get("keys") if isinstance(data, dict) else None
    if isinstance(given, list) and all(isinstance(key, str) for key in given):
        return dict(data)
    raise ValueError(_NOT_OURS.format(file))
