"""Programs: run in groups of their own, owned until their end, reaped when nobody owns them.

``run`` is what a reconciler calls; ``children`` knows who is owned, ``orphans`` reaps the rest.
Over a program of an operation stands a small ``parent`` that outlives this process;
``survivors`` finds such a program again, ``steps`` reads what it noted by itself.

The names below are imported when they are asked for: ``reconciled step`` needs ``steps`` alone,
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
