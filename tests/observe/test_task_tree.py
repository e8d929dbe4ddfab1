"""The live task tree: frames, cancellation and shields of each task."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio
import trio.testing

from reconciled.observe import task_tree
from reconciled.observe.task_tree import TaskView, frames_of, lines, tree


def named(views: list[TaskView], name: str) -> TaskView:
    (view,) = [view for view in views if view.name == name]
    return view


@contextmanager
def critical(seconds: float) -> Iterator[None]:
    """A shield with a deadline, like that of a critical operation."""
    with trio.move_on_after(seconds, shield=True):
        yield


async def shielded() -> None:
    with critical(30):
        await trio.sleep_forever()


async def inner() -> None:
    await trio.sleep_forever()


async def plain() -> None:
    await inner()


async def test_a_task_is_shown_with_frame_cancellation_and_shield(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - its presence is its effect
) -> None:
    """A view has the name, the innermost frame outside trio, cancellation and shields."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shielded, name="site/a")
        nursery.start_soon(plain, name="site/b")
        await trio.testing.wait_all_tasks_blocked()
        before = tree()
        nursery.cancel_scope.cancel(reason="test")
        after = tree()
    a, b = named(before, "site/a"), named(before, "site/b")
    assert not a.cancelled
    assert [shield.seconds_left for shield in a.shields] == [30]
    assert a.where.endswith(" shielded → trio sleep_forever")
    assert "test_task_tree.py:" in a.where
    assert b.where.endswith(" inner → trio sleep_forever")
    assert b.shields == ()
    assert not named(after, "site/a").cancelled
    assert named(after, "site/b").cancelled
    text = "\n".join(lines(after))
    assert "site/a [shielded 30.0s left]  " in text
    assert "site/b [cancelled]  " in text
    json.dumps([view.as_data() for view in after])


async def test_parents_come_before_children(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - its presence is its effect
) -> None:
    """Depth and order show the parent of each task; siblings are sorted by name."""

    async def parent() -> None:
        async with trio.open_nursery() as nursery:
            for name in ("c", "a", "b"):
                nursery.start_soon(trio.sleep_forever, name=name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent, name="parent")
        await trio.testing.wait_all_tasks_blocked()
        views = tree()
        nursery.cancel_scope.cancel(reason="test")
    at = views.index(named(views, "parent"))
    assert [view.name for view in views[at : at + 4]] == ["parent", "a", "b", "c"]
    assert [view.depth - views[at].depth for view in views[at : at + 4]] == [0, 1, 1, 1]
    assert views[0].depth == 0


async def test_reading_does_not_cancel(mock_clock: trio.testing.MockClock) -> None:
    """Reading the tree does not cancel a scope whose deadline has passed."""
    scope = trio.CancelScope(deadline=trio.current_time() + 1)
    with scope:
        mock_clock.jump(2)
        tree()
        assert not scope._cancel_called


async def test_a_shield_without_a_deadline_is_shown() -> None:
    """A shield without a deadline, which no cancellation can end, is shown as such."""
    with trio.CancelScope(shield=True):  # noqa: ASYNC100 - read from within, without a checkpoint
        views = tree()
    assert any("shielded without a deadline" in line for line in lines(views))


async def test_other_versions_of_trio_give_no_scopes() -> None:
    """Without trio's private attributes the tree has no scopes, and no error is raised."""

    class Bare:
        parent_nursery = None

    assert task_tree._scopes_of(Bare()) == (False, [])  # type: ignore[arg-type]


async def test_shields_of_a_parent_are_not_shown_for_its_children() -> None:
    """A shield is shown for the task that entered it, since only that task can lift it."""
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(30, shield=True):
            async with trio.open_nursery() as inside:
                inside.start_soon(plain, name="child")
                await trio.testing.wait_all_tasks_blocked()
                child = named(tree(), "child")
                inside.cancel_scope.cancel(reason="seen")
        nursery.cancel_scope.cancel(reason="seen")
    assert child.shields == ()
    assert child.deadline is None


async def test_frames_of_a_task_in_a_thread() -> None:
    """A task that waits for a thread is shown with all its frames and trio's function."""
    go = threading.Event()
    tasks: list[trio.lowlevel.Task] = []

    async def works() -> None:
        tasks.append(trio.lowlevel.current_task())
        await trio.to_thread.run_sync(go.wait)

    async def outer() -> None:
        await works()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(outer)
        await trio.testing.wait_all_tasks_blocked()
        frames = frames_of(tasks[0])
        go.set()
    assert frames[0].endswith("works → trio to_thread_run_sync")
    assert frames[1].endswith(".outer")
    assert frames_of(tasks[0]) == []


async def test_a_thousand_tasks_take_milliseconds() -> None:
    """A dump of a large tree does not block the loop."""
    async with trio.open_nursery() as nursery:
        for number in range(1000):
            nursery.start_soon(plain, name=f"site/{number}")
        await trio.testing.wait_all_tasks_blocked()
        start = time.perf_counter()
        text = lines(tree())
        took = time.perf_counter() - start
        nursery.cancel_scope.cancel(reason="test")
    assert len(text) > 1000
    assert took < 2.0  # typically a few milliseconds


@attrs.define(eq=False)
class Recorder:
    """A log that records its events."""

    events: list[tuple[str, dict[str, object]]] = attrs.field(factory=list)

    def info(self, event: str, **fields: object) -> None:
        self.events.append((event, fields))


async def test_dump_logs_one_line_per_task() -> None:
    """SIGUSR2's dump logs the number of tasks, then each task, under one event name."""
    log = Recorder()
    task_tree.dump(log)  # type: ignore[arg-type]
    assert {event for event, _ in log.events} == {"tasks.tree"}
    assert log.events[0][1] == {"tasks": len(log.events) - 1}
    assert "test_dump_logs_one_line_per_task" in str(log.events)
