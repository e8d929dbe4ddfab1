"""The contract of a plugin class: checked once, when it is loaded."""

from __future__ import annotations

import inspect
import sys
from typing import Any, ForwardRef, TypeVar, get_args, get_origin

import attrs

from reconciled.api import Reconciler
from reconciled.core.errors import ContractBroken

ASYNC = ("reconcile", "remove", "plan", "observe", "undo")
# Functions of their arguments: they must not wait, and so must not be async.
PURE = ("recover", "budget", "can_undo")


def check_class(cls: Any) -> tuple[str, type, type | None]:
    """The kind, spec class and options class of *cls*. Raises ContractBroken."""
    if not isinstance(cls, type) or not issubclass(cls, Reconciler):
        raise ContractBroken(
            "it is not a subclass of reconciled.api.Reconciler: write class NAME(Reconciler[Spec])"
        )
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise ContractBroken(f"it does not define {', '.join(missing)}: add async def {missing[0]}")
    for method in (*ASYNC, *PURE):
        function = getattr(cls, method, None)
        if function is None or inspect.iscoroutinefunction(function) == (method in ASYNC):
            continue
        if method in ASYNC:
            raise ContractBroken(f"its method {method} is not async: write async def {method}")
        raise ContractBroken(f"its method {method} is async and must not wait: write def {method}")
    spec = _spec_class(cls)
    if not isinstance(spec, type) or not attrs.has(spec):
        raise ContractBroken(
            f"its spec is not an attrs class: write class {cls.__name__}(Reconciler[Spec])"
            " with @attrs.frozen class Spec"
        )
    if cls.Options is not None and not attrs.has(cls.Options):
        raise ContractBroken("its Options is not an attrs class: put @attrs.frozen above the class")
    kind = getattr(cls, "kind", spec.__name__)
    if not isinstance(kind, str) or not kind.isalnum():
        raise ContractBroken(
            "its kind must consist of letters and digits: set kind to a name like Motd"
        )
    return kind, spec, cls.Options


def _spec_class(cls: type) -> Any:
    """The argument of Reconciler[...], of *cls* or the nearest base that has one."""
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
