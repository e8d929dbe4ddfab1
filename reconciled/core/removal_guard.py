"""The guard before removals: many at once are held until a person decides.

1. A set is held when it has more than ``above`` keys and is more than a ``share`` of what was
   owned. Removals of the last minute are included: a slow mass deletion does not pass in slices.
2. A held key stays held until exactly that key is approved or declared again. A set that shrinks
   below the limits is not released: what made it small is not known to be intended. Nor does
   a reload or a restart release it.
3. An approval is for one removal of one key, and lapses when the key is declared again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import attrs

from reconciled.core.resources import Key

# Seconds for which a removal is counted together with later ones.
WINDOW = 60.0


@attrs.frozen
class HeldRemovals:
    """Removals that wait for an approval, as shown to the person who decides."""

    keys: tuple[Key, ...]  # sorted
    owned: int  # how many the controller owned when the set was last judged
    since: float  # when the first of them was held, on the caller's clock

    def __str__(self) -> str:
        return f"{len(self.keys)} of {self.owned} keys would be removed at once"


@attrs.define(eq=False)
class RemovalGuard:
    """Decides for one controller which removals can start."""

    share: float = 0.5
    above: int = 4
    _held: set[Key] = attrs.field(init=False, factory=set)
    _since: float = attrs.field(init=False, default=0.0)
    _owned: int = attrs.field(init=False, default=0)
    _approved: set[Key] = attrs.field(init=False, factory=set)
    # Key to time, of removals without an approval; an approved one does not count against the
    # next small deletion.
    _recent: dict[Key, float] = attrs.field(init=False, factory=dict)

    def __repr__(self) -> str:
        return (
            f"<RemovalGuard above {self.above} and {self.share:.0%}:"
            f" {len(self._held)} held, {len(self._recent)} in the last minute>"
        )

    @property
    def held(self) -> HeldRemovals | None:
        """The removals that wait for an approval now."""
        if not self._held:
            return None
        return HeldRemovals(tuple(sorted(self._held)), self._owned, self._since)

    def decide(
        self, candidates: AbstractSet[Key], owned: AbstractSet[Key], now: float
    ) -> frozenset[Key]:
        """The keys of *candidates* whose removal can start at *now* (monotonic seconds).

        *candidates* are all keys that are owned, no longer declared, and not yet being removed,
        by complete sources only. *owned* are the candidates and all declared keys, without those
        already being removed. The other candidates are held afterwards.
        """
        self._recent = {key: at for key, at in self._recent.items() if now - at < WINDOW}
        approved = self._approved & candidates
        # Approvals for keys that are not to be removed any more lapse here.
        self._approved.clear()
        self._held &= candidates
        self._held -= approved
        undecided = candidates - approved
        before = owned | self._recent.keys()
        self._owned = len(before)
        # The approved ones are counted this once: the others were not shown together with them.
        if self._too_many(len(candidates | self._recent.keys()), len(before)):
            self._hold(undecided, now)
        passing = undecided - self._held
        self._recent |= dict.fromkeys(passing, now)
        return frozenset(approved | passing)

    def restore(self, held: HeldRemovals) -> None:
        """Hold again what an earlier guard of the controller held, before the first decision."""
        self._held |= set(held.keys)
        self._owned, self._since = held.owned, held.since

    def approve(self, keys: Iterable[Key]) -> None:
        """Approve exactly *keys*, once: at the next decision, which may be the first one."""
        self._approved |= set(keys)

    def release(self, keys: AbstractSet[Key]) -> None:
        """Record that *keys* are declared (again): they are not held, and approvals lapse."""
        self._held -= keys
        self._approved -= keys

    def _too_many(self, removals: int, owned: int) -> bool:
        return removals > self.above and removals > self.share * owned

    def _hold(self, keys: AbstractSet[Key], now: float) -> None:
        if keys and not self._held:
            self._since = now
        self._held |= keys
