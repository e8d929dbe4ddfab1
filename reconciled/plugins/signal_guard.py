"""Saves signal handling and restores it, so that a plugin's import cannot change it.

Covered: the handlers, the functions of the signal module (libraries patch them), the wakeup
descriptor, and the signal mask of this thread. Outside the main thread only the functions and
the mask can be changed at all.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(eq=False)
class SignalState:
    """The state of signal handling at one instant."""

    handlers: Mapping[int, Any]
    functions: Mapping[str, Any]
    mask: frozenset[int]
    wakeup: int | None  # None outside the main thread

    @classmethod
    def capture(cls) -> SignalState:
        """The current state, with the mask of this thread."""
        main = threading.current_thread() is threading.main_thread()
        return cls(
            {number: signal.getsignal(number) for number in signal.valid_signals()},
            dict(vars(signal)),
            frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            _wakeup() if main else None,
        )

    def restore(self) -> list[str]:
        """Undo all changes since capture(); return a description of each."""
        changes = []
        if self._restore_functions():
            changes.append("it patched the signal module; undone")
        for number, handler in self.handlers.items():
            # None means a handler that C code installed, which Python cannot restore.
            if signal.getsignal(number) is handler or handler is None:
                continue
            signal.signal(number, handler)
            changes.append(f"it changed the handler of {signal.Signals(number).name}; undone")
        if self.wakeup is not None and _wakeup() != self.wakeup:
            signal.set_wakeup_fd(self.wakeup, warn_on_full_buffer=False)
            changes.append("it changed the wakeup descriptor of signals; undone")
        if signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self.mask:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            changes.append("it changed the signal mask; undone")
        return changes

    def _restore_functions(self) -> bool:
        present = vars(signal)
        changed = {name for name, value in self.functions.items() if present.get(name) is not value}
        for name in changed:
            setattr(signal, name, self.functions[name])
        return bool(changed)


def _wakeup() -> int:
    # It can only be read by replacing it. A signal in between still runs its handler.
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    return descriptor
