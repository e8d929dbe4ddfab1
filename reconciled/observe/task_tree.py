"""The live task tree: what each task waits for, and what keeps it from being cancelled.

Reading has no effect: the property ``scope.cancel_called`` would cancel a scope whose deadline
has passed, so the private flag behind it is read. The tree is consistent only in the trio thread;
other threads use ``token.run_sync_soon``. A thousand tasks take a few milliseconds.
"""

from __future__ import annotations

import contextlib
import math
import os
from types import CodeType
from typing import Any

import attrs
import trio

from reconciled.observe.bound_log import BoundLog

_TRIO = os.path.dirname(trio.__file__) + os.sep  # noqa: PTH120 - compared with names in code
# Frames between trio and a task's own code: they do not show what the task executes.
_SKIPPED = (_TRIO, contextlib.__file__)
_ANCHORS = ("/site-packages/", "/reconciled/")


@attrs.frozen
class Shield:
    """A scope that keeps cancellation from a task; seconds_left is None without a deadline."""

    seconds_left: float | None


@attrs.frozen
class TaskView:
    """One task. *depth* is its nesting below the root, which is first and has 0.

    where      its innermost frame outside trio, and the function of trio that it waits in
    cancelled  its next checkpoint raises Cancelled
    shields    the shields among its own scopes, innermost first
    deadline   seconds until the nearest deadline of its own scopes; None: there is none
    """

    name: str
    depth: int
    where: str
    cancelled: bool
    shields: tuple[Shield, ...]
    deadline: float | None

    def as_data(self) -> dict[str, Any]:
        """The view as data that JSON can express."""
        return attrs.asdict(self)


def tree() -> list[TaskView]:
    """All tasks of this trio run, parents before children. Call it in the trio thread."""
    root = trio.lowlevel.current_root_task()
    now = trio.current_time()
    views = []
    # A stack, since tasks may be nested deeper than Python's recursion limit.
    waiting = [(root, 0)] if root is not None else []
    while waiting:
        task, depth = waiting.pop()
        views.append(_view(task, depth, now))
        children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        # child_tasks is a set: unsorted, two dumps could not be compared.
        children.sort(key=lambda child: child.name, reverse=True)
        waiting.extend((child, depth + 1) for child in children)
    return views


def lines(views: list[TaskView]) -> list[str]:
    """*views* as indented text, one line each."""
    return [_line(view) for view in views]


def frames_of(task: trio.lowlevel.Task) -> list[str]:
    """The frames of *task*: ``file:line function``, innermost first, without trio's own.

    The innermost one also names the function of trio that it waits in. Empty for an ended task.
    """
    frames: list[str] = []
    waits_in = ""
    for frame, line in task.iter_await_frames():
        code = frame.f_code
        if not code.co_filename.startswith(_SKIPPED):
            frames.append(f"{_short(code)}:{line} {code.co_qualname}")
            waits_in = ""
        elif not waits_in and code.co_filename.startswith(_TRIO):
            waits_in = code.co_name
    frames.reverse()
    if frames and waits_in:
        frames[0] += f" → trio {waits_in}"
    return frames


def dump(log: BoundLog) -> None:
    """Log the tree as ``tasks.tree``, one line per task. Call it in the trio thread."""
    views = tree()
    log.info("tasks.tree", tasks=len(views))
    for line in lines(views):
        log.info("tasks.tree", task=line)


def _view(task: trio.lowlevel.Task, depth: int, now: float) -> TaskView:
    frames = frames_of(task)
    cancelled, scopes = _scopes_of(task)
    deadlines = [scope.deadline for scope in scopes if scope.deadline < math.inf]
    return TaskView(
        name=task.name,
        depth=depth,
        where=frames[0] if frames else "",
        cancelled=cancelled,
        shields=tuple(
            Shield(_seconds_left(scope.deadline, now)) for scope in scopes if scope.shield
        ),
        deadline=_seconds_left(min(deadlines), now) if deadlines else None,
    )


def _scopes_of(task: trio.lowlevel.Task) -> tuple[bool, list[trio.CancelScope]]:
    """Whether *task* is cancelled, and the scopes that it entered, innermost first.

    The only function that reads private attributes of trio; without them it returns no scopes.
    """
    try:
        status: Any = task._cancel_status  # noqa: SLF001
        nursery: Any = task.parent_nursery
        outermost = nursery._cancel_status if nursery is not None else None  # noqa: SLF001
        cancelled = bool(status.effectively_cancelled)
        scopes = []
        while status is not None and status is not outermost:
            scopes.append(status._scope)  # noqa: SLF001
            status = status.parent
    except AttributeError:
        return False, []
    return cancelled, scopes


def _seconds_left(deadline: float, now: float) -> float | None:
    return round(deadline - now, 3) if deadline < math.inf else None


def _line(view: TaskView) -> str:
    notes = ["cancelled"] if view.cancelled else []
    notes += [
        "shielded without a deadline"
        if shield.seconds_left is None
        else f"shielded {shield.seconds_left:.1f}s left"
        for shield in view.shields
    ]
    if view.deadline is not None and not view.shields:
        notes.append(f"deadline in {view.deadline:.1f}s")
    state = f" [{', '.join(notes)}]" if notes else ""
    return f"{'  ' * view.depth}{view.name}{state}  {view.where}".rstrip()


def _short(code: CodeType) -> str:
    """The file, relative to site-packages or to the directory of this package."""
    for anchor in _ANCHORS:
        _, found, rest = code.co_filename.rpartition(anchor)
        if found:
            return rest if anchor == _ANCHORS[0] else anchor[1:] + rest
    return code.co_filename
