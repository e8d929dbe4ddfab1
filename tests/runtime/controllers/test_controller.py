"""Controllers and their sources: which keys run, are removed, held, and forgotten."""

# ruff: noqa: ARG001 - the virtual clock takes effect by being an argument
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from one_controller import (
    OneController,
    RemovingReconciler,
    ScriptedReconciler,
    ScriptedSource,
    key,
    run_one_controller,
    thing,
    unavailable,
)
from trio.testing import MockClock

from reconciled.api import Outcome, Result, after, done, retry, terminal
from reconciled.core.problems import Problem
from reconciled.core.queue.states import Priority
from reconciled.core.resources import Origin
from reconciled.core.sources import Snapshot, Tick
from reconciled.journal.removal_approvals import PendingApproval, read_pending, write_approval
from reconciled.runtime.decisions.inbox import Inbox

NAMES = [f"k{number}" for number in range(8)]


async def hang(_: Any) -> Result:
    await trio.sleep_forever()
    return done()


# -- added, changed, returned -----------------------------------------------------


async def test_keys_run_when_they_are_added_or_changed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An added or changed key runs once with that cause; an unchanged one does not."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("a"), thing("b", 2), thing("c"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("a", labels={"team": "web"}), thing("b", 2), thing("c"))
        await runtime.wait_all_blocked()
        assert sorted((r.name, r.causes) for r in script.requests[:2]) == [
            ("a", ("declared",)),
            ("b", ("declared",)),
        ]
        assert sorted((r.name, r.causes, r.spec.value) for r in script.requests[2:]) == [
            ("b", ("changed",), 2),
            ("c", ("declared",), 0),
        ]
        runtime.enqueue("a")
        await runtime.wait_all_blocked()
        assert script.requests[-1].labels == {"team": "web"}


async def test_r11_the_last_of_many_changes_is_applied(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Changes during a run lead to one more run, with the newest spec (R11, invariant 1)."""
    going = 0

    async def slow(_: Any) -> Result:
        nonlocal going
        going += 1
        assert going == 1, "one key ran twice at once"
        await trio.sleep(1)
        going -= 1
        return done()

    script = ScriptedReconciler()
    script.acts["a"] = slow
    async with run_one_controller(tmp_path, script) as runtime:
        for value in range(10):
            runtime.declare(thing("a", value))
            await trio.sleep(0.3)
        await trio.sleep(5)
        assert script.requests[-1].spec.value == 9
        assert len(script.requests) <= 5
        assert runtime.context.store.fingerprint(key("a")) == thing("a", 9).fingerprint


async def test_keys_applied_before_the_start_run_last(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """At a start, keys whose spec is applied already run after those that changed."""
    async with run_one_controller(tmp_path, ScriptedReconciler()) as runtime:
        runtime.declare(thing("a"), thing("b"), thing("c"))
        await runtime.wait_all_blocked()
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script, concurrency=1) as runtime:
        runtime.declare(thing("a"), thing("b"), thing("c", 2))
        await runtime.wait_all_blocked()
        assert [(r.name, r.causes) for r in script.requests] == [
            ("c", ("declared",)),
            ("a", ("start",)),
            ("b", ("start",)),
        ]


async def test_a_tick_wakes_every_key_and_opens_no_backoff(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A timer's tick runs each declared key with its cause, except keys in backoff."""
    script = ScriptedReconciler()

    async def failing(_: Any) -> Result:
        return retry("no")

    script.acts["b"] = failing
    sources = [ScriptedSource("source 0"), ScriptedSource("every 1m", declares=False)]
    async with run_one_controller(tmp_path, script, sources=sources) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.report(Tick("every 1m"), source=1)
        await runtime.wait_all_blocked()
        assert sorted(script.ran) == ["a", "a", "b"]
        assert script.requests[-1].causes == ("every 1m",)


async def test_other_kinds_are_ignored(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Manifests of a kind that the controller does not take are not its keys."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), attrs.evolve(thing("b"), kind="Other"))
        await runtime.wait_all_blocked()
        assert script.ran == ["a"]


# -- removals ----------------------------------------------------------------------


async def test_a_removed_key_is_removed_and_forgotten(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """remove() gets the last spec of a key that a complete snapshot lacks; its state is freed."""
    script = RemovingReconciler()

    async def act(request: Any) -> Result:
        request.memory.mkdir(parents=True)
        request.output.mkdir(parents=True)
        return done()

    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a", 7, namespace="n"), thing("b"), thing("a", 8))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"), thing("a", 8))
        await runtime.wait_all_blocked()
        (request,) = script.removals
        assert (request.name, request.namespace, request.spec.value) == ("a", "n", 7)
        assert runtime.references("n/a") == []
        assert len(runtime.log_lines("reconcile.removed", key="c/n/a")) == 1
        # The key without a namespace is another key, and keeps its files.
        assert runtime.references("a") != []
        assert (runtime.context.state / "memory" / "c" / "a").is_dir()


async def test_without_remove_a_key_is_only_forgotten(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Without remove() a removed key is forgotten, and nothing of the reconciler runs."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert script.ran.count("a") == 1
        assert runtime.references("a") == []
        assert runtime.log_lines("reconcile.removed")[0]["message"] == "forgotten"


async def test_c10_nothing_is_removed_unless_every_source_is_complete(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nothing is removed while a source is incomplete, unavailable or not read yet (C10)."""
    script = RemovingReconciler()
    sources = [ScriptedSource("source 0"), ScriptedSource("source 1")]
    async with run_one_controller(tmp_path, script, sources=sources) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))  # source 1 has not reported yet
        await runtime.wait_all_blocked()
        runtime.report(unavailable(), source=1)
        await runtime.wait_all_blocked()
        runtime.declare(complete=False, source=1)
        await runtime.wait_all_blocked()
        assert script.removals == []
        runtime.declare(source=1)
        await runtime.wait_all_blocked()
        assert [request.name for request in script.removals] == ["a"]
        runtime.declare(complete=False)
        runtime.report(unavailable())
        await runtime.wait_all_blocked()
        assert len(script.removals) == 1
        assert key("b") in runtime.controller.manifests


async def test_c08_a_key_deleted_while_down_is_removed_with_its_last_spec(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A key whose manifest was deleted while no daemon ran is removed by the store's spec (C08)."""
    async with run_one_controller(tmp_path, RemovingReconciler()) as runtime:
        runtime.declare(thing("a", 5, namespace="n"), thing("b"))
        await runtime.wait_all_blocked()
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        (request,) = script.removals
        assert (request.key, request.namespace, request.name) == ("c/n/a", "n", "a")
        assert request.spec.value == 5
        assert request.raw_spec == {"value": 5}
        assert request.base == Path("/m")
        assert runtime.references("n/a") == []
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert script.removals == []


async def test_a_failed_removal_is_retried(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A failed removal backs off like a failed run, and its key is known until it succeeds."""
    script = RemovingReconciler()
    turns = 0

    async def removal(_: Any) -> Result:
        nonlocal turns
        turns += 1
        if turns < 3:
            raise OSError(16, "busy")
        return done()

    script.removal = removal
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        assert runtime.queue_state("a") == "retrying"
        assert key("a") in runtime.context.store.all_keys()
        await trio.sleep(30)
        assert turns == 3
        assert runtime.references("a") == []


async def test_a_key_declared_again_during_its_removal_runs_afterwards(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A key that is declared again during its removal runs after the removal has ended."""
    order: list[str] = []
    go_on = trio.Event()
    script = RemovingReconciler()

    async def removal(request: Any) -> Result:
        order.append(f"remove {request.spec.value}")
        await go_on.wait()
        order.append("removed")
        return done()

    async def act(request: Any) -> Result:
        order.append(f"reconcile {request.spec.value}")
        return done()

    script.acts["a"] = act
    script.removal = removal
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a", 1), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("a", 2), thing("b"))
        await runtime.wait_all_blocked()
        go_on.set()
        await runtime.wait_all_blocked()
        assert order == ["reconcile 1", "remove 1", "removed", "reconcile 2"]
        assert runtime.context.store.fingerprint(key("a")) == thing("a", 2).fingerprint
        assert runtime.controller.removing == set()


async def test_causes_of_a_removed_key_are_dropped(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A cause that arrives during the removal does not lead to a run after it."""
    script = RemovingReconciler()

    async def removal(_: Any) -> Result:
        runtime.enqueue("a", cause="a late hint")
        return done()

    script.removal = removal
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await runtime.wait_all_blocked()
        gets = runtime.controller.lane.counters.gets
        await trio.sleep(100)
        assert runtime.references("a") == []
        assert gets == 3


async def test_a_running_key_whose_manifest_is_deleted_is_stopped(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The run has its drain time, is cancelled, and then the key is removed."""
    script = RemovingReconciler()
    script.acts["a"] = hang
    script.acts["b"] = hang
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await trio.sleep(9.9)
        assert script.removals == []
        await trio.sleep(0.2)
        assert [request.name for request in script.removals] == ["a"]
        assert runtime.references("a") == []
        assert runtime.queue_state("b") == "running"
        assert runtime.context.stop.stage.name == "RUNNING"
        assert runtime.controller.stop.children == set()
        (line,) = runtime.log_lines("reconcile.interrupted", key=key("a"))
        assert line["reason"] == "its manifest was removed"


async def test_the_stop_of_a_key_spares_its_critical_operation(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A critical operation outlives its key's stop, and the removal waits for it (C01, R11)."""
    order: list[tuple[str, float]] = []
    script = RemovingReconciler()

    async def act(request: Any) -> Result:
        async with request.operation("write") as operation, operation.critical(budget="50s"):
            await trio.sleep(45)
            order.append(("written", trio.current_time() - began))
        return done()

    async def removal(_: Any) -> Result:
        order.append(("removed", trio.current_time() - began))
        return done()

    script.acts["a"] = act
    script.removal = removal
    async with run_one_controller(tmp_path, script) as runtime:
        began = trio.current_time()
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await trio.sleep(60)
        assert order == [("written", 45), ("removed", 45)]
        assert runtime.references("a") == []


async def test_a_run_that_ignores_the_stop_of_its_key_is_logged(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A run that outlives its cancellation and cleanup is logged with its position in the code."""
    script = ScriptedReconciler()

    async def deaf(_: Any) -> Result:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 100):
            await trio.sleep_forever()
        return done()

    script.acts["a"] = deaf
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        runtime.declare(thing("b"))
        await trio.sleep(20)
        (line,) = runtime.log_lines("reconcile.stuck", key=key("a"))
        assert any("test_controller.py" in frame for frame in line["where"])
        await trio.sleep(100)
        assert runtime.references("a") == []


# -- held removals -------------------------------------------------------------------


async def held_rig(runtime: OneController) -> None:
    runtime.declare(*map(thing, NAMES))
    await runtime.wait_all_blocked()
    runtime.declare(thing("k0"))
    await runtime.wait_all_blocked()


async def test_c10_many_removals_are_held_until_they_are_approved(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Removals beyond the limit are held, logged with the command, and run once approved (C10)."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        await held_rig(runtime)
        assert script.removals == []
        (line,) = runtime.log_lines("removals.held")
        assert (line["count"], line["owned"]) == (7, 8)
        assert line["commands"] == ["reconciled allow c"]
        held = read_pending(runtime.context.state, "c")
        assert held == PendingApproval("c", tuple(key(name) for name in NAMES[1:]), 8)
        # Ticks, time and an equal snapshot do not release them.
        runtime.report(Tick("every 1m"))
        runtime.declare(thing("k0"))
        await trio.sleep(1000)
        assert script.removals == []
        assert len(runtime.log_lines("removals.held")) == 1
        write_approval(runtime.context.state, held)
        await runtime.approvals.inbox.scan()
        await runtime.wait_all_blocked()
        assert sorted(request.name for request in script.removals) == NAMES[1:]
        assert read_pending(runtime.context.state, "c") is None
        assert len(runtime.log_lines("removals.released")) == 1
        assert list(runtime.approvals.inbox.files.directory.iterdir()) == []
        assert [runtime.references(name) for name in NAMES[1:]] == [[]] * 7


async def test_an_approval_is_for_what_was_shown(tmp_path: Path, autojump_clock: MockClock) -> None:
    """Keys that an approval does not name remain held; keys declared again are not removed."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        await held_rig(runtime)
        runtime.declare(thing("k0"), thing("k1"))
        await runtime.wait_all_blocked()
        write_approval(runtime.context.state, PendingApproval("c", (key("k1"), key("k2")), 8))
        await runtime.approvals.inbox.scan()
        await runtime.wait_all_blocked()
        assert [request.name for request in script.removals] == ["k2"]
        held = read_pending(runtime.context.state, "c")
        assert held is not None
        assert held.keys == tuple(key(name) for name in NAMES[3:])
        # The approval of k1 is used up: removed again, it is held like the others.
        runtime.declare(thing("k0"))
        await runtime.wait_all_blocked()
        assert len(script.removals) == 1


async def test_held_keys_that_are_declared_again_are_released(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Held keys that are declared again are neither removed nor held."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        await held_rig(runtime)
        runtime.declare(*map(thing, NAMES))
        await runtime.wait_all_blocked()
        assert script.removals == []
        assert read_pending(runtime.context.state, "c") is None
        assert runtime.controller.statuses[key("k3")].outcome is Outcome.DONE
        assert runtime.controller.absent == {}


async def test_a_stale_record_of_held_removals_is_deleted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The record of removals that an earlier daemon held is deleted once none is held."""
    async with run_one_controller(tmp_path, RemovingReconciler()) as runtime:
        await held_rig(runtime)
    sources = [ScriptedSource("source 0"), ScriptedSource("source 1")]
    async with run_one_controller(tmp_path, RemovingReconciler(), sources=sources) as runtime:
        runtime.declare(*map(thing, NAMES))
        await runtime.wait_all_blocked()
        # Not all sources were read yet: it may be held again.
        assert read_pending(runtime.context.state, "c") is not None
        runtime.declare(source=1)
        await runtime.wait_all_blocked()
        assert read_pending(runtime.context.state, "c") is None


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": 3}', '{"keys": [[]]}', "\xff\xfe"])
async def test_a_bad_approval_approves_nothing(
    tmp_path: Path, autojump_clock: MockClock, content: str
) -> None:
    """A malformed approval is logged once and deleted, and nothing is removed."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        await held_rig(runtime)
        file = runtime.approvals.inbox.files.directory / "c.allow"
        file.write_bytes(content.encode("latin-1"))
        await runtime.approvals.inbox.scan()
        await runtime.wait_all_blocked()
        assert script.removals == []
        assert not file.exists()
        assert len(runtime.log_lines("removals.bad_approval")) == 1


async def test_held_removals_wait_also_while_their_report_is_not_written(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removals are held before anything is written: a disk that hangs lets none pass."""
    script = RemovingReconciler()

    async def hang(*_: object) -> None:
        await trio.sleep_forever()

    async with run_one_controller(tmp_path, script) as runtime:
        monkeypatch.setattr(Inbox, "run", hang)
        await held_rig(runtime)
        await trio.sleep(1000)
        assert script.removals == []
        assert read_pending(runtime.context.state, "c") is None


async def test_a_symbolic_link_is_not_an_approval(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The target of a symbolic link in place of an approval is not read."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        await held_rig(runtime)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.write_text(json.dumps({"keys": [key("k1")]}))
        (runtime.approvals.inbox.files.directory / "c.allow").symlink_to(elsewhere)
        await runtime.approvals.inbox.scan()
        await runtime.wait_all_blocked()
        assert script.removals == []
        assert elsewhere.exists()


# -- watchers --------------------------------------------------------------------------


async def test_a_watcher_that_fails_is_started_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A watcher that raises or returns is started again with backoff; other watchers go on."""

    async def fails(report: Any) -> None:
        report(Snapshot((thing("a"),), complete=True))
        raise ZeroDivisionError("in a watcher")

    async def returns(_: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def runs_long(_: Any) -> None:
        await trio.sleep(100)

    script = RemovingReconciler()
    bad = ScriptedSource("bad", starts=[fails, returns, fails, runs_long, fails])
    good = ScriptedSource("good")
    async with run_one_controller(tmp_path, script, sources=[bad, good]) as runtime:
        runtime.declare(thing("b"), source=1)
        await trio.sleep(0.1)
        state = runtime.controller.desired.states["bad"]
        assert not state.complete
        assert state.reason == "its watcher failed: ZeroDivisionError: in a watcher"
        # Its keys remain declared: a failed watcher is not an empty one.
        assert key("a") in runtime.controller.manifests
        await trio.sleep(1000)
        pauses = [round(b - a) for a, b in zip(bad.began, bad.began[1:], strict=False)]
        # It ran for 100 s: the backoff begins anew.
        assert pauses == [1, 2, 4, 101, 2]
        assert len(good.began) == 1
        assert script.removals == []
        assert runtime.log_lines("source.failed")[0]["retry_in_s"] == 1


async def test_the_backoff_of_a_failing_watcher_is_bounded(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The backoff doubles up to one minute."""

    async def fails(_: Any) -> None:
        raise OSError("missing")

    bad = ScriptedSource("bad", starts=[fails] * 12)
    async with run_one_controller(tmp_path, ScriptedReconciler(), sources=[bad]):
        await trio.sleep(1000)
    pauses = [round(b - a) for a, b in zip(bad.began, bad.began[1:], strict=False)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
async def test_c15_a_watcher_cannot_end_the_daemon(
    tmp_path: Path, autojump_clock: MockClock, error: BaseException
) -> None:
    """sys.exit() in a watcher is a failure of that watcher (C15)."""

    async def fails(_: Any) -> None:
        raise error

    bad = ScriptedSource("bad", starts=[fails])
    async with run_one_controller(tmp_path, ScriptedReconciler(), sources=[bad]) as runtime:
        await trio.sleep(2)
        assert len(bad.began) == 2
        assert len(runtime.log_lines("source.failed")) == 1


async def test_a_watcher_that_fails_while_it_is_cancelled_ends(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """An exception beside the cancellation of a watcher is not a crash: the stop goes on."""

    async def fails(_: Any) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise SystemExit(3)

    script = ScriptedReconciler()
    script.acts["a"] = hang
    async with run_one_controller(
        tmp_path, script, sources=[ScriptedSource("bad", starts=[fails])]
    ) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        await runtime.signal()
        await runtime.wait_all_blocked()
        assert runtime.context.stop.stage.name == "DRAINING"
        assert runtime.queue_state("a") == "running"


async def test_a_source_is_logged_when_it_changes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A source is logged as ready once, and as incomplete or unavailable with the reason."""
    async with run_one_controller(tmp_path, ScriptedReconciler()) as runtime:
        runtime.declare(thing("a"))
        runtime.declare(thing("a"), thing("b"))
        problem = Problem(Origin("/m/y.yaml", 2, 3), "is no mapping")
        runtime.report(Snapshot((thing("a"),), complete=False, problems=(problem,)))
        runtime.report(unavailable())
        runtime.declare(thing("a"), thing("b"))
        await runtime.wait_all_blocked()
        assert [line["manifests"] for line in runtime.log_lines("source.ready")] == [1, 2]
        assert runtime.log_lines("source.incomplete")[0]["problems"] == 1
        assert runtime.log_lines("source.unavailable")[0]["reason"] == "it is missing"
        assert runtime.log_lines("manifest.invalid")[0]["at"] == "/m/y.yaml:2:3"
        faults = sorted(line["fault"] for line in runtime.log_lines("fault.recovered"))
        assert faults == ["source.incomplete", "source.unavailable"]


async def test_nothing_is_taken_from_a_source_after_the_instant(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """From the instant of a stop on, reports are ignored, before any task knows of the signal."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await runtime.wait_all_blocked()
        runtime.context.signals.stop_requested_at = 0.0
        runtime.declare(thing("a", 2), thing("b"))
        await runtime.wait_all_blocked()
        assert list(runtime.controller.manifests) == [key("a")]
        assert script.ran == ["a"]


# -- self-triggered runs --------------------------------------------------------------


async def test_c11_a_key_that_rewrites_its_own_manifest_keeps_its_backoff(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A failing run that changes its own spec each time keeps its backoff (C11)."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        value = 0

        async def rewrite(_: Any) -> Result:
            nonlocal value
            value += 1
            runtime.declare(thing("a", value))
            return retry("still wrong")

        script.acts["a"] = rewrite
        runtime.declare(thing("a"))
        await trio.sleep(60)
        # The first few count as a person's; then 1, 2, 4 … seconds: not sixty thousand runs.
        assert 4 <= len(script.requests) < 20


@pytest.mark.parametrize("during", [True, False], ids=["during a run", "between two"])
async def test_a_person_who_edits_a_failing_key_ends_its_backoff(
    tmp_path: Path, autojump_clock: MockClock, *, during: bool
) -> None:
    """A change of the spec ends a backoff at once, during a run and between runs."""
    script = ScriptedReconciler()
    running = trio.Event()

    async def act(request: Any) -> Result:
        running.set()
        await trio.sleep(1)
        return done() if request.spec.value == 3 else retry("wrong value")

    script.acts["a"] = act
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(40)
        assert runtime.failures("a") > 3
        if during:
            running = trio.Event()
            await running.wait()
        began = trio.current_time()
        runtime.declare(thing("a", 3))
        await trio.sleep(2.1)
        assert script.requests[-1].spec.value == 3
        assert runtime.controller.statuses[key("a")].outcome is Outcome.DONE
        assert trio.current_time() - began < 3


async def test_c11_a_key_that_wakes_itself_is_named_and_slowed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A key that acts and is requeued at once each time is logged once and backs off (C11)."""
    script = ScriptedReconciler()

    async def busy(request: Any) -> Result:
        async with request.operation("write"):
            pass
        return after(0.5)

    script.acts["a"] = busy
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(120)
        assert len(runtime.log_lines("reconcile.looping")) == 1
        runs = len(script.requests)
        assert 20 < runs < 40
        runtime.declare(thing("b"))
        await trio.sleep(60)
        assert runtime.references("a") == []


async def test_c11_a_key_that_asks_for_no_delay_is_slowed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """after(0) in each run is a loop too, although no run acts (C11)."""
    script = ScriptedReconciler()
    # A virtual clock advances only when the loop is idle: without a bound a failure would hang.
    left = 10_000

    async def again(_: Any) -> Result:
        nonlocal left
        left -= 1
        await trio.lowlevel.checkpoint()
        return after(0) if left else done()

    script.acts["a"] = again
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.declare(thing("a"))
        await trio.sleep(120)
        assert len(runtime.log_lines("reconcile.looping")) == 1
        assert 20 < len(script.requests) < 40


# -- invariant 14 ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending", ["done", "failed", "terminal", "loop", "self-triggered", "never"]
)
async def test_all_state_of_a_removed_key_is_freed(
    tmp_path: Path, autojump_clock: MockClock, ending: str
) -> None:
    """No state of a key remains after its removal, whatever it did before (invariant 14)."""
    script = RemovingReconciler()
    async with run_one_controller(tmp_path, script, concurrency=2) as runtime:

        async def act(request: Any) -> Result:
            if ending in ("loop", "done"):
                async with request.operation("write"):
                    pass
            if ending == "loop":
                return after(0.1)
            if ending == "self-triggered":
                runtime.declare(thing("a", request.spec.value + 1), thing("b"), thing("c"))
            if ending == "terminal":
                return terminal("never")
            return done() if ending == "done" else retry("no")

        script.acts["a"] = act
        if ending == "never":
            runtime.context.queue.limit = 0
        runtime.declare(thing("a"), thing("b"), thing("c"))
        await trio.sleep(20)
        runtime.enqueue("a", cause="tick", priority=Priority.RESYNC)
        runtime.declare(thing("b"), thing("c"))
        runtime.context.queue.limit = 16
        await trio.sleep(100)
        assert runtime.references("a") == []
        assert runtime.references("b") != []


async def test_a_run_of_an_unknown_key_leaves_no_state(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The run of a key that is neither declared nor owned does nothing (invariant 14)."""
    script = ScriptedReconciler()
    async with run_one_controller(tmp_path, script) as runtime:
        runtime.enqueue("ghost")
        await runtime.wait_all_blocked()
        assert script.requests == []
        assert runtime.references("ghost") == []
