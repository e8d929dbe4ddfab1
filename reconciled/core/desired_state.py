"""The desired state of one controller, merged from its sources.

1. The last good state of a source stays while it is unavailable, and what an incomplete
   snapshot leaves out stays as it was.
2. A key is removed only because it is owned and no longer declared, and only while the latest
   report of *every* declaring source is a complete snapshot (invariant 11). Never because of
   an event, and never by a controller without declaring sources.
3. Owned is what the store knows from earlier lives and all that was declared in this one, until
   its removal has ended.
4. Once all sources are complete, the outcome is that of one fresh list of them, whatever came
   before; only a key declared twice stays as it was last good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from types import MappingProxyType

import attrs

from reconciled.core.problems import Problem
from reconciled.core.removals import HeldRemovals, RemovalGuard
from reconciled.core.resources import Key, Manifest, Origin
from reconciled.core.sources import Snapshot, Unavailable


@attrs.frozen
class SourceState:
    """Where one source stands, for people: ``SourceReady`` is False unless complete."""

    complete: bool = False
    reason: str = "has not been read yet"  # why not complete; empty when it is
    since: float = 0.0  # of the last report, on the caller's clock


@attrs.frozen
class Changes:
    """What one report changed; all keys sorted."""

    added: tuple[Key, ...] = ()  # desired from now on
    changed: tuple[Key, ...] = ()  # with another spec
    refreshed: tuple[Key, ...] = ()  # other labels, annotations or place: no reason to run
    # Added while its removal was let go and has not ended: that ends first, then it runs.
    redeclared: tuple[Key, ...] = ()
    removed: tuple[Key, ...] = ()  # its removal may begin
    kept: tuple[Key, ...] = ()  # declared by no one now, but a source is not complete
    released: tuple[Key, ...] = ()  # was held before, and is not now
    held: HeldRemovals | None = None
    problems: tuple[Problem, ...] = ()  # keys that are declared twice


@attrs.define(eq=False)
class _Source:
    state: SourceState = attrs.field(factory=SourceState)
    manifests: Mapping[Key, tuple[Manifest, ...]] = attrs.field(factory=dict)
    left_out: AbstractSet[Key] = frozenset()  # declared before, and not known to be gone
    unmanaged: Mapping[str, Origin] = attrs.field(factory=dict)


def _keys(keys: Iterable[Key]) -> set[Key]:
    return set(keys)


@attrs.define(eq=False)
class DesiredState:
    """Desired state of *controller*: the manifests of *kind* from *sources*.

    sources  names of its watchers that declare; timers are none of them
    owned    the keys that the store knows as this controller's
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
        """What this controller may remove once nobody declares it."""
        return frozenset(self._owned)

    @property
    def states(self) -> Mapping[str, SourceState]:
        """Each declaring source by name."""
        return {name: source.state for name, source in self._reported.items()}

    @property
    def unmanaged(self) -> Mapping[str, Origin]:
        """Kinds that the sources declare and this controller leaves, and where one stands."""
        foreign: dict[str, Origin] = {}
        for source in self._reported.values():
            foreign |= source.unmanaged
        return foreign

    @property
    def complete(self) -> bool:
        """Whether every source is complete, so that what is missing is known to be gone."""
        return bool(self._reported) and all(
            source.state.complete for source in self._reported.values()
        )

    def apply(self, source: str, report: Snapshot | Unavailable, now: float) -> Changes:
        """Take over what *source* reports at *now* (monotonic seconds).

        Raises KeyError for a source that is not declared as one.
        """
        told = self._reported[source]
        if isinstance(report, Unavailable):
            told.state = SourceState(complete=False, reason=report.reason, since=now)
        else:
            self._apply_snapshot(told, report, now)
        return self._merge(now)

    def approve(self, keys: Iterable[Key], now: float) -> Changes:
        """Let exactly *keys* be removed, once, although many are at once.

        Keys that are not held yet (a permit given while the daemon was down) pass when the
        sources are complete for the first time, if they are missing then; else it lapses.
        """
        self.guard.approve(keys)
        return self._merge(now)

    def finish_removal(self, key: Key) -> bool:
        """Forget *key*, whose removal has ended. True if it is desired again, and has to run."""
        self._removing.discard(key)
        if not any(key in source.manifests for source in self._reported.values()):
            self._owned.discard(key)
        return key in self._manifests

    def _apply_snapshot(self, source: _Source, snapshot: Snapshot, now: float) -> None:
        declared: dict[Key, tuple[Manifest, ...]] = {}
        foreign: dict[str, Origin] = {}
        for manifest in snapshot.manifests:
            if manifest.kind != self.kind:
                foreign.setdefault(manifest.kind, manifest.origin)
                continue
            key = manifest.key_for(self.controller)
            declared[key] = (*declared.get(key, ()), manifest)
        left_out: AbstractSet[Key] = frozenset()
        if not snapshot.complete:
            left_out = (source.manifests.keys() | source.left_out) - declared.keys()
        reason = "" if snapshot.complete else _incomplete_reason(snapshot)
        source.state = SourceState(snapshot.complete, reason, now)
        source.manifests, source.left_out, source.unmanaged = declared, left_out, foreign

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
        return "changes while it is read"
    more = len(snapshot.problems) - 1
    return str(snapshot.problems[0]) + (f" (and {more} more)" if more else "")


def _duplicate_problems(key: Key, manifests: tuple[Manifest, ...]) -> list[Problem]:
    return [
        Problem(
            manifest.origin,
            f"{key} is declared at {_others(manifest, manifests)} too, so that neither counts:"
            " keep one of them",
        )
        for manifest in manifests
    ]


def _others(manifest: Manifest, manifests: tuple[Manifest, ...]) -> str:
    return ", ".join(str(other.origin) for other in manifests if other is not manifest)


def _released(before: HeldRemovals | None, now: HeldRemovals | None) -> tuple[Key, ...]:
    still = set(now.keys) if now else set()
    return tuple(key for key in (before.keys if before else ()) if key not in still)
