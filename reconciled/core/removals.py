"""The guard before removals: many at once wait for a person's decision.

1. A set is held when it has more than ``above`` keys and is more than a ``share`` of what was
   owned. Removals of the last minute count along: a slow mass deletion passes in no slices.
2. What is held stays held, until exactly that key is permitted or declared again. A set that
   shrinks below the limits is not let go by itself: what made it small is not known to be good.
3. A permit is for one removal of one key, and lapses when the key is declared again.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import attrs

from reconciled.core.resources import Key

# Seconds for which a removal counts along with later ones.
WINDOW = 60.0


@attrs.frozen
class HeldRemovals:
    """Removals that wait for a decision, as shown to the person who decides."""

    keys: tuple[Key, ...]  # sorted
    owned: int  # how many the controller owned when the set was last judged
    since: float  # when the first of them was held, on the caller's clock

    def __str__(self) -> str:
        return f"{len(self.keys)} of {self.owned} keys would be removed at once"


@attrs.define(eq=False)
class RemovalGuard:
    """Decides for one controller which removals may go ahead."""

    share: float = 0.5
    above: int = 4
    _held: set[Key] = attrs.field(init=False, factory=set)
    _since: float = attrs.field(init=False, default=0.0)
    _owned: int = attrs.field(init=False, default=0)
    _approved: set[Key] = attrs.field(init=False, factory=set)
    # Key to time, of removals that nobody was asked about; a person's decision is not used
    # against the next small deletion.
    _recent: dict[Key, float] = attrs.field(init=False, factory=dict)

    def __repr__(self) -> str:
        return (
            f"<RemovalGuard above {self.above} and {self.share:.0%}:"
            f" {len(self._held)} held, {len(self._recent)} in the last minute>"
        )

    @property
    def held(self) -> HeldRemovals | None:
        """What waits for a decision now."""
        if not self._held:
            return None
        return HeldRemovals(tuple(sorted(self._held)), self._owned, self._since)

    def decide(
        self, candidates: AbstractSet[Key], owned: AbstractSet[Key], now: float
    ) -> frozenset[Key]:
        """The keys of *candidates* whose removal may begin at *now* (monotonic seconds).

        candidates are all that is owned, no longer declared, and whose removal has not begun,
        by complete sources only. owned is the candidates and all that is declared, without what is
        being removed already. Candidates that may not pass are held afterwards.
        """
        self._recent = {key: at for key, at in self._recent.items() if now - at < WINDOW}
        permitted = self._approved & candidates
        # Permits for keys that nobody wants removed any more lapse here.
        self._approved.clear()
        self._held &= candidates
        self._held -= permitted
        asked = candidates - permitted
        before = owned | self._recent.keys()
        self._owned = len(before)
        # The permitted ones count along this once: what goes with them was not shown with them.
        if self._too_many(len(candidates | self._recent.keys()), len(before)):
            self._hold(asked, now)
        passing = asked - self._held
        self._recent |= dict.fromkeys(passing, now)
        return frozenset(permitted | passing)

    def approve(self, keys: Iterable[Key]) -> None:
        """Let exactly *keys* pass, once: at the next decision, which may be the first one."""
        self._approved |= set(keys)

    def release(self, keys: AbstractSet[Key]) -> None:
        """Note that *keys* are declared (again): they are not held, and no permit is left."""
        self._held -= keys
        self._approved -= keys

    def _too_many(self, removals: int, owned: int) -> bool:
        return removals > self.above and removals > self.share * owned

    def _hold(self, keys: AbstractSet[Key], now: float) -> None:
        if keys and not self._held:
            self._since = now
        self._held |= keys
