"""Programs: run in process groups of their own, owned until they end, reaped if they lose owners.

``run`` holds what a reconciler calls. ``children`` registers owned programs; ``orphan_reaper``
reaps the rest. A ``small_parent`` supervises each program of an operation and outlives the
daemon; ``survivors`` finds such a program again, ``reap`` ends it, and ``steps`` reads
the steps that it recorded.

The names below are imported at their first use: ``reconciled step`` needs ``steps`` alone,
within 50 ms, and ``run`` imports trio.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing itself takes 4 ms
if TYPE_CHECKING:
    from reconciled.core.errors import ProgramFailed
    from reconciled.programs.run import Ended, program_environment, run_program

__all__ = ["Ended", "ProgramFailed", "program_environment", "run_program"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("reconciled.programs.run"), name)
