"""``reconciled journal resolve``: a person's decision about a held operation.

It is checked against the store as it is now and written durably. A running daemon carries it out
at once, otherwise the next one does at its start.

Exit codes: 0 the decision is durable · 1 the operation is not held, or nothing can undo it · 4
there is no such operation · 75 a process holds the state directory and did not take the decision
within WAIT: it was withdrawn.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import attrs

from reconciled.cli.journal.operation_format import state_of
from reconciled.cli.journal.target import (
    PREFIX_LIMIT,
    JournalTarget,
    find_operation,
    read_journal,
)
from reconciled.cli.terminal import print_error, print_line
from reconciled.core.errors import StateLocked
from reconciled.core.exit_codes import FAILED, NO_ANSWER, NOT_FOUND, USAGE
from reconciled.core.resources import controller_of
from reconciled.journal import resolutions
from reconciled.journal.decision_files import DecisionFiles
from reconciled.journal.operation_record import OperationRecord, Resolution
from reconciled.journal.resolutions import ALL_OPERATIONS, ResolutionRequest
from reconciled.journal.state_lock import probe

WAIT = 5.0  # seconds for a running daemon to take the decision
POLL_INTERVAL = 0.05
_EFFECTS = {
    Resolution.COMPLETE: "is recorded as done: nothing runs for it",
    Resolution.FORWARD: "continues at the step that it reached",
    Resolution.BACK: "is undone in a new operation",
    Resolution.ABANDON: "is closed, neither done nor undone",
}


def execute(arguments: argparse.Namespace, target: JournalTarget) -> int:
    """Write the decision; the exit code. Raises StoreTooNew, StoreUnusable, OSError."""
    resolution = Resolution(arguments.decision)
    why = " ".join(arguments.why.split())
    if bool(arguments.id) == arguments.all:
        return _usage("write either the ID of an operation or --all")
    if arguments.all and resolution is not Resolution.ABANDON:
        return _usage("--all goes with --abandon only: resolve each operation by its ID instead")
    if not why:
        return _usage('--why is empty: write the reason, it is kept in the journal: --why "…"')
    request = ResolutionRequest(ALL_OPERATIONS, resolution, login_name(), why, time.time())
    command = ResolveCommand(target, request)
    return command.resolve_all() if arguments.all else command.resolve_one(arguments.id.upper())


def _unheld_remedy(record: OperationRecord) -> str:
    return "; the daemon recovers an open one when it starts" if record.ending is None else ""


def _usage(text: str) -> int:
    print_error(f"reconciled journal resolve: {text}")
    return USAGE


def login_name() -> str:
    """The person at the terminal, for the record: the name and uid of the login."""
    import pwd

    uid = os.getuid()
    # sudo's variables count only for root: any other user can set them.
    sudo_uid = os.environ.get("SUDO_UID", "") if uid == 0 else ""
    if sudo_uid.isdecimal():
        uid = int(sudo_uid)
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = "unknown"
    if sudo_uid and os.environ.get("SUDO_USER"):
        name = os.environ["SUDO_USER"]
    return f"{name} (uid {uid}{', sudo' if sudo_uid else ''})"


@attrs.define(eq=False)
class ResolveCommand:
    """One decision from its check to the daemon's answer."""

    target: JournalTarget
    request: ResolutionRequest
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    files: DecisionFiles = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.files = resolutions.resolution_files(self.target.state)

    def resolve_one(self, prefix: str) -> int:
        """Resolve the operation whose id begins with *prefix*; the exit code."""
        record = find_operation(read_journal(self.target.state, PREFIX_LIMIT, prefix), prefix)
        if record is None:
            return NOT_FOUND
        if record.hold is None and not record.pending_resolution:
            print_error(
                f"{record.id} ({record.key}) is not held, its state is {state_of(record)}:"
                f" only a held operation can be resolved{_unheld_remedy(record)}"
            )
            return FAILED
        if self.request.resolution is Resolution.BACK:
            refusal = self.target.undo_check.refusal_reason(record)
            if refusal:
                print_error(f"{record.id} ({record.key}) cannot be undone: {refusal}")
                return FAILED
        self.request = attrs.evolve(self.request, operation=record.id)
        effect = f"{record.id} ({record.key}, {record.name}) {_EFFECTS[self.request.resolution]}"
        return self._submit(effect, self._is_recorded, self._unconfigured_remark(record))

    def resolve_all(self) -> int:
        """Trust the store again after it was set aside, and abandon what is held; the exit code."""
        snapshot = read_journal(self.target.state, 0)
        if not snapshot.degraded:
            print_error("--all is only for a damaged store: resolve each operation by its ID")
            return FAILED
        held = sum(record.hold is not None for record in snapshot.open)
        effect = f"the store is trusted again, and {held} held operations are abandoned"
        return self._submit(effect, self._is_store_trusted, "")

    def _unconfigured_remark(self, record: OperationRecord) -> str:
        config, controller = self.target.undo_check.config, controller_of(record.key)
        later = self.request.resolution in (Resolution.FORWARD, Resolution.BACK)
        if later and config is not None and controller not in config.controllers:
            return f"Controller {controller} is not configured: this happens once it is."
        return ""

    def _submit(self, effect: str, is_done: Callable[[], bool], remark: str) -> int:
        self._write()
        if self._is_state_locked() and not self._wait_accepted():
            if self._is_state_locked() and self.files.withdraw(self.request.operation):
                print_error(
                    f"the process that holds {self.target.state} did not take the decision within"
                    f" {WAIT:.0f} s: the decision was withdrawn and nothing has changed; try"
                    " again, or stop that process first"
                )
                return NO_ANSWER
            print_line(f"Decided: {effect}.\nThe decision is durable, and not carried out yet.")
        elif self._is_pending():
            print_line(f"Decided: {effect}.\nNo daemon is running: the next start carries it out.")
        elif is_done():
            print_line(f"Decided: {effect}.")
        else:
            print_error(
                "the daemon did not carry the decision out, since the operation was not held any"
                " more: nothing has changed; reconciled journal show ID shows its state"
            )
            return FAILED
        if remark:
            print_line(remark)
        return 0

    def _write(self) -> None:
        before = None
        try:
            before = resolutions.read_pending(self.target.state, self.request.operation)
        except (OSError, ValueError) as error:
            print_error(f"replacing an earlier decision that cannot be read: {error}")
        if before is not None and before.resolution is not self.request.resolution:
            print_line(f"This replaces --{before.resolution.value}, by {before.who}: {before.why}")
        resolutions.submit(self.target.state, self.request)

    def _is_state_locked(self) -> bool:
        try:
            probe(self.target.state)
        except StateLocked:
            return True
        return False

    def _is_pending(self) -> bool:
        return self.files.find(self.request.operation) is not None

    def _wait_accepted(self) -> bool:
        """Wait until a daemon has finished the decision; False after WAIT."""
        until = self.clock() + WAIT
        while self._is_pending():
            if self.clock() >= until:
                return False
            self.sleep(POLL_INTERVAL)
        return True

    def _is_recorded(self) -> bool:
        """Whether the journal has exactly this decision."""
        mine = (self.request.who, self.request.resolution.value, self.request.why)
        snapshot = read_journal(self.target.state, 1, self.request.operation)
        return any(
            (note.who, note.what, note.why) == mine
            for record in snapshot.find(self.request.operation)
            for note in record.notes
        )

    def _is_store_trusted(self) -> bool:
        return not read_journal(self.target.state, 0).degraded
