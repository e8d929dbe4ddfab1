"""Which keys wait for a program that outlived an earlier daemon."""

from __future__ import annotations

import attrs

from reconciled.core.resources import Key


@attrs.define(eq=False)
class AdoptionRegistry:
    """The keys whose programs are being waited for, with the operation each belongs to."""

    _waiting: dict[Key, str] = attrs.field(factory=dict, init=False)

    def __contains__(self, key: Key) -> bool:
        return key in self._waiting

    def add(self, key: Key, operation: str) -> None:
        """*key* waits for the program of *operation*."""
        self._waiting[key] = operation

    def remove(self, key: Key) -> None:
        """The program of *key* has ended."""
        del self._waiting[key]
