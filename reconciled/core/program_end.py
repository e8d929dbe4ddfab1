"""How a program ended, as its daemon saw it."""

from __future__ import annotations

import signal
from typing import Self

import attrs

from reconciled.core.errors import ProgramFailed

_QUOTED_LINES = 3
_QUOTED_LENGTH = 400


@attrs.frozen
class Ended:
    """How a program ended."""

    program: str  # argument 0
    code: int | None  # None: ended by a signal, or its status was lost
    signal: int | None
    duration: float  # seconds
    tail: tuple[str, ...]  # the last lines of its output, printable and bounded

    def check(self) -> Self:
        """Itself, if the exit code is 0; raises ProgramFailed otherwise."""
        if self.code != 0:
            raise ProgramFailed(str(self), self)
        return self

    def __str__(self) -> str:
        if self.code is not None:
            how = f"ended with exit code {self.code}"
        elif self.signal is not None:
            how = f"was ended by {_signal_name(self.signal)}"
        else:
            how = "ended, but its exit status was lost"
        quoted = " | ".join(self.tail[-_QUOTED_LINES:])
        if len(quoted) > _QUOTED_LENGTH:
            quoted = "…" + quoted[-_QUOTED_LENGTH:]
        return (
            f"{self.program} {how}: {quoted}" if quoted else f"{self.program} {how}, without output"
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
