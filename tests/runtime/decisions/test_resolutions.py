"""How the daemon carries out decisions about operations, at its start and while it runs."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import asyncinotify
import attrs
import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import PLUGIN, WholeDaemon

from reconciled.api import Result, done
from reconciled.core.resources import Key
from reconciled.journal import resolutions
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending, Hold, OperationRecord, Resolution
from reconciled.journal.resolutions import ALL_OPERATIONS, ResolutionRequest
from reconciled.journal.sqlite.store import Store, WriteFailed
from reconciled.runtime.decisions.inbox import SCAN_INTERVAL
from reconciled.runtime.decisions.resolutions import FIRST_SCAN_TIMEOUT, Resolutions
from reconciled.runtime.operations.pinned import pin

HOLD = Hold("unclear", "decision", "", 1.0)
COMPLETE, FORWARD = Resolution.COMPLETE, Resolution.FORWARD
BACK, ABANDON = Resolution.BACK, Resolution.ABANDON


async def earlier(
    whole_daemon: WholeDaemon, act: Callable[[Store, OperationJournal], Awaitable[Any]]
) -> Any:
    """What *act* gives, done in an earlier run of the daemon."""
    store = Store.open(whole_daemon.state)
    operations = OperationJournal.load(store)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        given = await act(store, operations)
        nursery.cancel_scope.cancel(reason="that run is over")
    return given


async def held(
    whole_daemon: WholeDaemon, key: str = "a/x", *, removal: bool = False, value: int = 1
) -> str:
    """The id of a held operation with one started step, left by an earlier run."""

    async def act(_: Store, operations: OperationJournal) -> str:
        pinned = pin(thing(key.partition("/")[2], value), removal=removal)
        record = await operations.begin(Key(key), "write", pinned)
        await operations.record_step_started(record.id, "one", "once")
        await operations.hold(record.id, HOLD)
        return record.id

    identity: str = await earlier(whole_daemon, act)
    return identity


def decide(
    whole_daemon: WholeDaemon, operation: str, what: Resolution, why: str = "I looked"
) -> None:
    resolutions.submit(
        whole_daemon.state, ResolutionRequest(operation, what, "eve (uid 7)", why, 2.0)
    )


def left(whole_daemon: WholeDaemon) -> list[str]:
    return [file.name for file in (whole_daemon.state / resolutions.DIRECTORY).iterdir()]


async def past_of(whole_daemon: WholeDaemon, operation: str) -> OperationRecord | None:
    past = await whole_daemon.daemon.journal.past_operations(1, operation)
    return past.records[0] if past.records else None


async def test_a_decision_made_while_the_daemon_was_down_precedes_recovery(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The first run of the key follows a decision that was made before the start."""
    seen: list[tuple[int, int]] = []

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation:
            seen.append((operation.attempt, request.spec.value))
        return done()

    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x", 2)]
    whole_daemon.acts["a/x"] = act
    identity = await held(whole_daemon)
    decide(whole_daemon, identity, FORWARD)
    async with whole_daemon.running():
        await whole_daemon.wait_all_blocked()
        # The pinned spec first, in the same operation; then what is declared now.
        assert seen == [(2, 1), (1, 2)]
        record = await past_of(whole_daemon, identity)
        assert record is not None
        assert record.ending is Ending.DONE
        line = whole_daemon.log_lines("operation.resolved")[0]
        assert (line["operation"], line["decision"]) == (identity, "forward")
        assert (line["who"], line["why"], line["key"]) == ("eve (uid 7)", "I looked", "a/x")
        assert left(whole_daemon) == []


async def test_without_a_decision_it_stays_held(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The reconciler of a held key does not run."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x", 2)]
    await held(whole_daemon)
    async with whole_daemon.running():
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.ran == []


@pytest.mark.parametrize(
    ("what", "ending", "applied"),
    [(COMPLETE, Ending.COMPLETED, True), (ABANDON, Ending.ABANDONED, False)],
)
async def test_a_running_daemon_closes_the_operation_at_once(
    whole_daemon: WholeDaemon,
    autojump_clock: MockClock,
    what: Resolution,
    ending: Ending,
    *,
    applied: bool,
) -> None:
    """Complete records the pinned spec as applied, abandon nothing; the key is reconciled again."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x", 2)]
    identity = await held(whole_daemon, value=1)
    known: list[bool] = []

    async def act(_: Any) -> Result:
        pinned = thing("x", 1).fingerprint
        known.append(whole_daemon.daemon.store.fingerprint(Key("a/x")) == pinned)
        return done()

    whole_daemon.acts["a/x"] = act
    async with whole_daemon.running():
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.ran == []
        decide(whole_daemon, identity, what)
        await whole_daemon.wait_all_blocked()
        assert known == [applied]
        record = await past_of(whole_daemon, identity)
        assert record is not None
        assert record.ending is ending
        assert (record.notes[-1].who, record.notes[-1].why) == ("eve (uid 7)", "I looked")
        assert left(whole_daemon) == []


UNDOER = """
class Undoer(ThingReconciler):
    async def undo(self, request, step):
        WholeDaemon.now.removed.append(step.name)
"""


async def test_back_undoes_the_operation(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Back has the reconciler undo it, in a new operation; each names the other."""
    whole_daemon.plugin("undo", PLUGIN + UNDOER)
    whole_daemon.configure("a: {reconciler: 'undo:Undoer'}")
    whole_daemon.declared["a"] = [thing("x", 2)]
    identity = await held(whole_daemon)
    async with whole_daemon.running():
        decide(whole_daemon, identity, BACK)
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.removed == ["one"]
        record = await past_of(whole_daemon, identity)
        assert record is not None
        assert record.ending is Ending.ROLLED_BACK
        undoing = await past_of(whole_daemon, record.undone_by)
        assert undoing is not None
        assert (undoing.undoes, undoing.ending) == (identity, Ending.DONE)


async def test_a_completed_removal_is_not_repeated(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Complete of a removal forgets the key: nothing runs, and no state of it is left."""
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing("y")]
    identity = await held(whole_daemon, removal=True)

    async def own(store: Store, _: OperationJournal) -> None:
        await store.record_applied(
            Key("a/x"), "Thing", {"value": 1}, thing("x", 1).fingerprint, base="/m", complete=True
        )

    await earlier(whole_daemon, own)
    async with whole_daemon.running() as daemon:
        await whole_daemon.wait_all_blocked()
        assert Key("a/x") in daemon.controllers["a"].removing
        # As if its manifest had been deleted while the daemon ran: the last one is known.
        daemon.controllers["a"].absent[Key("a/x")] = thing("x", 1)
        decide(whole_daemon, identity, COMPLETE)
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.removed == []
        assert Key("a/x") not in daemon.store.all_keys()
        assert Key("a/x") not in daemon.controllers["a"].removing
        assert Key("a/x") not in daemon.controllers["a"].desired.owned
        assert await past_of(whole_daemon, identity) is not None


async def test_operations_of_an_unconfigured_controller_can_be_resolved(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """An operation can be resolved after its controller was removed from the configuration."""
    whole_daemon.configure("a")
    gone, later = await held(whole_daemon, "z/x"), await held(whole_daemon, "z/y")
    async with whole_daemon.running() as daemon:
        decide(whole_daemon, gone, ABANDON)
        decide(whole_daemon, later, FORWARD)
        await whole_daemon.wait_all_blocked()
        assert daemon.journal.find(gone) is None
        record = daemon.journal.find(later)
        assert record is not None
        assert (record.hold, record.pending_resolution) == (None, "forward")
        assert len(whole_daemon.log_lines("operation.resolved")) == 2


TOO_LATE = '{"decision": "abandon", "who": "e", "why": "w", "at": 1' + "0" * 400 + "}"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "{",
        "{}",
        '{"decision": "sell", "who": "e"}',
        "[1]",
        pytest.param("[" * 60_000, id="deep"),
        pytest.param(TOO_LATE, id="too late"),
    ],
)
async def test_an_unusable_decision_is_dropped(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, text: str | None
) -> None:
    """A decision about an unknown operation, and a malformed one, are logged and removed."""
    whole_daemon.configure("a")
    identity = await held(whole_daemon)
    async with whole_daemon.running() as daemon:
        if text is None:
            decide(whole_daemon, "0" * 26, ABANDON)
        else:
            file = whole_daemon.state / resolutions.DIRECTORY / f"{'0' * 26}.new"
            file.write_text(text)
            file.rename(file.with_suffix(".json"))
        decide(whole_daemon, identity, ABANDON)
        await whole_daemon.wait_all_blocked()
        assert daemon.journal.list_open() == []
        assert whole_daemon.log_lines("resolution.rejected")[0]["operation"] == "0" * 26
        assert left(whole_daemon) == []


async def test_a_running_operation_is_not_resolved(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A decision about an operation that runs, and is not held any more, changes nothing."""
    running: list[str] = []
    go_on = trio.Event()

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation:
            running.append(operation.id)
            await go_on.wait()
        return done()

    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = act
    async with whole_daemon.running() as daemon:
        decide(whole_daemon, running[0], ABANDON)
        await whole_daemon.wait_all_blocked()
        assert daemon.journal.find(running[0]) is not None
        assert (
            whole_daemon.log_lines("resolution.rejected")[0]["reason"]
            == "the operation is not held any more"
        )
        assert left(whole_daemon) == []
        go_on.set()
        await whole_daemon.wait_all_blocked()
        record = await past_of(whole_daemon, running[0])
        assert record is not None
        assert record.ending is Ending.DONE


async def test_a_claim_of_an_earlier_daemon_is_carried_out(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The next start carries out a decision that a killed daemon claimed and did not finish."""
    whole_daemon.configure("a")
    identity = await held(whole_daemon)
    decide(whole_daemon, identity, ABANDON)
    assert len(resolutions.resolution_files(whole_daemon.state).claim()) == 1
    async with whole_daemon.running() as daemon:
        assert daemon.journal.list_open() == []
        assert left(whole_daemon) == []


async def test_a_decision_that_is_recorded_already_is_removed_silently(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A decision that the journal already contains is removed without a log line."""
    whole_daemon.configure("a")
    identity = await held(whole_daemon, "z/x")
    decide(whole_daemon, identity, FORWARD)

    async def note(_: Store, operations: OperationJournal) -> None:
        await operations.resolve(identity, FORWARD, "eve (uid 7)", "I looked")

    await earlier(whole_daemon, note)
    async with whole_daemon.running() as daemon:
        record = daemon.journal.find(identity)
        assert record is not None
        assert record.pending_resolution == "forward"
        assert left(whole_daemon) == []
        assert whole_daemon.log_lines("resolution.rejected") == []


async def test_a_decision_that_cannot_be_written_is_tried_again(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that cannot be written delays a decision, and a start, and loses neither."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x", 1)]
    identity = await held(whole_daemon)
    decide(whole_daemon, identity, COMPLETE)
    real, full = Store.record_applied, [True]

    async def remember(self: Store, *arguments: Any, **named: Any) -> None:
        if full:
            raise WriteFailed("no space left")
        await real(self, *arguments, **named)

    monkeypatch.setattr(Store, "record_applied", remember)
    async with whole_daemon.running() as daemon:
        assert whole_daemon.log_lines("resolution.deferred")[0]["reason"] == "no space left"
        record = daemon.journal.find(identity)
        assert record is not None
        # The journal records the decision last, after what follows from it.
        assert record.hold is not None
        full.clear()
        await trio.sleep(SCAN_INTERVAL + 0.1)
        assert daemon.journal.find(identity) is None
        assert left(whole_daemon) == []


async def test_a_start_waits_for_the_first_scan_only(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first scan that does not end delays the start by FIRST_SCAN_TIMEOUT."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    decide(whole_daemon, await held(whole_daemon, "z/y"), ABANDON)

    async def hang(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(Resolutions, "act", hang)
    began = trio.current_time()
    async with whole_daemon.running():
        assert whole_daemon.ran == []
        await trio.sleep(FIRST_SCAN_TIMEOUT + 0.1 - (trio.current_time() - began))
        assert whole_daemon.ran == ["a/x"]


async def test_decisions_are_found_without_inotify(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel's inotify limit is used up, decisions are polled for, with one log line."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    whole_daemon.configure("a")
    identity = await held(whole_daemon)
    monkeypatch.setattr(asyncinotify, "Inotify", refuse)
    async with whole_daemon.running() as daemon:
        assert len(whole_daemon.log_lines("resolution.polling")) == 1
        decide(whole_daemon, identity, ABANDON)
        await whole_daemon.wait_all_blocked()
        assert daemon.journal.find(identity) is not None
        await trio.sleep(SCAN_INTERVAL + 0.1)
        assert daemon.journal.find(identity) is None


async def test_all_operations_are_abandoned_after_a_damaged_store(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """--all trusts the store again, abandons held operations, and reconciles every key."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x", 1), thing("y", 1)]
    identity = await held(whole_daemon)

    async def degrade(store: Store, _: OperationJournal) -> None:
        store.writer.meta = attrs.evolve(store.writer.meta, degraded="lost")

    await earlier(whole_daemon, degrade)
    async with whole_daemon.running() as daemon:
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.ran == []
        decide(whole_daemon, ALL_OPERATIONS, FORWARD)
        await whole_daemon.wait_all_blocked()
        assert daemon.store.degraded
        decide(whole_daemon, ALL_OPERATIONS, ABANDON)
        await whole_daemon.wait_all_blocked()
        assert not daemon.store.degraded
        assert "eve (uid 7): I looked" in daemon.store.writer.meta.settled
        assert sorted(whole_daemon.ran) == ["a/x", "a/y"]
        record = await past_of(whole_daemon, identity)
        assert record is not None
        assert record.ending is Ending.ABANDONED
        assert len(whole_daemon.log_lines("journal.resolved")) == 1


async def test_a_later_decision_replaces_one_that_waits_for_its_controller(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Without its controller, --forward has to wait, and --abandon may replace it."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    identity = await held(whole_daemon, "z/x")
    decide(whole_daemon, identity, FORWARD)
    async with whole_daemon.running() as daemon:
        await whole_daemon.wait_all_blocked()
        record = daemon.journal.find(identity)
        assert record is not None
        assert (record.hold, record.pending_resolution) == (None, "forward")
        # The same manifest under another controller.
        assert whole_daemon.log_lines("reconcile.blocked")[0]["key"] == "a/x"
        assert whole_daemon.ran == []
        decide(whole_daemon, identity, ABANDON)
        await trio.sleep(SCAN_INTERVAL + 0.1)
        assert daemon.journal.find(identity) is None
        assert whole_daemon.ran == ["a/x"]
        assert whole_daemon.log_lines("resolution.rejected") == []
