"""``run --once``: each key is reconciled once, then the daemon stops in stages."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

from typing import Any

import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import WholeDaemon

from reconciled.api import Result, after, done, retry, terminal
from reconciled.core.exit_codes import DONE, NOT_DONE
from reconciled.core.sources import Unavailable


def failing(times: int, reason: str = "no network") -> Any:
    """An act that fails *times* times, then is done."""
    left = times

    async def act(_: Any) -> Result:
        nonlocal left
        left -= 1
        return retry(reason) if left >= 0 else done()

    return act


async def test_it_ends_when_every_key_is_done(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """done(), after() and a success at the third attempt end it with 0, without a signal."""
    whole_daemon.configure("a", "b")
    whole_daemon.declared = {"a": [thing("x"), thing("y")], "b": [thing("z")]}

    async def later(_: Any) -> Result:
        return after("1h")

    whole_daemon.acts = {"a/y": later, "b/z": failing(2)}
    async with whole_daemon.running(once=True) as daemon:
        await trio.sleep(60)
        assert whole_daemon.exit_code == 0
        assert daemon.signals.stop_requested_at is None
    assert sorted(whole_daemon.ran) == ["a/x", "a/y", "b/z", "b/z", "b/z"]
    assert whole_daemon.once_exit_code == DONE
    # With the last key: there is no drain.
    assert whole_daemon.ended_at < 5


async def test_keys_that_are_not_done_are_named(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Three failures in a row and a terminal one end with 4, each key with its reason."""
    whole_daemon.configure("a")

    async def never(_: Any) -> Result:
        return terminal("no such user")

    whole_daemon.declared["a"] = [thing("good"), thing("bad"), thing("never")]
    whole_daemon.acts = {"a/bad": failing(99), "a/never": never}
    async with whole_daemon.running(once=True):
        await trio.sleep(60)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.ran.count("a/bad") == 3
    assert whole_daemon.once_exit_code == NOT_DONE
    told = {line["key"]: line["reason"] for line in whole_daemon.log_lines("once.not_done")}
    assert told == {"a/bad": "no network", "a/never": "no such user"}


async def test_a_key_that_recovers_in_time_is_done(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Three failures count only if the key is still failing at the end."""
    whole_daemon.configure("a")

    async def slow(_: Any) -> Result:
        await trio.sleep(90)
        return done()

    whole_daemon.declared["a"] = [thing("late"), thing("slow")]
    whole_daemon.acts = {"a/late": failing(4), "a/slow": slow}
    async with whole_daemon.running(once=True):
        await trio.sleep(200)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.ran.count("a/late") == 5
    assert whole_daemon.once_exit_code == DONE


async def test_the_declaration_is_applied_after_a_recovery(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A recovered key counts only when its present declaration is applied as well."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x", 1)]
    seen = []

    async def nothing() -> None:
        await trio.lowlevel.checkpoint()

    async def act(request: Any) -> Result:
        seen.append(request.spec.value)
        async with request.operation("write") as operation:
            await operation.step("one", nothing)
            if len(seen) == 1:
                whole_daemon.declare("a", thing("x", 2))
                raise OSError("no network")
        return done()

    whole_daemon.acts = {"a/x": act}
    async with whole_daemon.running(once=True):
        await trio.sleep(60)
        assert whole_daemon.exit_code == 0
    assert seen == [1, 1, 2]
    assert whole_daemon.once_exit_code == DONE


async def test_timers_do_not_count(whole_daemon: WholeDaemon, autojump_clock: MockClock) -> None:
    """``run --once`` reconciles what is declared, and waits for no schedule."""
    whole_daemon.timers.add("a")
    whole_daemon.configure("a")
    async with whole_daemon.running(once=True) as daemon:
        names = [watcher.name for watcher in daemon.controllers["a"].watchers]
        assert names == ["source of a"]
        await trio.sleep(0.1)
        assert whole_daemon.exit_code == 0


async def test_a_failed_removal_is_retried(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end before a retried removal is done."""
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing("x"), thing("y")]
    async with whole_daemon.running(once=True):
        await trio.sleep(1)
    whole_daemon.declared["a"] = [thing("y")]
    act = failing(2)

    async def remove(self: WholeDaemon, _: Any, request: Any) -> Any:
        self.removed.append(request.key)
        return await act(request)

    monkeypatch.setattr(WholeDaemon, "remove", remove)
    async with whole_daemon.running(once=True):
        await trio.sleep(60)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.removed == ["a/x"] * 3
    assert whole_daemon.once_exit_code == DONE


async def test_removals_are_carried_out(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Keys in the store that are not declared are removed before it ends."""
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing("x"), thing("y")]
    async with whole_daemon.running(once=True):
        await trio.sleep(1)
    whole_daemon.declared["a"] = [thing("y")]
    async with whole_daemon.running(once=True):
        await trio.sleep(1)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.removed == ["a/x"]
    assert whole_daemon.once_exit_code == DONE


async def test_held_removals_are_not_done(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Held removals end it with 4, each key named."""
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing(f"k{number}") for number in range(8)]
    async with whole_daemon.running(once=True):
        await trio.sleep(1)
    whole_daemon.declared["a"] = [thing("k0")]
    async with whole_daemon.running(once=True):
        await trio.sleep(1)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.removed == []
    assert whole_daemon.once_exit_code == NOT_DONE
    assert len(whole_daemon.log_lines("once.not_done")) == 7


async def test_a_source_that_cannot_be_read_is_not_done(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A source that is unavailable or silent for 10 s: code 4, with the source and the reason."""
    whole_daemon.configure("a", "b", "c")
    whole_daemon.declared["a"] = [thing("x")]

    async def unavailable(report: Any) -> None:
        report(Unavailable("it is missing"))
        await trio.sleep_forever()

    async def silent(_: Any) -> None:
        await trio.sleep_forever()

    whole_daemon.source_runs = {"b": [unavailable], "c": [silent]}
    async with whole_daemon.running(once=True):
        await trio.sleep(30)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.ran == ["a/x"]
    assert whole_daemon.once_exit_code == NOT_DONE
    told = {
        line["source"]: line["reason"] for line in whole_daemon.log_lines("once.source_incomplete")
    }
    assert told == {
        "b: source of b": "it is missing",
        "c: source of c": "has not been read yet",
    }


async def test_a_signal_before_the_end_is_not_done(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """After a signal, keys without an outcome are named; an interrupted run is not a failure."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x"), thing("slow")]

    async def hang(_: Any) -> Result:
        await trio.sleep_forever()
        return done()

    whole_daemon.acts["a/slow"] = hang
    async with whole_daemon.running(once=True):
        await trio.sleep(1)
        assert whole_daemon.exit_code is None
        whole_daemon.signal()
    assert whole_daemon.once_exit_code == NOT_DONE
    told = {line["key"]: line["reason"] for line in whole_daemon.log_lines("once.not_done")}
    assert told == {"a/slow": "stopped before it was reconciled"}


async def test_nothing_declared_is_done(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Without keys, and without controllers, it ends at once with 0."""
    whole_daemon.configure("a")
    async with whole_daemon.running(once=True):
        await trio.sleep(0.1)
        assert whole_daemon.exit_code == 0
    assert whole_daemon.once_exit_code == DONE
