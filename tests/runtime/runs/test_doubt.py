"""A store that cannot be written, and one that was damaged: what runs all the same."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import key, thing
from restarts import (
    AS_DESIRED,
    DIFFERENT,
    STEPS,
    UNKNOWN,
    Actor,
    Undoing,
    consistent,
    earlier,
    ending_of,
    leave,
    open_record,
    operate,
    own,
    read_only,
    revived,
)
from trio.testing import MockClock

from reconciled.api import (
    Result,
    RollBack,
    done,
)
from reconciled.journal.operation_journal import OperationJournal
from reconciled.journal.operation_record import Ending
from reconciled.journal.sqlite.store import Store


async def test_without_its_intent_nothing_starts(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Where no intent can be written it does not start: a retry; others go on; it returns."""
    script = Actor()
    await own(tmp_path, "b", 0)
    seen: list[Any] = []
    script.acts["a"] = operate("one", seen=seen)
    async with revived(tmp_path, script) as made:
        made.declare(thing("b"))
        await made.settle()
        read_only(made, on=True)
        made.declare(thing("a"), thing("b"))
        await made.settle()
        assert seen == []
        assert made.standing("a") == "retrying"
        (line,) = made.lines("reconcile.failed", key=key("a"))
        assert "NotJournaled: the store could not be written" in line["reason"]
        consistent(made)
        made.wish("b")
        await made.settle()
        assert script.of("b") == ["reconcile"] * 2
        assert made.failures("b") == 0
        read_only(made, on=False)
        await trio.sleep(60)
        assert seen[0][1:] == (1, 0)
        assert seen[1:] == ["new one"]
        assert await ending_of(made, seen[0][0]) is Ending.DONE
        consistent(made)


async def test_no_recovery_runs_that_cannot_be_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """While the count cannot be written no code of a recovery runs; then it goes on."""
    script = Actor()
    identity = await leave(tmp_path)
    async with revived(tmp_path, script) as made:
        read_only(made, on=True)
        await trio.sleep(30)
        assert script.asked == []
        read_only(made, on=False)
        await trio.sleep(30)
        assert await ending_of(made, identity) is Ending.COMPLETED
        consistent(made)


async def test_nothing_runs_before_the_outcome_is_durable(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An operation that is over blocks its key until that is written, and is not recovered."""
    script = Actor()
    seen: list[str] = []

    async def act(request: Any) -> Result:
        async with request.operation("apply") as operation:
            seen.append(operation.id)
            read_only(made, on=len(seen) == 1)
        return done()

    script.acts["a"] = act
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"), thing("b"))
        await trio.sleep(60)
        assert script.of("a") == ["reconcile"]
        assert made.standing("a") == "retrying"
        assert [record.id for record in made.host.operations.journal.pending] == seen
        made.wish("a")
        await made.settle()
        assert script.of("a") == ["reconcile"]
        assert "not durable yet" in made.controller.statuses[key("a")].reason
        read_only(made, on=False)
        await trio.sleep(300)
        assert await ending_of(made, seen[0]) is Ending.DONE
        # It could not be remembered as applied: the key has a run more, in a new operation.
        assert script.of("a") == ["reconcile"] * 2
        assert "recover" not in script.of("a")
        consistent(made)


async def test_an_undo_that_cannot_be_journaled_is_a_retry(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Where the undoing cannot be noted nothing is undone, and the undone one is open as before."""
    script = Undoing()
    identity = await leave(tmp_path, steps=STEPS, undoable=True)

    def on_ask(what: str, _: str) -> None:
        if what == "recover":
            read_only(made, on=True)

    script.on_ask = on_ask
    script.word = RollBack()
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert script.undone == []
        assert open_record(made).id == identity
        assert made.standing("a") == "retrying"
        script.on_ask = lambda _, __: None
        read_only(made, on=False)
        await trio.sleep(60)
        assert await ending_of(made, identity) is Ending.ROLLED_BACK
        consistent(made)


async def damage(tmp_path: Path) -> None:
    """Let an earlier life have found the store damaged."""

    async def act(store: Store, _: OperationJournal) -> None:
        store.writer.meta = attrs.evolve(store.writer.meta, degraded="lost")

    await earlier(tmp_path, act)


@pytest.mark.parametrize(
    ("look", "runs"),
    [(AS_DESIRED, True), (DIFFERENT, False), (UNKNOWN, False), (None, False), (OSError(5), False)],
)
async def test_after_damage_only_what_is_as_desired_runs(
    tmp_path: Path, autojump_clock: MockClock, look: Any, *, runs: bool
) -> None:
    """After a damaged store a key is held, with the way out, unless it is observed as desired."""
    script = Actor()
    await damage(tmp_path)
    script.looks = [look]
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await made.settle()
        assert script.of("a") == (["observe", "reconcile"] if runs else ["observe"])
        status = made.controller.statuses[key("a")]
        assert ("resolve --all --abandon" in status.reason) != runs
        assert made.standing("a") == (None if runs else "terminal")


async def test_after_damage_nothing_is_removed(tmp_path: Path, autojump_clock: MockClock) -> None:
    """After a damaged store no removal runs, until a person trusts it again."""
    script = Actor()
    await own(tmp_path)
    await damage(tmp_path)
    script.looks = [AS_DESIRED]
    async with revived(tmp_path, script) as made:
        made.declare(thing("b"))
        await trio.sleep(600)
        assert made.controller.removing == {key("a")}
        assert script.removals == []
        assert made.host.store.all_keys() == {key("a"), key("b")}
        await made.host.store.clear_degraded("eve", "I looked")
        made.wish("a")
        await made.settle()
        assert [request.name for request in script.removals] == ["a"]
