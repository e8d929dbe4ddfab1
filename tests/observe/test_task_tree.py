"""The live task tree."""

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
    """A shield as a critical operation has it."""
    with trio.move_on_after(seconds, shield=True):
        yield


async def shielded() -> None:
    with critical(30):
        await trio.sleep_forever()


async def inner() -> None:
    await trio.sleep_forever()


async def plain() -> None:
    await inner()


async def test_what_a_task_is_doing(
    autojump_clock: trio.testing.MockClock,  # noqa: ARG001 - its presence is its effect
) -> None:
    """Each task with its name, its innermost frame outside trio, cancellation and shield."""
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
    """Depth and order show whose child a task is; siblings are sorted by name."""

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


async def test_reading_changes_nothing(mock_clock: trio.testing.MockClock) -> None:
    """A scope whose deadline has passed is not cancelled by being looked at."""
    scope = trio.CancelScope(deadline=trio.current_time() + 1)
    with scope:
        mock_clock.jump(2)
        tree()
        assert not scope._cancel_called


async def test_an_endless_shield_is_told() -> None:
    """A shield without a deadline, which nothing can end, stands out."""
    with trio.CancelScope(shield=True):  # noqa: ASYNC100 - read from within, never waited in
        views = tree()
    assert any("shielded without a deadline" in line for line in lines(views))


async def test_other_versions_of_trio() -> None:
    """Without the private attributes the tree is told without scopes, and raises nothing."""

    class Bare:
        parent_nursery = None

    assert task_tree._scopes_of(Bare()) == (False, [])  # type: ignore[arg-type]


async def test_shields_are_those_of_the_task_itself() -> None:
    """A child in a parent's shield has none of its own: lifting it would be the parent's work."""
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
    """A task that waits for a thread is told with all its own frames, and with what it waits in."""
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
    """A dump of a large tree does not hold up the loop."""
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
    """A log that keeps what it is told."""

    said: list[tuple[str, dict[str, object]]] = attrs.field(factory=list)

    def info(self, event: str, **fields: object) -> None:
        self.said.append((event, fields))


async def test_dump_is_a_line_a_task() -> None:
    """SIGUSR2's dump: how many tasks there are, then each as one event of a fixed name."""
    log = Recorder()
    task_tree.dump(log)  # type: ignore[arg-type]
    assert {event for event, _ in log.said} == {"tasks.tree"}
    assert log.said[0][1] == {"tasks": len(log.said) - 1}
    assert "test_dump_is_a_line_a_task" in str(log.said)
