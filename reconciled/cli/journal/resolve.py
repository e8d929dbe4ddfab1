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

from reconciled.cli.journal.listing import NOT_FOUND, PREFIX, Place, read_book, the_one, who
from reconciled.cli.journal.text import state_of
from reconciled.cli.terminal import complain, say
from reconciled.core.resources import controller_of
from reconciled.journal import resolutions
from reconciled.journal.operation_record import OperationRecord, Resolution
from reconciled.journal.resolutions import EVERYTHING, Decided
from reconciled.journal.state_lock import Locked, probe

NOT_HELD, USAGE, NO_ANSWER = 1, 2, 75
WAIT = 5.0  # seconds for a running daemon to take the decision
POLL = 0.05
_MEANS = {
    Resolution.COMPLETE: "is done: nothing runs for it",
    Resolution.FORWARD: "goes on",
    Resolution.BACK: "is undone",
    Resolution.ABANDON: "is closed without a claim",
}


def execute(arguments: argparse.Namespace, place: Place) -> int:
    """Decide. Raises StoreTooNew, StoreUnusable, OSError."""
    what = Resolution(arguments.decision)
    why = " ".join(arguments.why.split())
    if bool(arguments.id) == arguments.all:
        return _usage("write the ID of an operation, or --all")
    if arguments.all and what is not Resolution.ABANDON:
        return _usage("--all goes with --abandon alone: decide about each operation by its ID")
    if not why:
        return _usage('--why wants a reason, for whoever reads this later: --why "…"')
    decided = Decided(EVERYTHING, what, who(), why, time.time())
    resolve = Resolve(place, decided)
    return resolve.everything() if arguments.all else resolve.one(arguments.id.upper())


def _usage(text: str) -> int:
    complain(f"reconciled journal resolve: {text}")
    return USAGE


@attrs.define(eq=False)
class Resolve:
    """One decision on its way."""

    place: Place
    decided: Decided
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def one(self, prefix: str) -> int:
        """Settle the operation whose id begins with *prefix*."""
        record = the_one(read_book(self.place.state, PREFIX, prefix), prefix)
        if record is None:
            return NOT_FOUND
        if record.hold is None:
            complain(f"{record.id} ({record.key}) is not held: {state_of(record)}")
            return NOT_HELD
        if self.decided.what is Resolution.BACK:
            why_not = self.place.undoing.why_not(record)
            if why_not:
                complain(f"{record.id} ({record.key}): {why_not}")
                return NOT_HELD
        self.decided = attrs.evolve(self.decided, operation=record.id)
        means = f"{record.id} ({record.key}, {record.name}) {_MEANS[self.decided.what]}"
        return self._hand_over(means, self._acted_on, self._configured(record))

    def everything(self) -> int:
        """Trust the store again after it was set aside, and abandon what is held."""
        book = read_book(self.place.state, 0)
        if not book.degraded:
            complain(
                "the store is whole, so that there is nothing to settle at once:"
                " decide about each operation by its ID"
            )
            return NOT_HELD
        held = sum(record.hold is not None for record in book.open)
        means = f"the store is trusted again, {held} held operations are abandoned"
        return self._hand_over(means, self._trusted, "")

    def _configured(self, record: OperationRecord) -> str:
        config, controller = self.place.undoing.config, controller_of(record.key)
        later = self.decided.what in (Resolution.FORWARD, Resolution.BACK)
        if later and config is not None and controller not in config.controllers:
            return f"Controller {controller} is not configured: it happens once that is."
        return ""

    def _hand_over(self, means: str, done: Callable[[], bool], remark: str) -> int:
        self._put()
        if self._lives() and not self._taken():
            if self._lives() and resolutions.take_back(self.place.state, self.decided.operation):
                complain(
                    f"the process that holds {self.place.state} did not take the decision within"
                    f" {WAIT:.0f} s: it was taken back"
                )
                return NO_ANSWER
            say(f"Decided: {means}.\nIt is written down, and acts as soon as it can.")
        elif resolutions.waits(self.place.state, self.decided.operation):
            say(f"Decided: {means}.\nNo daemon runs: it acts at the next start.")
        elif done():
            say(f"Decided: {means}.")
        else:
            complain("it was not held any more when the daemon looked: nothing was decided")
            return NOT_HELD
        if remark:
            say(remark)
        return 0

    def _put(self) -> None:
        before = None
        try:
            before = resolutions.pending(self.place.state, self.decided.operation)
        except (OSError, ValueError) as error:
            complain(f"an earlier decision cannot be read, and is replaced: {error}")
        if before is not None and before.what is not self.decided.what:
            say(f"This replaces --{before.what.value}, by {before.who}: {before.why}")
        resolutions.put(self.place.state, self.decided)

    def _lives(self) -> bool:
        try:
            probe(self.place.state)
        except Locked:
            return True
        return False

    def _taken(self) -> bool:
        """Wait until a daemon has settled it; False where none has in time."""
        until = self.clock() + WAIT
        while resolutions.waits(self.place.state, self.decided.operation):
            if self.clock() >= until:
                return False
            self.sleep(POLL)
        return True

    def _acted_on(self) -> bool:
        """Whether the journal has this very decision."""
        mine = (self.decided.who, self.decided.what.value, self.decided.why)
        book = read_book(self.place.state, 1, self.decided.operation)
        return any(
            (note.who, note.what, note.why) == mine
            for record in book.find(self.decided.operation)
            for note in record.notes
        )

    def _trusted(self) -> bool:
        return not read_book(self.place.state, 0).degraded
