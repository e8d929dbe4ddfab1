"""The desired state of one controller."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from reconciled.core.desired_state import Changes, DesiredState
from reconciled.core.problems import Problem
from reconciled.core.removal_guard import RemovalGuard
from reconciled.core.resources import Key, Manifest, Origin, fingerprint_of
from reconciled.core.sources import Snapshot, Unavailable


def manifest(name: str, spec: Any = 1, kind: str = "Exec", file: str = "a.yaml") -> Manifest:
    spec = {"value": spec}
    return Manifest(kind, name, spec, Origin(file), fingerprint_of([kind, spec]))


def whole(*names: str | Manifest) -> Snapshot:
    return Snapshot(tuple(manifest(n) if isinstance(n, str) else n for n in names), complete=True)


def part(*names: str | Manifest, problems: tuple[Problem, ...] = ()) -> Snapshot:
    return attrs.evolve(whole(*names), complete=False, problems=problems)


def desired(*sources: str, owned: tuple[str, ...] = (), **guard: Any) -> DesiredState:
    return DesiredState("site", "Exec", sources, RemovalGuard(**guard), keys(*owned))


def keys(*names: str) -> tuple[Key, ...]:
    return tuple(Key(f"site/{name}") for name in names)


def test_a_report_says_what_changed() -> None:
    """Added, changed and refreshed are distinguished by key, spec and everything else."""
    state = desired("d")
    assert state.apply("d", whole("a", "b", "c"), 0.0).added == keys("a", "b", "c")
    moved = attrs.evolve(manifest("b"), labels={"team": "web"})
    changes = state.apply("d", whole("a", moved, manifest("c", 2)), 1.0)
    assert changes == Changes(changed=keys("c"), refreshed=keys("b"))
    assert state.manifests[keys("b")[0]].labels == {"team": "web"}


def test_other_kinds_are_ignored_and_listed() -> None:
    """A controller takes its kind only; each other kind is listed with an origin."""
    state = desired("d")
    other = manifest("x", kind="File", file="x.yaml")
    assert state.apply("d", whole("a", other), 0.0).added == keys("a")
    assert state.unmanaged == {"File": Origin("x.yaml")}


def test_a_key_that_is_no_longer_declared_is_removed() -> None:
    """A removal follows from what is owned minus what is declared (C08)."""
    state = desired("d")
    state.apply("d", whole("a", "b"), 0.0)
    assert state.apply("d", whole("b"), 1.0) == Changes(removed=keys("a"))


def test_a_manifest_deleted_while_the_daemon_was_down_is_removed() -> None:
    """A key of the store that the first complete list lacks is removed (C08 case 2)."""
    state = desired("d", owned=("a", "b"))
    assert state.apply("d", whole("b"), 0.0) == Changes(added=keys("b"), removed=keys("a"))


@pytest.mark.parametrize("report", [Unavailable("500"), part(), part("a")])
def test_unknown_is_not_empty(report: Snapshot | Unavailable) -> None:
    """A source that cannot be read, or only in part, removes nothing (C10 cases 1, 3, 5)."""
    state = desired("d", owned=("a", "b", "c"))
    state.apply("d", whole("a", "b", "c"), 0.0)
    changes = state.apply("d", report, 1.0)
    assert changes.removed == ()
    assert set(state.manifests) == set(keys("a", "b", "c"))
    assert not state.states["d"].complete
    assert not state.complete


def test_unknown_at_the_start_removes_nothing() -> None:
    """Before the first complete snapshot the keys of the store are kept, and reported as such."""
    state = desired("d", owned=("a",))
    assert state.apply("d", Unavailable("gone"), 0.0) == Changes(kept=keys("a"))
    assert state.apply("d", part("b"), 1.0) == Changes(added=keys("b"), kept=keys("a"))
    assert state.states["d"].reason == "changed while it was read"


def test_every_source_must_be_complete() -> None:
    """While one of two sources is incomplete, deletions in the other wait."""
    state = desired("d", "e")
    state.apply("d", whole("a", "b"), 0.0)
    assert state.apply("d", whole("b"), 1.0) == Changes(kept=keys("a"))
    assert state.apply("e", part("c"), 2.0).removed == ()
    assert state.apply("e", whole("c"), 3.0).removed == keys("a")
    state.apply("e", Unavailable("gone"), 4.0)
    assert state.apply("d", whole(), 5.0) == Changes(kept=keys("b"))
    assert keys("c")[0] in state.manifests


def test_a_key_that_moves_between_sources_is_not_removed() -> None:
    """A key that one source drops and another declares is never removed, in either order."""
    state = desired("d", "e", above=0, share=0)
    state.apply("d", whole("a"), 0.0)
    state.apply("e", whole(), 0.0)
    assert state.apply("e", whole("a"), 1.0).problems != ()
    assert state.apply("d", whole(), 2.0) == Changes()
    assert state.apply("e", part(), 3.0) == Changes(kept=keys("a"))
    assert state.apply("d", whole("a"), 4.0) == Changes()


def test_a_controller_without_declaring_sources_never_removes() -> None:
    """A controller with timers only has no list of what is declared, and removes nothing."""
    state = desired(owned=("a",))
    assert state.approve(keys("a"), 0.0) == Changes(kept=keys("a"))
    assert not state.complete


def test_a_key_declared_twice_keeps_its_last_good_manifest() -> None:
    """Both origins are reported, and the last good manifest is kept until one is deleted."""
    state = desired("d", "e")
    state.apply("d", whole("a"), 0.0)
    other = manifest("a", 2, file="b.yaml")
    changes = state.apply("e", whole(other), 1.0)
    assert [str(problem.origin) for problem in changes.problems] == ["a.yaml:1:1", "b.yaml:1:1"]
    assert "site/a is declared at b.yaml:1:1 too" in changes.problems[0].message
    assert changes.changed == changes.removed == ()
    assert state.apply("d", whole(manifest("a", 3)), 2.0).changed == ()
    assert state.apply("d", whole(), 3.0) == Changes(changed=keys("a"))


def test_a_key_declared_twice_from_the_start_is_not_removed() -> None:
    """Without a last good manifest neither is used, and the key of the store is kept."""
    state = desired("d", owned=("a",))
    changes = state.apply("d", whole("a", manifest("a", 2, file="b.yaml")), 0.0)
    assert changes.added == changes.removed == ()
    assert len(changes.problems) == 2


def test_many_removals_are_held_until_approved() -> None:
    """An empty complete list holds its removals until exactly these are approved (C10 case 2)."""
    names = ("a", "b", "c", "d", "e", "f")
    state = desired("d")
    state.apply("d", whole(*names), 0.0)
    changes = state.apply("d", whole(), 1.0)
    assert changes.removed == ()
    assert changes.held is not None
    assert changes.held.keys == keys(*names)
    approved = state.approve(changes.held.keys, 2.0)
    assert approved == Changes(removed=keys(*names), released=keys(*names))


def test_a_held_key_is_released_when_declared_again() -> None:
    """A held key that is declared again is added and released; the others stay held."""
    state = desired("d", owned=("a", "b", "c", "d", "e"))
    state.apply("d", whole(), 0.0)
    changes = state.apply("d", whole("a", "b", "c", "d"), 1.0)
    assert changes.added == changes.released == keys("a", "b", "c", "d")
    assert changes.held is not None
    assert changes.held.keys == keys("e")
    assert changes.redeclared == ()


def test_declared_again_while_a_source_is_incomplete() -> None:
    """It is released immediately, and a pending approval of it lapses."""
    names = ("a", "b", "c", "d", "e")
    state = desired("d", owned=names)
    state.apply("d", whole(), 0.0)
    assert state.apply("d", part(), 1.0).held is not None
    assert state.approve(keys(*names), 2.0).removed == ()
    assert state.apply("d", part("a"), 3.0).released == keys("a")
    state.apply("d", part(), 4.0)
    changes = state.apply("d", whole(), 5.0)
    assert changes.removed == keys("b", "c", "d", "e")
    assert changes.held is not None
    assert changes.held.keys == keys("a")


def test_a_key_declared_twice_and_then_left_out_is_not_used() -> None:
    """Declared twice from the start, then not read: neither of the two becomes the last good."""
    state = desired("d", owned=("a",))
    state.apply("d", whole("a", manifest("a", 2, file="b.yaml")), 0.0)
    assert state.apply("d", part(), 1.0) == Changes(kept=keys("a"))
    assert state.manifests == {}


def test_an_approval_given_while_down_waits_for_a_complete_list() -> None:
    """An approval that precedes the first snapshot takes effect at the first complete one."""
    names = ("a", "b", "c", "d", "e")
    state = desired("d", owned=names)
    assert state.approve(keys(*names), 0.0).removed == ()
    assert state.apply("d", Unavailable("gone"), 1.0).removed == ()
    assert state.apply("d", whole(), 2.0).removed == keys(*names)


def test_declared_again_during_its_removal() -> None:
    """The removal ends first, then the key runs again; it is not removed a second time."""
    state = desired("d", owned=("a",))
    assert state.apply("d", whole(), 0.0).removed == keys("a")
    assert state.apply("d", whole("a"), 1.0) == Changes(added=keys("a"), redeclared=keys("a"))
    assert state.apply("d", whole(), 2.0).removed == ()
    assert state.apply("d", whole("a"), 3.0).redeclared == keys("a")
    assert state.finish_removal(keys("a")[0])
    assert state.apply("d", whole(), 4.0).removed == keys("a")
    assert not state.finish_removal(keys("a")[0])
    assert state.owned == frozenset()


def test_repr_and_reasons() -> None:
    """repr() shows kind and counts; an incomplete source has its reason."""
    state = desired("d", "e", owned=("z",))
    state.apply("d", part("a", problems=(Problem(Origin("a.yaml", 3, 4), "is wrong"),) * 2), 5.0)
    assert state.states["d"].reason == "a.yaml:3:4: is wrong (and 1 more)"
    assert repr(state) == (
        "<Desired site: 1 of Exec, 2 owned, 0 in removal, 2 of 2 sources not complete>"
    )


NAMES = [f"k{number}" for number in range(8)]
LISTS = st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3), max_size=8)


class Model(RuleBasedStateMachine):
    """Random sources, compared with a fresh list of them."""

    @initialize(owned=st.sets(st.sampled_from(NAMES)), above=st.integers(0, 4))
    def start(self, owned: set[str], above: int) -> None:
        """Start with the keys that an earlier run left in the store."""
        self.now = 0.0
        self.state = desired("d", "e", owned=tuple(sorted(owned)), above=above)
        self.truth: dict[str, dict[str, int]] = {"d": {}, "e": {}}
        self.known: dict[str, bool] = {"d": False, "e": False}
        self.removing: set[Key] = set()
        self.approved: set[Key] = set()

    def check(self, changes: Changes) -> None:
        """Check one set of changes, and start its removals."""
        declared = set(keys(*self.truth["d"], *self.truth["e"]))
        assert not set(changes.removed) & set(self.state.manifests)
        assert not set(changes.removed) & self.removing
        if changes.removed:
            assert all(self.known.values()), "removed without a complete list"
            assert not set(changes.removed) & declared, "removed although declared"
        if len(changes.removed) > self.state.guard.above:
            more_than_half = len(changes.removed) > 0.5 * len(self.state.owned - self.removing)
            assert not more_than_half or set(changes.removed) <= self.approved
        self.removing |= set(changes.removed)
        # An approval waits for complete sources, and lapses when its key is declared again.
        self.approved = set() if all(self.known.values()) else self.approved - declared

    @rule(source=st.sampled_from("de"), declares=LISTS, seconds=st.floats(0, 90))
    def complete(self, source: str, declares: dict[str, int], seconds: float) -> None:
        """A source is read completely."""
        self.now += seconds
        other = self.truth["e" if source == "d" else "d"]
        self.truth[source] = {name: spec for name, spec in declares.items() if name not in other}
        self.known[source] = True
        listed = [manifest(name, spec) for name, spec in self.truth[source].items()]
        self.check(self.state.apply(source, whole(*listed), self.now))

    @rule(source=st.sampled_from("de"), reads=st.sets(st.sampled_from(NAMES)))
    def incomplete(self, source: str, reads: set[str]) -> None:
        """A part of a source is read."""
        self.known[source] = False
        before = set(self.state.manifests)
        listed = [manifest(n, spec) for n, spec in self.truth[source].items() if n in reads]
        self.check(self.state.apply(source, part(*listed), self.now))
        assert before <= set(self.state.manifests)

    @rule(source=st.sampled_from("de"))
    def unavailable(self, source: str) -> None:
        """A source cannot be read."""
        self.known[source] = False
        before = dict(self.state.manifests)
        self.check(self.state.apply(source, Unavailable("gone"), self.now))
        assert before == dict(self.state.manifests)

    @precondition(lambda self: self.state.guard.held)
    @rule(share=st.floats(0, 1))
    def approve(self, share: float) -> None:
        """A person approves some of the held removals."""
        held = self.state.guard.held
        assert held is not None
        chosen = held.keys[: round(share * len(held.keys))]
        self.approved |= set(chosen)
        changes = self.state.approve(chosen, self.now)
        if all(self.known.values()):
            assert set(changes.removed) == set(chosen)
        self.check(changes)

    @precondition(lambda self: self.removing)
    @rule(data=st.data())
    def removal_ends(self, data: st.DataObject) -> None:
        """One removal has ended."""
        key = data.draw(st.sampled_from(sorted(self.removing)))
        self.removing.discard(key)
        assert self.state.finish_removal(key) == (key in self.state.manifests)

    @invariant()
    def equals_a_fresh_list(self) -> None:
        """Whatever came before, complete sources equal a fresh list (C08)."""
        if not all(self.known.values()):
            assert not self.state.complete
            return
        fresh = {**self.truth["d"], **self.truth["e"]}
        assert {key: m.spec["value"] for key, m in self.state.manifests.items()} == {
            keys(name)[0]: spec for name, spec in fresh.items()
        }
        held = self.state.guard.held
        waiting = set(held.keys if held else ())
        left = self.state.owned - set(self.state.manifests) - self.removing
        assert left == waiting, "owned, not declared, and neither removed nor held"


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestModel = Model.TestCase
