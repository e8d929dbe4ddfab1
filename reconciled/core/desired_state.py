"""The desired state of one controller, merged from its sources.

1. The last good state of a source is kept while the source is unavailable, and what an
   incomplete snapshot leaves out is kept unchanged.
2. A key is removed only because it is owned and no longer declared, and only while the latest
   report of *every* declaring source is a complete snapshot (invariant 11). Never because of
   an event, and never by a controller without declaring sources.
3. Owned is what the store recorded in earlier runs of the daemon and all that was declared in
   this one, until its removal has ended.
4. Once all sources are complete, the outcome is that of one fresh list of them, whatever came
   before; only a key declared twice keeps its last good manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import attrs

from reconciled.core.problems import Problem
from reconciled.core.removal_guard import HeldRemovals, RemovalGuard
from reconciled.core.resources import Key, Manifest, Origin
from reconciled.core.sources import Snapshot, Unavailable


@attrs.frozen
class SourceState:
    """The state of one source, for people: ``SourceReady`` is False unless complete."""

    complete: bool = False
    reason: str = "has not been read yet"  # why not complete; empty when it is
    since: float = 0.0  # of the last report, on the caller's clock


@attrs.frozen
class Changes:
    """What one report changed; all keys sorted."""

    added: tuple[Key, ...] = ()  # desired from now on
    changed: tuple[Key, ...] = ()  # with another spec
    refreshed: tuple[Key, ...] = ()  # other labels, annotations or origin: no reason to run
    # Added while its removal has begun and not ended: the removal ends first, then it runs.
    redeclared: tuple[Key, ...] = ()
    removed: tuple[Key, ...] = ()  # its removal can start
    kept: tuple[Key, ...] = ()  # not declared now, but a source is not complete
    released: tuple[Key, ...] = ()  # held before, and not now
    held: HeldRemovals | None = None
    problems: tuple[Problem, ...] = ()  # keys that are declared twice


@attrs.define(eq=False)
class _Source:
    state: SourceState = attrs.field(factory=SourceState)
    manifests: Mapping[Key, tuple[Manifest, ...]] = attrs.field(factory=dict)
    left_out: AbstractSet[Key] = frozenset()  # declared before, and not known to be deleted
    unmanaged: Mapping[str, Origin] = attrs.field(factory=dict)


def _keys(keys: Iterable[Key]) -> set[Key]:
    return set(keys)


@attrs.define(eq=False)
class DesiredState:
    """Desired state of *controller*: the manifests of *kind* from *sources*.

    sources  names of its watchers that declare, so not of timers
    owned    the keys that the store has recorded as this controller's
    """

    controller: str
    kind: str
    sources: Iterable[str]
    guard: RemovalGuard
    _owned: set[Key] = attrs.field(converter=_keys, alias="owned")
    _reported: dict[str, _Source] = attrs.field(init=False)
    _manifests: dict[Key, Manifest] = attrs.field(init=False, factory=dict)
    _removing: set[Key] = attrs.field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._reported = {name: _Source() for name in sorted(self.sources)}

    def __repr__(self) -> str:
        waiting = [name for name, source in self._reported.items() if not source.state.complete]
        return (
            f"<Desired {self.controller}: {len(self._manifests)} of {self.kind},"
            f" {len(self._owned)} owned, {len(self._removing)} in removal,"
            f" {len(waiting)} of {len(self._reported)} sources not complete>"
        )

    @property
    def manifests(self) -> Mapping[Key, Manifest]:
        """What is desired now."""
        return MappingProxyType(self._manifests)

    @property
    def owned(self) -> frozenset[Key]:
        """The keys that this controller may remove once they are not declared."""
        return frozenset(self._owned)

    @property
    def states(self) -> Mapping[str, SourceState]:
        """Each declaring source by name."""
        return {name: source.state for name, source in self._reported.items()}

    @property
    def unmanaged(self) -> Mapping[str, Origin]:
        """Kinds that the sources declare and this controller does not take, each with an origin."""
        unmanaged: dict[str, Origin] = {}
        for source in self._reported.values():
            unmanaged |= source.unmanaged
        return unmanaged

    @property
    def complete(self) -> bool:
        """Whether every source is complete, so that what is missing is known to be deleted."""
        return bool(self._reported) and all(
            source.state.complete for source in self._reported.values()
        )

    def apply(self, source: str, report: Snapshot | Unavailable, now: float) -> Changes:
        """Merge what *source* reports at *now* (monotonic seconds).

        Raises KeyError for a name that is not one of ``sources``.
        """
        reported = self._reported[source]
        if isinstance(report, Unavailable):
            reported.state = SourceState(complete=False, reason=report.reason, since=now)
        else:
            self._apply_snapshot(reported, report, now)
        return self._merge(now)

    def approve(self, keys: Iterable[Key], now: float) -> Changes:
        """Approve the removal of exactly *keys*, once, although there are many at once.

        Keys that are not held yet (an approval given while the daemon was down) are removed when
        the sources are complete for the first time, if they are missing then; else it lapses.
        """
        self.guard.approve(keys)
        return self._merge(now)

    def finish_removal(self, key: Key) -> bool:
        """Forget *key*, whose removal has ended. True: it is desired again, and must run."""
        self._removing.discard(key)
        if not any(key in source.manifests for source in self._reported.values()):
            self._owned.discard(key)
        return key in self._manifests

    def _apply_snapshot(self, source: _Source, snapshot: Snapshot, now: float) -> None:
        declared: dict[Key, tuple[Manifest, ...]] = {}
        unmanaged: dict[str, Origin] = {}
        for manifest in snapshot.manifests:
            if manifest.kind != self.kind:
                unmanaged.setdefault(manifest.kind, manifest.origin)
                continue
            key = manifest.key_for(self.controller)
            declared[key] = (*declared.get(key, ()), manifest)
        left_out: AbstractSet[Key] = frozenset()
        if not snapshot.complete:
            left_out = (source.manifests.keys() | source.left_out) - declared.keys()
        reason = "" if snapshot.complete else _incomplete_reason(snapshot)
        source.state = SourceState(snapshot.complete, reason, now)
        source.manifests, source.left_out, source.unmanaged = declared, left_out, unmanaged

    def _all_declarations(self) -> dict[Key, tuple[Manifest, ...]]:
        together: dict[Key, tuple[Manifest, ...]] = {}
        for source in self._reported.values():
            for key, manifests in source.manifests.items():
                together[key] = (*together[key], *manifests) if key in together else manifests
        return together

    def _merge(self, now: float) -> Changes:
        declared = self._all_declarations()
        manifests: dict[Key, Manifest] = {}
        problems: list[Problem] = []
        for key, each in declared.items():
            if len(each) == 1:
                manifests[key] = each[0]
                continue
            problems += _duplicate_problems(key, each)
            if key in self._manifests:
                manifests[key] = self._manifests[key]
        for source in self._reported.values():
            for key in source.left_out & self._manifests.keys():
                manifests.setdefault(key, self._manifests[key])
        before, self._manifests = self._manifests, manifests
        self._owned |= declared.keys()
        held_before = self.guard.held
        self.guard.release(declared.keys())
        removed, kept = self._remove(declared.keys(), now)
        return attrs.evolve(
            self._diff(before),
            removed=tuple(sorted(removed)),
            kept=tuple(sorted(kept)),
            released=_released(held_before, self.guard.held),
            held=self.guard.held,
            problems=tuple(sorted(problems)),
        )

    def _diff(self, before: Mapping[Key, Manifest]) -> Changes:
        present = self._manifests
        added = present.keys() - before.keys()
        both = [
            key
            for key in present.keys() & before.keys()
            # Most are the same object: comparing ten thousand by value would take 15 ms.
            if present[key] is not before[key] and present[key] != before[key]
        ]
        changed = {key for key in both if present[key].fingerprint != before[key].fingerprint}
        return Changes(
            added=tuple(sorted(added)),
            changed=tuple(sorted(changed)),
            refreshed=tuple(sorted(set(both) - changed)),
            redeclared=tuple(sorted(added & self._removing)),
        )

    def _remove(
        self, declared: AbstractSet[Key], now: float
    ) -> tuple[AbstractSet[Key], AbstractSet[Key]]:
        missing = self._owned - declared - self._removing
        if not self.complete:
            return frozenset(), missing
        removed = self.guard.decide(missing, self._owned - self._removing, now)
        self._removing |= removed
        return removed, frozenset()


def _incomplete_reason(snapshot: Snapshot) -> str:
    if not snapshot.problems:
        return "changed while it was read"
    more = len(snapshot.problems) - 1
    return str(snapshot.problems[0]) + (f" (and {more} more)" if more else "")


def _duplicate_problems(key: Key, manifests: tuple[Manifest, ...]) -> list[Problem]:
    return [
        Problem(
            manifest.origin,
            f"{key} is declared at {_others(manifest, manifests)} too, and neither is used:"
            " keep one of them",
        )
        for manifest in manifests
    ]


def _others(manifest: Manifest, manifests: tuple[Manifest, ...]) -> str:
    return ", ".join(str(other.origin) for other in manifests if other is not manifest)


def _released(before: HeldRemovals | None, now: HeldRemovals | None) -> tuple[Key, ...]:
    still = set(now.keys) if now else set()
    return tuple(key for key in (before.keys if before else ()) if key not in still)
