"""What a plugin class must be: checked once, when it is loaded."""

from __future__ import annotations

import inspect
import sys
from typing import Any, ForwardRef, TypeVar, get_args, get_origin

import attrs

from reconciled.api import Reconciler

ASYNC = ("reconcile", "remove", "plan", "observe", "undo")


# Decide from what they are given, so that they must not wait.
PURE = ("recover", "budget", "can_undo")


def judge(cls: Any) -> tuple[str, type, type | None]:
    """The kind, spec class and options class of *cls*. Raises TypeError for what is no use."""
    if not isinstance(cls, type) or not issubclass(cls, Reconciler):
        raise TypeError("it is no subclass of reconciled.api.Reconciler")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TypeError(f"it lacks the method {', '.join(missing)}")
    for method in (*ASYNC, *PURE):
        function = getattr(cls, method, None)
        if function is None or inspect.iscoroutinefunction(function) == (method in ASYNC):
            continue
        if method in ASYNC:
            raise TypeError(f"its method {method} is not async: write async def {method}")
        raise TypeError(f"its method {method} is async, and may not wait: write def {method}")
    spec = _spec_class(cls)
    if not isinstance(spec, type) or not attrs.has(spec):
        raise TypeError(
            "it names no attrs class as its spec: write class "
            f"{cls.__name__}(Reconciler[Spec]) with @attrs.frozen class Spec"
        )
    if cls.Options is not None and not attrs.has(cls.Options):
        raise TypeError("its Options are no attrs class: put @attrs.frozen above the class")
    kind = getattr(cls, "kind", spec.__name__)
    if not isinstance(kind, str) or not kind.isalnum():
        raise TypeError("its kind is no word of letters and digits")
    return kind, spec, cls.Options


def _spec_class(cls: type) -> Any:
    """What stands in the brackets of Reconciler[...], in *cls* or the nearest base that has it."""
    for base in cls.__mro__:
        for generic in vars(base).get("__orig_bases__", ()):
            origin = get_origin(generic)
            if not isinstance(origin, type) or not issubclass(origin, Reconciler):
                continue
            spec = get_args(generic)[0]
            if isinstance(spec, ForwardRef):
                spec = vars(sys.modules[base.__module__]).get(spec.__forward_arg__)
            if not isinstance(spec, TypeVar):
                return spec
    return None
