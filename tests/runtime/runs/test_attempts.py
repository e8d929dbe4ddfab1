"""What attempts come to: the count and its cap, and what stays open in a living daemon."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import key, thing, unavailable
from restarts import (
    Actor,
    consistent,
    ending_of,
    held,
    leave,
    open_record,
    operate,
    revived,
)
from trio.testing import MockClock

from reconciled.api import (
    Hold,
    Result,
    done,
    retry,
)
from reconciled.journal.operation_record import Ending
from reconciled.runtime.runs.adoption import enqueue_open_operations

# -- the count and the cap -------------------------------------------------------


async def test_a_pill_is_held_at_the_cap(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Attempts that end without a word are counted over starts, and held at the cap, not later."""
    script = Actor()
    await leave(tmp_path)

    async def killed(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    script.acts["a"] = killed
    for number in (1, 2, 3):
        async with revived(tmp_path, script, cap=3) as made:
            await made.settle()
            record = open_record(made)
            assert (record.recoveries, record.attempt) == (number, number + 1)
    async with revived(tmp_path, script, cap=3) as made:
        await made.settle()
        assert held(made).by_cap
        assert "3 times" in held(made).reason
    assert script.of("a").count("reconcile") == 3


@pytest.mark.parametrize("way", ["error", "retry"])
async def test_an_end_by_itself_resets_the_count(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """An attempt that ends by an error or a result of its own sets the count back."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=2, steps=[("one", "idempotent", True, 1)])

    async def act(request: Any) -> Result:
        if way == "error":
            raise OSError(5, "busy")
        return retry("busy")

    script.acts["a"] = act
    async with revived(tmp_path, script, cap=3) as made:
        await trio.sleep(120)
        record = open_record(made)
        assert record.id == identity
        assert record.attempt > 5
        assert (record.recoveries, record.hold) == (0, None)
        consistent(made)


async def test_an_end_from_outside_leaves_the_count(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A program that was killed, or a critical part that was cut, is no word of its own."""
    script = Actor()
    await leave(tmp_path, steps=[("one", "idempotent", True, 1)])

    async def cut(request: Any) -> Result:
        async with request.operation("apply") as operation, operation.critical(budget=1.0):
            await trio.sleep_forever()
        return done()

    script.acts["a"] = cut
    async with revived(tmp_path, script, cap=2) as made:
        await trio.sleep(120)
        assert held(made).by_cap
        assert script.of("a").count("reconcile") == 2


@pytest.mark.parametrize("way", ["stop", "crash"])
async def test_a_stop_that_was_asked_for_counts_nothing(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """Restarts in the midst of long work lead to no hold; a daemon that crashes over it does."""
    script = Actor()
    await leave(tmp_path)
    killing(script)
    for number in range(1, 5):
        async with revived(tmp_path, script, cap=3) as made:
            await made.settle()
            if way == "stop":
                made.host.stop.begin("SIGTERM")
                made.host.stop.end_drain("the test wants it")
            else:
                made.host.stop.crash("crash: the test wants it")
            await made.settle()
            assert script.of("a").count("reconcile") == (
                number if way == "stop" else min(number, 3)
            )
            record = open_record(made)
            assert (record.hold is not None) == (way == "crash" and number > 3)


def killing(made: Actor) -> None:
    async def act(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    made.acts["a"] = act


async def test_a_hold_by_the_cap_outlives_a_start(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another start with the same spec lifts no hold by the cap, whenever it was imposed."""
    script = Actor()
    await leave(tmp_path, recoveries=3)
    for _ in range(3):
        # Imposed, or found, before any source has spoken: the daemon may be killed each time.
        async with revived(tmp_path, script) as made:
            await made.settle()
            assert held(made).by_cap
            made.declare(thing("a", 1))
            await made.settle()
            assert held(made).by_cap
    assert script.asked == []
    assert len(made.lines("operation.held")) == 1


async def test_a_changed_spec_lifts_a_hold_by_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Another spec lifts a hold by the cap, with a count that begins anew, and nothing else."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        made.wish("a")
        await made.settle()
        assert held(made).by_cap
    # In a later life too: the spec may change while nothing runs.
    async with revived(tmp_path, script) as made:
        await made.settle()
        assert held(made).by_cap
        killing(script)
        made.declare(thing("a", 2))
        await made.settle()
        assert script.requests[0].spec.value == 1
        record = open_record(made)
        assert (record.id, record.recoveries, record.hold) == (identity, 1, None)


async def test_a_source_that_cannot_be_read_lifts_no_hold(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """That a source cannot be read is no change of a spec (invariant 11); that one went is."""
    script = Actor()
    await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
    async with revived(tmp_path, script) as made:
        made.say(unavailable("it is not mounted"))
        made.wish("a")
        await made.settle()
        assert held(made).by_cap
        made.declare(thing("b"))
        made.wish("a")
        await made.settle()
        assert script.of("a")[0] == "observe"


async def test_changed_options_lift_a_hold_by_the_cap(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Other options of the controller lift a hold by the cap."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        assert held(made).by_cap
        made.controller.config = attrs.evolve(made.controller.config, options={"fast": True})
        enqueue_open_operations(made.controller, trio.current_time())
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED


async def test_a_hold_that_came_before_the_sources_is_lifted_too(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """What the sources say first is what a hold by the cap was imposed under; the next lifts it."""
    script = Actor()
    identity = await leave(tmp_path, recoveries=3)
    async with revived(tmp_path, script) as made:
        await made.settle()
        made.declare(thing("a", 1))
        await made.settle()
        assert held(made).by_cap
        made.declare(thing("a", 2))
        await made.settle()
        assert await ending_of(made, identity) is Ending.COMPLETED


async def test_other_holds_are_not_lifted(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A hold that was decided stays, whatever spec and options become."""
    script = Actor()
    await leave(tmp_path)
    script.word = Hold("nobody knows")
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        assert held(made).context
        made.declare(thing("a", 2))
        made.controller.config = attrs.evolve(made.controller.config, options={"fast": True})
        enqueue_open_operations(made.controller, trio.current_time())
        await made.settle()
        assert not held(made).by_cap
        assert script.asked == [("observe", "a"), ("recover", "a")]


# -- operations that lose their actor in a living daemon -------------------------


async def test_an_error_before_any_step_closes_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An error before any step closes it as failed; the retry is a new one with a new id."""
    script = Actor()
    seen: list[Any] = []
    script.acts["a"] = operate("one", seen=seen, one=OSError(5, "busy"))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await made.settle()
        assert made.host.operations.journal.find_by_key(key("a")) is None
        consistent(made)
        await trio.sleep(5)
        assert len(seen) > 1
        assert len({identity for identity, _, _ in seen}) == len(seen)
        assert {attempt for _, attempt, _ in seen} == {1}
        assert await ending_of(made, seen[0][0]) is Ending.FAILED
        assert "recover" not in script.of("a")
        consistent(made)


@pytest.mark.parametrize("step", ["one", "one:pure"])
async def test_an_error_after_a_step_leaves_it_open(
    tmp_path: Path, autojump_clock: MockClock, step: str
) -> None:
    """An error after a step leaves it open: same id, next attempt, after the ordinary backoff."""
    script = Actor()
    seen: list[Any] = []
    script.acts["a"] = operate(step, "two", seen=seen, two=OSError(5, "busy"))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a", 1))
        await made.settle()
        record = open_record(made)
        assert (record.attempt, record.last_step, record.recoveries) == (1, "one", 0)
        assert made.standing("a") == "retrying"
        consistent(made)
        script.acts["a"] = operate(step, "two", seen=seen)
        await trio.sleep(5)
        assert seen[2:5] == [(record.id, 2, 1), "new one", "new two"]
        assert await ending_of(made, record.id) is Ending.DONE
        assert made.host.store.fingerprint(key("a")) == thing("a", 1).fingerprint
        consistent(made)


async def test_an_error_in_a_once_step_leaves_it_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A ONCE step that was started and raised leaves it open, and holds it when it is retried."""
    script = Actor()
    script.acts["a"] = operate("pay:once", pay=OSError(5, "busy"))
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await trio.sleep(60)
        assert "pay" in held(made).reason
        assert script.of("a").count("reconcile") == 1


EXITS = ["error", "error after step", "cut", "removed", "stop", "exit", "group", "swallowed"]


async def go(operation: Any, way: str) -> None:
    """Leave *operation* in that way."""
    if way in ("removed", "stop"):
        await trio.sleep_forever()
    if way == "cut":
        async with operation.critical(budget=1.0):
            await trio.sleep_forever()
    if way == "exit":
        raise SystemExit(3)
    if way == "group":
        raise ExceptionGroup("several", [OSError(5, "a"), ValueError("b")])
    raise OSError(5, "busy")


@pytest.mark.parametrize("way", EXITS)
async def test_every_exit_leaves_the_journal_consistent(
    tmp_path: Path, autojump_clock: MockClock, way: str
) -> None:
    """However a run leaves its operation, memory and disk agree on what is open of the key."""
    script = Actor()

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    async def act(request: Any) -> Result:
        try:
            async with request.operation("apply") as operation:
                if way != "error":
                    await operation.step("one", nothing)
                await go(operation, way)
        except OSError:
            if way != "swallowed":
                raise
        return done()

    script.acts["a"] = act
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"), thing("b"))
        await made.settle()
        if way == "removed":
            made.declare(thing("b"))
            await trio.sleep(10.5)
        elif way == "stop":
            await made.signal()
            await trio.sleep(10.5)
        else:
            await trio.sleep(1.1)
        record = made.host.operations.journal.find_by_key(key("a"))
        assert (record is None) == (way == "error")
        consistent(made)
        assert script.of("b") == ["reconcile"]


async def test_a_cancelled_begin_leaves_nothing_open(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Cancelled while its intent is on its way, an operation is open for nobody afterwards."""
    script = Actor()

    async def act(request: Any) -> Result:
        with trio.move_on_after(0) as scope:
            async with request.operation("apply"):
                pytest.fail("it was cancelled before")
        assert scope.cancelled_caught
        return done()

    script.acts["a"] = act
    async with revived(tmp_path, script) as made:
        made.declare(thing("a"))
        await trio.sleep(1)
        assert made.host.operations.journal.find_by_key(key("a")) is None
        consistent(made)
