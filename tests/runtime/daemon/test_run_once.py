"""``run --once``: each key has its turn, then the staged stop."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from typing import Any

import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import World

from reconciled.api import Result, after, done, retry, terminal
from reconciled.core.sources import Unavailable
from reconciled.runtime.daemon.startup import DONE, NOT_DONE


def failing(times: int, reason: str = "no network") -> Any:
    """An act that fails so often, then is done."""
    left = times

    async def act(_: Any) -> Result:
        nonlocal left
        left -= 1
        return retry(reason) if left >= 0 else done()

    return act


async def test_it_ends_when_every_key_is_done(world: World, autojump_clock: MockClock) -> None:
    """done(), after() and a success at the third try end it with 0; nobody has to signal."""
    world.configure("a", "b")
    world.declared = {"a": [thing("x"), thing("y")], "b": [thing("z")]}

    async def later(_: Any) -> Result:
        return after("1h")

    world.acts = {"a/y": later, "b/z": failing(2)}
    async with world.running(once=True) as daemon:
        await trio.sleep(60)
        assert world.code == 0
        assert daemon.signals.stop_requested_at is None
    assert sorted(world.ran) == ["a/x", "a/y", "b/z", "b/z", "b/z"]
    assert world.code_of_once == DONE
    # With the last key: there is nothing to drain.
    assert world.ended_at < 5


async def test_keys_that_are_not_done_are_named(world: World, autojump_clock: MockClock) -> None:
    """Three failures in a row and a terminal one end with 4, each key with its reason."""
    world.configure("a")

    async def never(_: Any) -> Result:
        return terminal("no such user")

    world.declared["a"] = [thing("good"), thing("bad"), thing("never")]
    world.acts = {"a/bad": failing(99), "a/never": never}
    async with world.running(once=True):
        await trio.sleep(60)
        assert world.code == 0
    assert world.ran.count("a/bad") == 3
    assert world.code_of_once == NOT_DONE
    told = {line["key"]: line["reason"] for line in world.lines("once.not_done")}
    assert told == {"a/bad": "no network", "a/never": "no such user"}


async def test_a_key_that_comes_right_in_time_is_done(
    world: World, autojump_clock: MockClock
) -> None:
    """Three failures count only if the key is still failing at the end."""
    world.configure("a")

    async def slow(_: Any) -> Result:
        await trio.sleep(90)
        return done()

    world.declared["a"] = [thing("late"), thing("slow")]
    world.acts = {"a/late": failing(4), "a/slow": slow}
    async with world.running(once=True):
        await trio.sleep(200)
        assert world.code == 0
    assert world.ran.count("a/late") == 5
    assert world.code_of_once == DONE


async def test_timers_do_not_count(world: World, autojump_clock: MockClock) -> None:
    """A single run takes what is declared, and waits for no schedule."""
    world.timers.add("a")
    world.configure("a")
    async with world.running(once=True) as daemon:
        names = [watcher.name for watcher in daemon.controllers["a"].watchers]
        assert names == ["source of a"]
        await trio.sleep(0.1)
        assert world.code == 0


async def test_a_removal_that_fails_once_has_another_turn(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end before a removal is done that had to be tried again."""
    world.configure("a: {reconciler: 'mine:Removing'}")
    world.declared["a"] = [thing("x"), thing("y")]
    async with world.running(once=True):
        await trio.sleep(1)
    world.declared["a"] = [thing("y")]
    act = failing(2)

    async def remove(self: World, _: Any, request: Any) -> Any:
        self.removed.append(request.key)
        return await act(request)

    monkeypatch.setattr(World, "remove", remove)
    async with world.running(once=True):
        await trio.sleep(60)
        assert world.code == 0
    assert world.removed == ["a/x"] * 3
    assert world.code_of_once == DONE


async def test_removals_have_their_turn(world: World, autojump_clock: MockClock) -> None:
    """What the store knows and nobody declares is removed before it ends."""
    world.configure("a: {reconciler: 'mine:Removing'}")
    world.declared["a"] = [thing("x"), thing("y")]
    async with world.running(once=True):
        await trio.sleep(1)
    world.declared["a"] = [thing("y")]
    async with world.running(once=True):
        await trio.sleep(1)
        assert world.code == 0
    assert world.removed == ["a/x"]
    assert world.code_of_once == DONE


async def test_held_removals_are_not_done(world: World, autojump_clock: MockClock) -> None:
    """Removals that wait for a person end it with 4, each key named."""
    world.configure("a: {reconciler: 'mine:Removing'}")
    world.declared["a"] = [thing(f"k{number}") for number in range(8)]
    async with world.running(once=True):
        await trio.sleep(1)
    world.declared["a"] = [thing("k0")]
    async with world.running(once=True):
        await trio.sleep(1)
        assert world.code == 0
    assert world.removed == []
    assert world.code_of_once == NOT_DONE
    assert len(world.lines("once.not_done")) == 7


async def test_a_source_that_cannot_be_read_is_not_done(
    world: World, autojump_clock: MockClock
) -> None:
    """Unavailable, or silent for ten seconds: 4, with the source and why; the others are done."""
    world.configure("a", "b", "c")
    world.declared["a"] = [thing("x")]

    async def unavailable(report: Any) -> None:
        report(Unavailable("it is missing"))
        await trio.sleep_forever()

    async def silent(_: Any) -> None:
        await trio.sleep_forever()

    world.lives = {"b": [unavailable], "c": [silent]}
    async with world.running(once=True):
        await trio.sleep(30)
        assert world.code == 0
    assert world.ran == ["a/x"]
    assert world.code_of_once == NOT_DONE
    told = {line["source"]: line["reason"] for line in world.lines("once.source_incomplete")}
    assert told == {
        "b: source of b": "it is missing",
        "c: source of c": "has not been read yet",
    }


async def test_a_signal_before_the_end_is_not_done(world: World, autojump_clock: MockClock) -> None:
    """Stopped from outside, keys that had no turn are named; an interrupted one is no failure."""
    world.configure("a")
    world.declared["a"] = [thing("x"), thing("slow")]

    async def hang(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    world.acts["a/slow"] = hang
    async with world.running(once=True):
        await trio.sleep(1)
        assert world.code is None
        world.signal()
    assert world.code_of_once == NOT_DONE
    told = {line["key"]: line["reason"] for line in world.lines("once.not_done")}
    assert told == {"a/slow": "the stop came first"}


async def test_nothing_declared_is_done(world: World, autojump_clock: MockClock) -> None:
    """Without keys, and without controllers, it ends at once with 0."""
    world.configure("a")
    async with world.running(once=True):
        await trio.sleep(0.1)
        assert world.code == 0
    assert world.code_of_once == DONE
