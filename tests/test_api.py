"""reconciled.api: its names, their documentation, and the optional methods."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import attrs
import pytest

from reconciled import api
from reconciled.api import Reconciler, Request, Result, done, has_method

OPTIONAL: tuple[Literal["remove", "plan", "undo"], ...] = ("remove", "plan", "undo")


@attrs.frozen
class Spec:
    pass


class Plain(Reconciler[Spec]):
    async def reconcile(self, _: Request[Spec]) -> Result:
        return done()


class Removing(Plain):
    async def remove(self, _: Request[Spec]) -> Result:
        return done()


class Inherited(Removing):
    pass


class Withdrawn(Removing):
    remove = None  # type: ignore[assignment]


class Mixin:
    async def undo(self, request: Any, step: Any) -> None:
        pass


class Mixed(Mixin, Plain):
    pass


@pytest.mark.parametrize(
    ("cls", "names"),
    [
        (Plain, []),
        (Removing, ["remove"]),
        (Inherited, ["remove"]),
        (Withdrawn, []),
        (Mixed, ["undo"]),
    ],
)
def test_an_optional_method_is_one_that_is_overridden(
    cls: type[Reconciler[Spec]], names: list[str]
) -> None:
    """A reconciler has remove, plan or undo if its class, a base or a mixin overrides it."""
    assert [name for name in OPTIONAL if has_method(cls(), name)] == names


def test_can_undo_is_by_default_whether_undo_is_overridden() -> None:
    """A reconciler without undo() cannot undo, whatever the spec."""
    assert not Plain().can_undo(Spec())
    assert Mixed().can_undo(Spec())


def test_every_public_name_is_documented() -> None:
    """Each public name and member has a docstring of at least five words."""
    undocumented = []
    for name in api.__all__:
        thing = getattr(api, name)
        if inspect.getmodule(thing) is not api:
            continue
        members = {name: thing}
        if inspect.isclass(thing):
            members |= {f"{name}.{key}": each for key, each in vars(thing).items() if key[0] != "_"}
        for member, each in members.items():
            if callable(each) or isinstance(each, property):
                text = each.__doc__ or ""
                undocumented += [member] * (len(text.split()) < 5)
    assert undocumented == []
