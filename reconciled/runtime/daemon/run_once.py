"""``run --once``: reconcile each key until it is done or has failed, then stop in stages."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from reconciled.core.exit_codes import DONE, NOT_DONE
from reconciled.core.resources import Key
from reconciled.core.results import Outcome, Result
from reconciled.observe.bound_log import BoundLog
from reconciled.runtime.controllers.controller import Controller

ATTEMPTS = 3  # failures in a row after which a key counts as not done


@attrs.define(eq=False)
class OnceProgress:
    """Counts outcomes. on_finished() is called when every key has one."""

    on_finished: Callable[[], None]
    # Keys that are not done, and sources that are not read, each with the reason.
    failed: dict[Key, str] = attrs.field(factory=dict, init=False)
    unread: dict[str, str] = attrs.field(factory=dict, init=False)
    # None before begin(): the keys are not known yet.
    _waiting: set[Key] | None = attrs.field(default=None, init=False)
    _done: set[Key] = attrs.field(factory=set, init=False)

    def begin(self, controllers: list[Controller]) -> None:
        """All sources have been read: the keys to wait for are known."""
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

    def record_stalled(self, controller: str, reason: str) -> None:
        """*controller* cannot run: its keys are unknown."""
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

    def _check_finished(self) -> None:
        if not self._waiting:
            self.on_finished()

    def log_result(self, log: BoundLog) -> int:
        """Log each key and source that is not done; the exit code."""
        if self._waiting is None:
            log.error("once.not_done", reason="stopped before every source was read")
            return NOT_DONE
        reasons = dict.fromkeys(self._waiting, "stopped before it was reconciled") | self.failed
        for key, reason in sorted(reasons.items()):
            log.error("once.not_done", key=key, reason=reason)
        for source, reason in sorted(self.unread.items()):
            log.error("once.source_incomplete", source=source, reason=reason)
        return NOT_DONE if reasons or self.unread else DONE
