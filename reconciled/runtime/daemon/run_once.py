"""``run --once``: each key until it is done or will not be, then the staged stop."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from reconciled.core.resources import Key
from reconciled.core.results import Outcome, Result
from reconciled.runtime.controllers.controller import Controller

ATTEMPTS = 3  # failures in a row after which a key counts as not done


@attrs.define(eq=False)
class OnceProgress:
    """Counts outcomes. finished() is called when no key is left to wait for."""

    finished: Callable[[], None]
    failed: dict[Key, str] = attrs.field(factory=dict, init=False)
    unread: dict[str, str] = attrs.field(factory=dict, init=False)
    _waiting: set[Key] | None = attrs.field(default=None, init=False)
    _done: set[Key] = attrs.field(factory=set, init=False)

    def begin(self, controllers: list[Controller]) -> None:
        """All sources have been read: from now on it is known what to wait for."""
        wanted: set[Key] = set()
        for controller in controllers:
            wanted |= controller.manifests.keys() | controller.removing
            for name, state in controller.desired.states.items():
                if not state.complete:
                    self.unread[f"{controller.name}: {name}"] = state.reason
            if (held := controller.desired.guard.held) is not None:
                self.failed |= dict.fromkeys(held.keys, f"removal is held: {held}")
        self._waiting = wanted - self._done - self.failed.keys()
        self._check_finished()

    def stalled(self, controller: str, reason: str) -> None:
        """*controller* cannot run: which keys it would have is not even known."""
        self.unread[f"controller {controller}"] = f"it stalls: {reason}"

    def record_outcome(self, key: Key, result: Result, failures: int) -> None:
        """One run of *key* has ended."""
        if result.outcome is Outcome.INTERRUPTED:
            return
        if result.outcome is Outcome.RETRY and failures + 1 < ATTEMPTS:
            return
        if result.outcome in (Outcome.RETRY, Outcome.TERMINAL, Outcome.HELD):
            self.failed[key] = result.reason
        else:
            self.failed.pop(key, None)
        self._done.add(key)
        if self._waiting is not None:
            self._waiting.discard(key)
            self._check_finished()

    @property
    def begun(self) -> bool:
        """Whether begin() was reached: otherwise nobody knows which keys there are."""
        return self._waiting is not None

    @property
    def missing(self) -> set[Key]:
        """Keys that had no outcome before the stop."""
        return self._waiting or set()

    def _check_finished(self) -> None:
        if not self._waiting:
            self.finished()
