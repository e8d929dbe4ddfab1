"""``reconciled journal resolve``: a person's decision about what is held.

It is judged by what the store says now, written durably, and then the daemon's: a running one
acts on it at once, otherwise the next one does at its start.

Exit codes: 0 the decision is durable · 1 it is not held, or nothing can undo it · 4 there is no
such operation · 75 a process holds the state and did not take the decision within WAIT: it was
taken back.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import attrs

from reconciled.cli.journal.listing import (
    PREFIX_LIMIT,
    JournalTarget,
    find_operation,
    login_name,
    read_journal,
)
from reconciled.cli.journal.text import state_of
from reconciled.cli.terminal import print_error, print_line
from reconciled.core.errors import StateLocked
from reconciled.core.exit_codes import FAILED, NO_ANSWER, NOT_FOUND, USAGE
from reconciled.core.resources import controller_of
from reconciled.journal import resolutions
from reconciled.journal.operation_record import OperationRecord, Resolution
from reconciled.journal.resolutions import ALL_OPERATIONS, ResolutionRequest
from reconciled.journal.state_lock import probe

WAIT = 5.0  # seconds for a running daemon to take the decision
POLL = 0.05
_MEANS = {
    Resolution.COMPLETE: "is done: nothing runs for it",
    Resolution.FORWARD: "goes on",
    Resolution.BACK: "is undone",
    Resolution.ABANDON: "is closed without a claim",
}


def execute(arguments: argparse.Namespace, target: JournalTarget) -> int:
    """Decide. Raises StoreTooNew, StoreUnusable, OSError."""
    what = Resolution(arguments.decision)
    why = " ".join(arguments.why.split())
    if bool(arguments.id) == arguments.all:
        return _usage("write the ID of an operation, or --all")
    if arguments.all and what is not Resolution.ABANDON:
        return _usage("--all goes with --abandon alone: decide about each operation by its ID")
    if not why:
        return _usage('--why wants a reason, for whoever reads this later: --why "…"')
    decided = ResolutionRequest(ALL_OPERATIONS, what, login_name(), why, time.time())
    resolve = ResolveCommand(target, decided)
    return resolve.resolve_all() if arguments.all else resolve.resolve_one(arguments.id.upper())


def _usage(text: str) -> int:
    print_error(f"reconciled journal resolve: {text}")
    return USAGE


@attrs.define(eq=False)
class ResolveCommand:
    """One decision on its way."""

    target: JournalTarget
    resolution: ResolutionRequest
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def resolve_one(self, prefix: str) -> int:
        """Settle the operation whose id begins with *prefix*."""
        record = find_operation(read_journal(self.target.state, PREFIX_LIMIT, prefix), prefix)
        if record is None:
            return NOT_FOUND
        if record.hold is None:
            print_error(f"{record.id} ({record.key}) is not held: {state_of(record)}")
            return FAILED
        if self.resolution.resolution is Resolution.BACK:
            why_not = self.target.undo_check.refusal_reason(record)
            if why_not:
                print_error(f"{record.id} ({record.key}): {why_not}")
                return FAILED
        self.resolution = attrs.evolve(self.resolution, operation=record.id)
        means = f"{record.id} ({record.key}, {record.name}) {_MEANS[self.resolution.resolution]}"
        return self._submit(means, self._is_recorded, self._unconfigured_remark(record))

    def resolve_all(self) -> int:
        """Trust the store again after it was set aside, and abandon what is held."""
        book = read_journal(self.target.state, 0)
        if not book.degraded:
            print_error(
                "the store is whole, so that there is nothing to settle at once:"
                " decide about each operation by its ID"
            )
            return FAILED
        held = sum(record.hold is not None for record in book.open)
        means = f"the store is trusted again, {held} held operations are abandoned"
        return self._submit(means, self._is_store_trusted, "")

    def _unconfigured_remark(self, record: OperationRecord) -> str:
        config, controller = self.target.undo_check.config, controller_of(record.key)
        later = self.resolution.resolution in (Resolution.FORWARD, Resolution.BACK)
        if later and config is not None and controller not in config.controllers:
            return f"Controller {controller} is not configured: it happens once that is."
        return ""

    def _submit(self, means: str, done: Callable[[], bool], remark: str) -> int:
        self._write()
        if self._is_state_locked() and not self._wait_accepted():
            if self._is_state_locked() and resolutions.withdraw(
                self.target.state, self.resolution.operation
            ):
                print_error(
                    f"the process that holds {self.target.state} did not take the decision within"
                    f" {WAIT:.0f} s: it was taken back"
                )
                return NO_ANSWER
            print_line(f"Decided: {means}.\nIt is written down, and acts as soon as it can.")
        elif resolutions.is_pending(self.target.state, self.resolution.operation):
            print_line(f"Decided: {means}.\nNo daemon runs: it acts at the next start.")
        elif done():
            print_line(f"Decided: {means}.")
        else:
            print_error("it was not held any more when the daemon looked: nothing was decided")
            return FAILED
        if remark:
            print_line(remark)
        return 0

    def _write(self) -> None:
        before = None
        try:
            before = resolutions.read_pending(self.target.state, self.resolution.operation)
        except (OSError, ValueError) as error:
            print_error(f"an earlier decision cannot be read, and is replaced: {error}")
        if before is not None and before.resolution is not self.resolution.resolution:
            print_line(f"This replaces --{before.resolution.value}, by {before.who}: {before.why}")
        resolutions.submit(self.target.state, self.resolution)

    def _is_state_locked(self) -> bool:
        try:
            probe(self.target.state)
        except StateLocked:
            return True
        return False

    def _wait_accepted(self) -> bool:
        """Wait until a daemon has settled it; False where none has in time."""
        until = self.clock() + WAIT
        while resolutions.is_pending(self.target.state, self.resolution.operation):
            if self.clock() >= until:
                return False
            self.sleep(POLL)
        return True

    def _is_recorded(self) -> bool:
        """Whether the journal has this very decision."""
        mine = (self.resolution.who, self.resolution.resolution.value, self.resolution.why)
        book = read_journal(self.target.state, 1, self.resolution.operation)
        return any(
            (note.who, note.what, note.why) == mine
            for record in book.find(self.resolution.operation)
            for note in record.notes
        )

    def _is_store_trusted(self) -> bool:
        return not read_journal(self.target.state, 0).degraded
