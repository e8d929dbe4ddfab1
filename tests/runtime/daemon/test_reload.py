"""C13: a reload replaces what has changed, in one step, and nothing else."""

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
from whole_daemon import PLUGIN, WholeDaemon

from reconciled.api import Result, done, retry, terminal
from reconciled.core.stages import Stage
from reconciled.runtime.controllers.controller import Controller
from reconciled.runtime.daemon import reload

FAST = "{reconciler: 'mine:ThingReconciler', concurrency: 9"


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


async def test_c13_unchanged_controllers_run_on_untouched(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A reload that changes one controller does not affect runs and sources of the others."""
    whole_daemon.configure("a", "b")
    whole_daemon.declared = {"a": [thing("x")], "b": [thing("y")]}
    whole_daemon.acts = {"a/x": hang, "b/y": hang}
    async with whole_daemon.running() as daemon:
        before = dict(daemon.controllers)
        whole_daemon.configure("a", f"b: {FAST}}}")
        await whole_daemon.reload()
        (line,) = whole_daemon.log_lines("reload.done")
        assert (line["kept"], line["started"], line["removed"]) == (["a"], ["b"], [])
        assert daemon.controllers["a"] is before["a"]
        assert daemon.controllers["b"] is not before["b"]
        assert [len(whole_daemon.sources[name]) for name in "ab"] == [1, 2]
        assert before["a"].stop.stage is Stage.RUNNING
        await trio.sleep(60)
        assert whole_daemon.ran.count("a/x") == 1


async def test_c13_a_reload_of_the_same_changes_nothing(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Comments, moved lines and a SIGHUP without a change start and stop no controller."""
    whole_daemon.configure("a", "b")
    async with whole_daemon.running() as daemon:
        before = dict(daemon.controllers)
        whole_daemon.config.write_text("# a comment\n" + whole_daemon.config.read_text())
        await whole_daemon.reload()
        assert daemon.controllers == before
        assert whole_daemon.log_lines("reload.done")[0]["kept"] == ["a", "b"]


async def test_c13_a_changed_controller_ends_in_stages_beside_its_successor(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The old runs drain while the new controller runs other keys, and no key runs twice."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("old"), thing("critical")]
    ended: list[float] = []

    async def critical(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(45)
            ended.append(trio.current_time())
        return done()

    whole_daemon.acts = {"a/old": hang, "a/critical": critical}
    async with whole_daemon.running() as daemon:
        old, began = daemon.controllers["a"], trio.current_time()
        whole_daemon.acts = {}
        whole_daemon.configure(f"a: {FAST}}}")
        whole_daemon.declared["a"] = [thing("old"), thing("critical"), thing("fresh")]
        await whole_daemon.reload()
        assert "a/fresh" in whole_daemon.ran
        assert whole_daemon.active == {"a/old", "a/critical"}
        await trio.sleep(9.9)
        assert whole_daemon.active == {"a/old", "a/critical"}
        await trio.sleep(0.2)
        # Cancelled at the end of its drain, and run at once under the new configuration.
        assert whole_daemon.active == {"a/critical"}
        assert whole_daemon.ran.count("a/old") == 2
        await trio.sleep(40)
        assert ended == [began + 45]
        assert whole_daemon.ran.count("a/critical") == 2
        assert old.ended.is_set()
        assert old.stop not in daemon.context.stop.children
        assert daemon.context.stop.stage is Stage.RUNNING
    assert whole_daemon.exit_code == 0


async def test_c13_a_changed_plugin_file_is_loaded_anew(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A controller is replaced if the code of its plugin has changed."""
    whole_daemon.configure("a", "b: {reconciler: 'other:ThingReconciler'}")
    whole_daemon.plugin("other", PLUGIN)
    async with whole_daemon.running() as daemon:
        before = dict(daemon.controllers)
        whole_daemon.plugin("other", PLUGIN + "\nVERSION = 2\n")
        await whole_daemon.reload()
        assert daemon.controllers["a"] is before["a"]
        assert daemon.controllers["b"] is not before["b"]


def damaged(whole_daemon: WholeDaemon) -> None:
    whole_daemon.config.write_text(whole_daemon.config.read_text() + "\n  a: [")


def misspelt(whole_daemon: WholeDaemon) -> None:
    whole_daemon.config.write_text(whole_daemon.config.read_text().replace("watch", "wacth"))


def unknown_plugin(whole_daemon: WholeDaemon) -> None:
    whole_daemon.configure("a: {reconciler: 'mine:Unknown'}", "b")


def missing(whole_daemon: WholeDaemon) -> None:
    whole_daemon.config.unlink()


def a_directory(whole_daemon: WholeDaemon) -> None:
    whole_daemon.config.unlink()
    whole_daemon.config.mkdir()


def no_text(whole_daemon: WholeDaemon) -> None:
    whole_daemon.config.write_bytes(b"\x00\xff\xfe")


def bad_include(whole_daemon: WholeDaemon) -> None:
    whole_daemon.configure("a", f"b: {FAST}}}")
    (whole_daemon.root / "more.d").mkdir()
    (whole_daemon.root / "more.d" / "x.yaml").write_text("controllers: {c: {reconciler: nope}}")
    (whole_daemon.root / "more.d" / "x.yaml").chmod(0o600)
    whole_daemon.config.write_text("include: [more.d/*.yaml]\n" + whole_daemon.config.read_text())


def other_state(whole_daemon: WholeDaemon) -> None:
    whole_daemon.configure("a", f"b: {FAST}}}", state=whole_daemon.root / "elsewhere")


@pytest.mark.parametrize(
    "damage",
    [damaged, misspelt, unknown_plugin, missing, a_directory, no_text, bad_include, other_state],
    ids=lambda damage: damage.__name__,
)
async def test_c13_a_bad_configuration_changes_nothing(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, damage: Callable[[WholeDaemon], None]
) -> None:
    """Each problem of the new one is logged with its origin, and the old one stays in force."""
    whole_daemon.configure("a", "b")
    whole_daemon.declared["a"] = [thing("x")]
    async with whole_daemon.running() as daemon:
        before, config = dict(daemon.controllers), daemon.reloader.config
        damage(whole_daemon)
        await whole_daemon.reload()
        assert daemon.controllers == before
        assert daemon.reloader.config is config
        assert all(each.stop.stage is Stage.RUNNING for each in before.values())
        problems = whole_daemon.log_lines("config.invalid")
        assert str(whole_daemon.root) in problems[0]["at"]
        (line,) = whole_daemon.log_lines("reload.failed")
        assert line["problems"] == len(problems)
        assert whole_daemon.log_lines("reload.done") == []
        assert list((whole_daemon.root).glob("elsewhere")) == []
        # A corrected one is accepted.
        if whole_daemon.config.is_dir():
            whole_daemon.config.rmdir()
        whole_daemon.configure("a", f"b: {FAST}}}")
        await whole_daemon.reload()
        assert whole_daemon.log_lines("reload.done")[0]["started"] == ["b"]
    assert whole_daemon.exit_code == 0


async def test_c13_a_broken_plugin_stalls_its_controller_alone(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A broken plugin stalls its own controller; the other changes take effect."""
    whole_daemon.configure("a", "b: {reconciler: 'other:ThingReconciler'}")
    whole_daemon.plugin("other", PLUGIN)
    whole_daemon.declared = {"a": [thing("x")], "b": [thing("y")]}
    async with whole_daemon.running() as daemon:
        whole_daemon.plugin("other", "import sys; sys.exit(3)")
        whole_daemon.configure(f"a: {FAST}}}", "b: {reconciler: 'other:ThingReconciler'}")
        await whole_daemon.reload()
        assert list(daemon.controllers) == ["a"]
        assert whole_daemon.log_lines("controller.stalled")[0]["controller"] == "b"
        assert whole_daemon.log_lines("reload.done")[0]["stalled"] == ["b"]
        # It was not removed from the configuration, so its keys are not logged as left.
        assert whole_daemon.log_lines("controller.removed") == []
        whole_daemon.plugin("other", PLUGIN)
        await whole_daemon.reload()
        assert sorted(daemon.controllers) == ["a", "b"]
        assert whole_daemon.ran.count("b/y") == 2


async def test_c13_a_removed_controller_leaves_its_keys(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """What it applied is logged and not removed, and the controller can be added again."""
    whole_daemon.configure("a", "b: {reconciler: 'mine:Removing'}")
    whole_daemon.declared = {"a": [thing("x")], "b": [thing("y"), thing("z")]}
    async with whole_daemon.running() as daemon:
        whole_daemon.configure("a")
        await whole_daemon.reload()
        (line,) = whole_daemon.log_lines("controller.removed")
        assert (line["controller"], line["count"], line["keys"]) == ("b", 2, ["b/y", "b/z"])
        assert list(daemon.controllers) == ["a"]
        assert whole_daemon.removed == []
        assert {"b/y", "b/z"} <= daemon.store.all_keys()
        assert [lane.name for lane in daemon.context.queue] == ["a"]
        whole_daemon.configure("a", "b: {reconciler: 'mine:Removing'}")
        whole_daemon.declared["b"] = [thing("y")]
        await whole_daemon.reload()
        assert whole_daemon.removed == ["b/z"]


async def test_c13_limits_and_level_follow(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """The log level, the queue's limit and the limits of every stop are the new ones."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    async with whole_daemon.running() as daemon:
        whole_daemon.configure(
            "a", level="debug", limit=3, stop="{drain: 2s, critical: 30s, cleanup: 1s}"
        )
        await whole_daemon.reload()
        assert whole_daemon.log_lines("reload.done")[0]["kept"] == ["a"]
        assert daemon.logs.level == "debug"
        assert daemon.context.queue.limit == 3
        assert [stop.limits.drain for stop in daemon.context.stop.iter_tree()] == [2, 2]
        began = trio.current_time()
        whole_daemon.signal()
    assert whole_daemon.ended_at == pytest.approx(began + 2, abs=0.1)


@pytest.mark.parametrize("ending", [retry("no"), terminal("never")], ids=["retry", "terminal"])
async def test_c13_a_reload_does_what_a_restart_does(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, ending: Result
) -> None:
    """A key that failed under the old configuration is tried at once under the new one.

    Also one whose spec had been applied before it failed, which is no change of the spec.
    """
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x"), thing("y")]
    async with whole_daemon.running():
        assert sorted(whole_daemon.ran) == ["a/x", "a/y"]

        async def fail(_: Any) -> Result:
            return ending

        whole_daemon.acts["a/x"] = fail
        lane = whole_daemon.daemon.controllers["a"].lane
        for _ in range(12 if ending.outcome.value == "retry" else 1):
            lane.add("a/x", trio.current_time(), "asked")  # type: ignore[arg-type]
            await whole_daemon.wait_all_blocked()
        whole_daemon.acts.clear()
        whole_daemon.ran.clear()
        whole_daemon.configure(f"a: {FAST}}}")
        await whole_daemon.reload()
        assert sorted(whole_daemon.ran) == ["a/x", "a/y"]


async def test_c13_a_removal_that_continues_leaves_no_state(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key whose removal ends under the old controller is unknown to the new one (inv. 14)."""
    go_on = trio.Event()

    async def slowly(_: Any, __: Any, request: Any) -> Result:
        whole_daemon.removed.append(request.key)
        await go_on.wait()
        return done()

    monkeypatch.setattr(WholeDaemon, "remove", slowly)
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing("x"), thing("y")]
    async with whole_daemon.running() as daemon:
        whole_daemon.declare("a", thing("y"))
        await whole_daemon.wait_all_blocked()
        assert whole_daemon.removed == ["a/x"]
        whole_daemon.configure("a: {reconciler: 'mine:Removing', concurrency: 9}")
        await whole_daemon.reload()
        go_on.set()
        await whole_daemon.wait_all_blocked()
        running = daemon.controllers["a"]
        assert running.removing == set()
        assert running.desired.owned == {"a/y"}
        assert "a/x" not in running.statuses
        assert "a/x" not in daemon.store.all_keys()


async def test_c13_held_removals_outlive_a_reload(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """Removals that wait for an approval are held by the new controller, too."""
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing(f"k{number}") for number in range(8)]
    async with whole_daemon.running() as daemon:
        whole_daemon.declare("a", thing("k0"))
        await whole_daemon.wait_all_blocked()
        whole_daemon.configure("a: {reconciler: 'mine:Removing', concurrency: 9}")
        await whole_daemon.reload()
        assert whole_daemon.removed == []
        assert len(whole_daemon.log_lines("removals.released")) == 0
        held = daemon.controllers["a"].desired.guard.held
        assert held is not None
        assert len(held.keys) == 7


async def test_c13_a_reload_releases_no_held_removal(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A held set that has shrunk below the limits stays held under the new controller."""
    whole_daemon.configure("a: {reconciler: 'mine:Removing'}")
    whole_daemon.declared["a"] = [thing(f"k{number}") for number in range(8)]
    async with whole_daemon.running() as daemon:
        whole_daemon.declare("a", thing("k0"))
        await whole_daemon.wait_all_blocked()
        whole_daemon.declare("a", *(thing(f"k{number}") for number in range(6)))
        await whole_daemon.wait_all_blocked()
        whole_daemon.configure("a: {reconciler: 'mine:Removing', concurrency: 9}")
        await whole_daemon.reload()
        assert whole_daemon.removed == []
        held = daemon.controllers["a"].desired.guard.held
        assert held is not None
        assert held.keys == ("a/k6", "a/k7")


async def test_c13_many_requests_are_one_reload(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """A burst of SIGHUP is one reload, and one more for those that arrive during it."""
    whole_daemon.configure("a")
    async with whole_daemon.running():
        for _ in range(50):
            whole_daemon.signal(signal.SIGHUP)
        await whole_daemon.wait_all_blocked()
        assert 1 <= len(whole_daemon.log_lines("reload.done")) <= 2


async def test_c13_during_a_stop_a_reload_is_refused(
    whole_daemon: WholeDaemon, autojump_clock: MockClock
) -> None:
    """SIGHUP after a stop signal is logged as refused and changes nothing."""
    whole_daemon.configure("a")
    whole_daemon.declared["a"] = [thing("x")]
    whole_daemon.acts["a/x"] = hang
    async with whole_daemon.running() as daemon:
        before = daemon.controllers["a"]
        whole_daemon.signal()
        await whole_daemon.wait_all_blocked()
        whole_daemon.configure(f"a: {FAST}}}")
        await whole_daemon.reload()
        assert whole_daemon.log_lines("reload.refused")
        assert daemon.controllers["a"] is before
        assert whole_daemon.log_lines("reload.done") == []
    assert whole_daemon.exit_code == 0


@pytest.mark.parametrize("seed", range(40))
async def test_c13_a_stop_may_meet_a_reload_anywhere(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, seed: int
) -> None:
    """A signal at any step of a swap ends the daemon in stages with 0, and nothing starts late."""
    rng = random.Random(seed)
    whole_daemon.configure("a", "b", "c")
    for name in "abc":
        whole_daemon.declared[name] = [thing(f"k{number}") for number in range(3)]
        whole_daemon.acts[f"{name}/k0"] = hang
    async with whole_daemon.running() as daemon:
        whole_daemon.configure(*(f"{name}: {FAST}}}" for name in "abcd"))
        whole_daemon.signal(signal.SIGHUP)
        for _ in range(rng.randrange(20)):
            await trio.lowlevel.checkpoint()
        if rng.random() < 0.5:
            daemon.signals.stop_requested_at = (
                0.0  # the flag, and only later what the loop does about it
            )
            for _ in range(rng.randrange(10)):
                await trio.lowlevel.checkpoint()
            daemon.signals.stop_requested_at = None
        whole_daemon.signal()
        late = len(whole_daemon.ran)
        await trio.sleep(30)
        assert len(whole_daemon.ran) == late
    assert whole_daemon.exit_code == 0, f"seed {seed}"


@pytest.mark.parametrize("at", ["a", "b", "c"])
async def test_c13_a_stop_during_a_swap(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """After a stop that begins while a controller starts, no further controller starts."""
    whole_daemon.configure("a", "b", "c")
    real = Controller.supervise_runs

    async def hold(  # noqa: ASYNC128 - the real one calls it
        self: Controller, *, task_status: trio.TaskStatus[None]
    ) -> None:
        if self.name == at:
            whole_daemon.signal()
            for _ in range(20):  # so that whatever closes has closed
                await trio.lowlevel.checkpoint()
        await real(self, task_status=task_status)

    async with whole_daemon.running() as daemon:
        monkeypatch.setattr(Controller, "supervise_runs", hold)
        whole_daemon.configure(*(f"{name}: {FAST}}}" for name in "abc"))
        await whole_daemon.reload()
        await trio.sleep(1)
        assert whole_daemon.exit_code == 0
        assert set(daemon.controllers) <= set("abc"[: "abc".index(at) + 1])
    assert not whole_daemon.log_lines("daemon.crashed")


def test_moved_lines_are_no_change(tmp_path: Path) -> None:
    """The position of a controller in its file takes no part in the comparison."""
    from reconciled.config.model import ControllerConfig

    ignored = {field.name for field in attrs.fields(ControllerConfig) if not field.eq}
    assert ignored == {"origin", "positions", "path"}


async def test_a_fault_of_a_reload_ends_nothing(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unexpected error while a new configuration is read fails that reload alone."""
    whole_daemon.configure("a")
    async with whole_daemon.running() as daemon:

        def fail(*_: Any) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(reload, "load", fail)
            outcome = await daemon.reloader.request().wait_finished()
        assert "ZeroDivisionError" in outcome.reason
        assert "Traceback" in str(whole_daemon.log_lines("reload.failed"))
        assert (await daemon.reloader.request().wait_finished()).done


async def test_a_reload_without_a_thread(
    whole_daemon: WholeDaemon, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of processes a reload fails with the remedy, and the daemon continues."""
    whole_daemon.configure("a")
    async with whole_daemon.running() as daemon:

        async def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(trio.to_thread, "run_sync", refuse)
            outcome = await daemon.reloader.request().wait_finished()
        assert "raise TasksMax=" in outcome.reason
        assert whole_daemon.log_lines("reload.failed")
        assert (await daemon.reloader.request().wait_finished()).done
