"""Programs: run in groups of their own, owned until their end, reaped when nobody owns them.

``run`` is what a reconciler calls; ``children`` knows who is owned, ``orphans`` reaps the rest.
"""

from reconciled.programs.run import Ended, ProgramFailed, program_environment, run_program

__all__ = ["Ended", "ProgramFailed", "program_environment", "run_program"]
