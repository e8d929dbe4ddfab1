"""C13: a reload swaps in one step what has changed, and nothing else."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import thing
from trio.testing import MockClock
from whole_daemon import PLUGIN, World

from reconciled.api import Result, done, retry, terminal
from reconciled.core.stages import Stage
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.daemon import reload

FAST = "{reconciler: 'mine:ThingReconciler', concurrency: 9"


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


async def test_c13_unchanged_controllers_run_on_untouched(
    world: World, autojump_clock: MockClock
) -> None:
    """A reload that changes one controller leaves the other's runs, sources and object alone."""
    world.configure("a", "b")
    world.declared = {"a": [thing("x")], "b": [thing("y")]}
    world.acts = {"a/x": hang, "b/y": hang}
    async with world.running() as daemon:
        before = dict(daemon.controllers)
        world.configure("a", f"b: {FAST}}}")
        await world.reload()
        (line,) = world.lines("reload.done")
        assert (line["kept"], line["started"], line["left"]) == (["a"], ["b"], [])
        assert daemon.controllers["a"] is before["a"]
        assert daemon.controllers["b"] is not before["b"]
        assert [len(world.sources[name]) for name in "ab"] == [1, 2]
        assert before["a"].stop.stage is Stage.RUNNING
        await trio.sleep(60)
        assert world.ran.count("a/x") == 1


async def test_c13_a_reload_of_the_same_changes_nothing(
    world: World, autojump_clock: MockClock
) -> None:
    """Comments, moved lines and a SIGHUP for nothing start and stop no controller."""
    world.configure("a", "b")
    async with world.running() as daemon:
        before = dict(daemon.controllers)
        world.config.write_text("# a comment\n" + world.config.read_text())
        await world.reload()
        assert daemon.controllers == before
        assert world.lines("reload.done")[0]["kept"] == ["a", "b"]


async def test_c13_a_changed_controller_ends_in_stages_beside_its_successor(
    world: World, autojump_clock: MockClock
) -> None:
    """The old runs drain, the new controller runs other keys meanwhile, and no key runs twice."""
    world.configure("a")
    world.declared["a"] = [thing("old"), thing("critical")]
    ended: list[float] = []

    async def critical(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(45)
            ended.append(trio.current_time())
        return done()

    world.acts = {"a/old": hang, "a/critical": critical}
    async with world.running() as daemon:
        old, began = daemon.controllers["a"], trio.current_time()
        world.acts = {}
        world.configure(f"a: {FAST}}}")
        world.declared["a"] = [thing("old"), thing("critical"), thing("fresh")]
        await world.reload()
        assert "a/fresh" in world.ran
        assert world.going == {"a/old", "a/critical"}
        await trio.sleep(9.9)
        assert world.going == {"a/old", "a/critical"}
        await trio.sleep(0.2)
        # Cancelled with the end of its drain, and at once run under the new configuration.
        assert world.going == {"a/critical"}
        assert world.ran.count("a/old") == 2
        await trio.sleep(40)
        assert ended == [began + 45]
        assert world.ran.count("a/critical") == 2
        assert old.ended.is_set()
        assert old.stop not in daemon.context.stop.children
        assert daemon.context.stop.stage is Stage.RUNNING
    assert world.code == 0


async def test_c13_a_changed_plugin_file_is_loaded_anew(
    world: World, autojump_clock: MockClock
) -> None:
    """A controller whose plugin's code has changed is started again although its lines have not."""
    world.configure("a", "b: {reconciler: 'other:ThingReconciler'}")
    world.plugin("other", PLUGIN)
    async with world.running() as daemon:
        before = dict(daemon.controllers)
        world.plugin("other", PLUGIN + "\nVERSION = 2\n")
        await world.reload()
        assert daemon.controllers["a"] is before["a"]
        assert daemon.controllers["b"] is not before["b"]


def damaged(world: World) -> None:
    world.config.write_text(world.config.read_text() + "\n  a: [")


def misspelt(world: World) -> None:
    world.config.write_text(world.config.read_text().replace("watch", "wacth"))


def unknown_plugin(world: World) -> None:
    world.configure("a: {reconciler: 'mine:Unknown'}", "b")


def missing(world: World) -> None:
    world.config.unlink()


def a_directory(world: World) -> None:
    world.config.unlink()
    world.config.mkdir()


def no_text(world: World) -> None:
    world.config.write_bytes(b"\x00\xff\xfe")


def bad_include(world: World) -> None:
    world.configure("a", f"b: {FAST}}}")
    (world.root / "more.d").mkdir()
    (world.root / "more.d" / "x.yaml").write_text("controllers: {c: {reconciler: nope}}")
    (world.root / "more.d" / "x.yaml").chmod(0o600)
    world.config.write_text("include: [more.d/*.yaml]\n" + world.config.read_text())


def other_state(world: World) -> None:
    world.configure("a", f"b: {FAST}}}", state=world.root / "elsewhere")


@pytest.mark.parametrize(
    "damage",
    [damaged, misspelt, unknown_plugin, missing, a_directory, no_text, bad_include, other_state],
    ids=lambda damage: damage.__name__,
)
async def test_c13_a_bad_configuration_changes_nothing(
    world: World, autojump_clock: MockClock, damage: Callable[[World], None]
) -> None:
    """Whatever is wrong with the new one is told with its place, and the old one runs on whole."""
    world.configure("a", "b")
    world.declared["a"] = [thing("x")]
    async with world.running() as daemon:
        before, config = dict(daemon.controllers), daemon.reloader.config
        damage(world)
        await world.reload()
        assert daemon.controllers == before
        assert daemon.reloader.config is config
        assert all(each.stop.stage is Stage.RUNNING for each in before.values())
        problems = world.lines("config.invalid")
        assert str(world.root) in problems[0]["at"]
        (line,) = world.lines("reload.failed")
        assert line["problems"] == len(problems)
        assert world.lines("reload.done") == []
        assert list((world.root).glob("elsewhere")) == []
        # And it can be put right.
        if world.config.is_dir():
            world.config.rmdir()
        world.configure("a", f"b: {FAST}}}")
        await world.reload()
        assert world.lines("reload.done")[0]["started"] == ["b"]
    assert world.code == 0


async def test_c13_a_broken_plugin_stalls_its_controller_alone(
    world: World, autojump_clock: MockClock
) -> None:
    """A plugin that breaks stalls its own controller; the other changes of the reload count."""
    world.configure("a", "b: {reconciler: 'other:ThingReconciler'}")
    world.plugin("other", PLUGIN)
    world.declared = {"a": [thing("x")], "b": [thing("y")]}
    async with world.running() as daemon:
        world.plugin("other", "import sys; sys.exit(3)")
        world.configure(f"a: {FAST}}}", "b: {reconciler: 'other:ThingReconciler'}")
        await world.reload()
        assert list(daemon.controllers) == ["a"]
        assert world.lines("controller.stalled")[0]["controller"] == "b"
        assert world.lines("reload.done")[0]["stalled"] == ["b"]
        # It has not left: its keys are not called abandoned.
        assert world.lines("controller.removed") == []
        world.plugin("other", PLUGIN)
        await world.reload()
        assert sorted(daemon.controllers) == ["a", "b"]
        assert world.ran.count("b/y") == 2


async def test_c13_a_controller_that_leaves_leaves_its_keys(
    world: World, autojump_clock: MockClock
) -> None:
    """What it applied stays and is named, nothing is removed, and it may come back."""
    world.configure("a", "b: {reconciler: 'mine:Removing'}")
    world.declared = {"a": [thing("x")], "b": [thing("y"), thing("z")]}
    async with world.running() as daemon:
        world.configure("a")
        await world.reload()
        (line,) = world.lines("controller.removed")
        assert (line["controller"], line["count"], line["keys"]) == ("b", 2, ["b/y", "b/z"])
        assert list(daemon.controllers) == ["a"]
        assert world.removed == []
        assert {"b/y", "b/z"} <= daemon.store.all_keys()
        assert [lane.name for lane in daemon.context.queue] == ["a"]
        world.configure("a", "b: {reconciler: 'mine:Removing'}")
        world.declared["b"] = [thing("y")]
        await world.reload()
        assert world.removed == ["b/z"]


async def test_c13_limits_and_level_follow(world: World, autojump_clock: MockClock) -> None:
    """The log's level, the queue's limit and the limits of every stop are those of the new one."""
    world.configure("a")
    world.declared["a"] = [thing("x")]
    world.acts["a/x"] = hang
    async with world.running() as daemon:
        world.configure("a", level="debug", limit=3, stop="{drain: 2s, critical: 30s, cleanup: 1s}")
        await world.reload()
        assert world.lines("reload.done")[0]["kept"] == ["a"]
        assert daemon.logs.level == "debug"
        assert daemon.context.queue.limit == 3
        assert [stop.limits.drain for stop in daemon.context.stop.iter_tree()] == [2, 2]
        began = trio.current_time()
        world.signal()
    assert world.ended_at == pytest.approx(began + 2, abs=0.1)


@pytest.mark.parametrize("ending", [retry("no"), terminal("never")], ids=["retry", "terminal"])
async def test_c13_a_reload_does_what_a_restart_does(
    world: World, autojump_clock: MockClock, ending: Result
) -> None:
    """A key that failed under the old configuration is tried at once under the new one.

    Also one whose spec had been applied before it failed, which is no change of the spec.
    """
    world.configure("a")
    world.declared["a"] = [thing("x"), thing("y")]
    async with world.running():
        assert sorted(world.ran) == ["a/x", "a/y"]

        async def fail(_: Any) -> Result:
            return ending

        world.acts["a/x"] = fail
        lane = world.daemon.controllers["a"].lane
        for _ in range(12 if ending.outcome.value == "retry" else 1):
            lane.add("a/x", trio.current_time(), "asked")  # type: ignore[arg-type]
            await world.settle()
        world.acts.clear()
        world.ran.clear()
        world.configure(f"a: {FAST}}}")
        await world.reload()
        assert sorted(world.ran) == ["a/x", "a/y"]


async def test_c13_a_removal_that_goes_on_leaves_nothing_behind(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key whose removal ends under the old controller is gone in the new one too (inv. 14)."""
    go_on = trio.Event()

    async def slowly(_: Any, __: Any, request: Any) -> Result:
        world.removed.append(request.key)
        await go_on.wait()
        return done()

    monkeypatch.setattr(World, "remove", slowly)
    world.configure("a: {reconciler: 'mine:Removing'}")
    world.declared["a"] = [thing("x"), thing("y")]
    async with world.running() as daemon:
        world.say("a", thing("y"))
        await world.settle()
        assert world.removed == ["a/x"]
        world.configure("a: {reconciler: 'mine:Removing', concurrency: 9}")
        await world.reload()
        go_on.set()
        await world.settle()
        running = daemon.controllers["a"]
        assert running.removing == set()
        assert running.desired.owned == {"a/y"}
        assert "a/x" not in running.statuses
        assert "a/x" not in daemon.store.all_keys()


async def test_c13_held_removals_outlive_a_reload(world: World, autojump_clock: MockClock) -> None:
    """Removals that wait for a person wait on under the new controller."""
    world.configure("a: {reconciler: 'mine:Removing'}")
    world.declared["a"] = [thing(f"k{number}") for number in range(8)]
    async with world.running() as daemon:
        world.say("a", thing("k0"))
        await world.settle()
        world.configure("a: {reconciler: 'mine:Removing', concurrency: 9}")
        await world.reload()
        assert world.removed == []
        assert len(world.lines("removals.released")) == 0
        held = daemon.controllers["a"].desired.guard.held
        assert held is not None
        assert len(held.keys) == 7


async def test_c13_many_requests_are_one_reload(world: World, autojump_clock: MockClock) -> None:
    """A burst of SIGHUP is one reload, and one more for what came during it."""
    world.configure("a")
    async with world.running():
        for _ in range(50):
            world.signal(signal.SIGHUP)
        await world.settle()
        assert 1 <= len(world.lines("reload.done")) <= 2


async def test_c13_during_a_stop_a_reload_is_refused(
    world: World, autojump_clock: MockClock
) -> None:
    """SIGHUP after the instant says so and changes nothing."""
    world.configure("a")
    world.declared["a"] = [thing("x")]
    world.acts["a/x"] = hang
    async with world.running() as daemon:
        before = daemon.controllers["a"]
        world.signal()
        await world.settle()
        world.configure(f"a: {FAST}}}")
        await world.reload()
        assert world.lines("reload.refused")
        assert daemon.controllers["a"] is before
        assert world.lines("reload.done") == []
    assert world.code == 0


@pytest.mark.parametrize("seed", range(40))
async def test_c13_a_stop_may_meet_a_reload_anywhere(
    world: World, autojump_clock: MockClock, seed: int
) -> None:
    """A signal at any step of a swap ends the daemon in stages with 0, and nothing starts late."""
    rng = random.Random(seed)
    world.configure("a", "b", "c")
    for name in "abc":
        world.declared[name] = [thing(f"k{number}") for number in range(3)]
        world.acts[f"{name}/k0"] = hang
    async with world.running() as daemon:
        world.configure(*(f"{name}: {FAST}}}" for name in "abcd"))
        world.signal(signal.SIGHUP)
        for _ in range(rng.randrange(20)):
            await trio.lowlevel.checkpoint()
        if rng.random() < 0.5:
            daemon.signals.stop_requested_at = (
                0.0  # the flag, and only later what the loop does about it
            )
            for _ in range(rng.randrange(10)):
                await trio.lowlevel.checkpoint()
            daemon.signals.stop_requested_at = None
        world.signal()
        late = len(world.ran)
        await trio.sleep(30)
        assert len(world.ran) == late
    assert world.code == 0, f"seed {seed}"


@pytest.mark.parametrize("at", ["a", "b", "c"])
async def test_c13_a_stop_in_the_midst_of_a_swap(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """When the stop begins while the first, second or last controller starts, none follows it."""
    world.configure("a", "b", "c")
    real = Controller.supervise_runs

    async def hold(  # noqa: ASYNC128 - the real one calls it
        self: Controller, *, task_status: trio.TaskStatus[None]
    ) -> None:
        if self.name == at:
            world.signal()
            for _ in range(20):  # so that whatever closes has closed
                await trio.lowlevel.checkpoint()
        await real(self, task_status=task_status)

    async with world.running() as daemon:
        monkeypatch.setattr(Controller, "supervise_runs", hold)
        world.configure(*(f"{name}: {FAST}}}" for name in "abc"))
        await world.reload()
        await trio.sleep(1)
        assert world.code == 0
        assert set(daemon.controllers) <= set("abc"[: "abc".index(at) + 1])
    assert not world.lines("daemon.crashed")


def test_what_was_only_moved_is_the_same(tmp_path: Path) -> None:
    """Where a controller is written takes no part in its comparison."""
    from reconciled.config.model import ControllerConfig

    ignored = {field.name for field in attrs.fields(ControllerConfig) if not field.eq}
    assert ignored == {"origin", "positions", "path"}


async def test_a_fault_of_a_reload_ends_nothing(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody foresaw while a new configuration is read fails that reload alone."""
    world.configure("a")
    async with world.running() as daemon:

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(reload, "load", fail)
            outcome = await daemon.reloader.request().wait_finished()
        assert "ZeroDivisionError" in outcome.reason
        assert "Traceback" in str(world.lines("reload.failed"))
        assert (await daemon.reloader.request().wait_finished()).done


async def test_a_reload_without_a_thread(
    world: World, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of processes a reload fails with the remedy, and the daemon works on."""
    world.configure("a")
    async with world.running() as daemon:

        async def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(trio.to_thread, "run_sync", refuse)
            outcome = await daemon.reloader.request().wait_finished()
        assert "raise TasksMax=" in outcome.reason
        assert world.lines("reload.failed")
        assert (await daemon.reloader.request().wait_finished()).done
