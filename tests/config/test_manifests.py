"""Manifests: an invalid one is reported, and affects only itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from reconciled.config.manifests import Parser
from reconciled.config.yaml.positions import Path, Positions
from reconciled.core.errors import Invalid
from reconciled.core.resources import NOTHING, Manifest, fingerprint_of

GOOD = "kind: Exec\nmetadata: {name: site}\nspec: {}\n"


def parse(text: str) -> tuple[list[Manifest], list[str]]:
    manifests, problems = Parser().parse(text.encode(), "f")
    return manifests, [str(problem) for problem in problems]


def test_a_manifest() -> None:
    """All that a manifest declares is kept, with its location."""
    text = """# about it
apiVersion: reconciled/v1
kind: Exec
metadata: {name: a.b-c, namespace: web, labels: {team: x}, annotations: {note: "5"}}
spec: {apply: [./x], n: 1.5}
"""
    spec = {"apply": ["./x"], "n": 1.5}
    ((manifest,), problems) = parse(text)
    assert problems == []
    assert manifest.key_for("c") == "c/web/a.b-c"
    assert (manifest.labels, manifest.annotations) == ({"team": "x"}, {"note": "5"})
    assert manifest.spec == spec
    assert manifest.fingerprint == fingerprint_of({"kind": "Exec", "spec": spec})
    assert str(manifest.origin) == "f:2:1"


def test_fingerprint_is_of_kind_and_spec_alone() -> None:
    """A changed label, a comment or another order of keys does not change the resource."""
    (one, two) = (
        parse("kind: K\nmetadata: {name: a}\nspec: {a: 1, b: 2}")[0][0],
        parse("# x\nkind: K\nmetadata: {name: a, labels: {l: x}}\nspec: {b: 2, a: 1}")[0][0],
    )
    (other,) = parse("kind: L\nmetadata: {name: a}\nspec: {a: 1, b: 2}")[0]
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_manifests_share_equal_parts() -> None:
    """Manifests share the objects that are equal in thousands of them: kinds, namespaces."""
    text = "kind: Exec\nmetadata: {name: NAME, namespace: web}\nspec: {}\n"
    (one,), (two,) = parse(text.replace("NAME", "a"))[0], parse(text.replace("NAME", "b"))[0]
    assert one.kind is two.kind
    assert one.namespace is two.namespace
    assert one.labels is one.annotations is NOTHING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "f:1:1: an empty file declares nothing"),
        (" \n\n", "f:1:1: an empty file declares nothing"),
        ("- a", "f:1:1: takes a mapping of kind, metadata and spec, got a list"),
        ("text", "got text"),
        (GOOD + "apiVersion: v1\n", "f:4:13: apiVersion: unknown value v1"),
        (GOOD.replace("spec:", "spce:"), "f:3:1: unknown key spce: did you mean spec?"),
        (GOOD.replace("metadata:", "metdata:"), "f:2:1: unknown key metdata: did you mean"),
        (GOOD + "status: {}\n", "f:4:1: unknown key status"),
        (GOOD.replace("spec: {}", "spec:"), "write {} for an empty one"),
        (GOOD.replace("spec: {}\n", ""), "f:1:1: spec is missing"),
        (GOOD.replace("name: site", "name: Site"), "f:2:18: metadata.name: 'Site' is not a name"),
        (GOOD.replace("name: site", "name: a..b"), "is not a name"),
        (GOOD.replace("name: site", "name: ../x"), "is not a name"),
        (GOOD.replace("name: site", "name: " + "a" * 64), "is not a name"),
        (GOOD.replace("name: site", "name: " + "a." * 127 + "a"), "is not a name"),
        (GOOD.replace("name: site", "name: 5"), 'write "5"'),
        (GOOD.replace("name: site", "name: a, namespace: a.b"), "is not a namespace"),
        (GOOD.replace("name: site", "name: a, labels: {x: 5}"), "f:2:33: metadata.labels.x: "),
        (GOOD.replace("name: site", "name: a, lables: {}"), "did you mean labels?"),
        (GOOD.replace("kind: Exec", "kind: a/b"), "'a/b' is not a kind"),
    ],
)
def test_c10_an_invalid_manifest_is_a_problem(text: str, expected: str) -> None:
    """An empty file, a misspelt key or a bad name is one problem, and declares nothing."""
    manifests, (message,) = parse(text)
    assert manifests == []
    assert expected in message


@pytest.mark.parametrize("text", ["# only this\n", "---\n", "---\n# a\n---\n# b\n"])
def test_comments_declare_nothing(text: str) -> None:
    """A file with only comments is valid and declares nothing."""
    assert parse(text) == ([], [])


@pytest.mark.parametrize("bad", ["kind: Exec\n", "a: [", "x: no", "- 5", "a:\n\tb: c"])
def test_c13_valid_documents_beside_an_invalid_one(bad: str) -> None:
    """The valid documents of a file are returned with the problems of the invalid one."""
    text = GOOD + "---\n" + bad + "\n---\n" + GOOD.replace("site", "after")
    manifests, messages = parse(text)
    assert [manifest.name for manifest in manifests] == ["site", "after"]
    assert messages


def test_one_key_twice() -> None:
    """Two documents with one key are both reported, and neither is returned."""
    text = GOOD + "---\n" + GOOD.replace("site", "other") + "---\n" + GOOD
    manifests, (message,) = parse(text)
    assert [manifest.name for manifest in manifests] == ["other"]
    assert message.startswith("f:9:1: Exec site is declared twice, first at f:1:1")


def test_one_name_in_two_kinds_or_namespaces() -> None:
    """Kind and namespace distinguish resources of one name."""
    text = GOOD + "---\n" + GOOD.replace("Exec", "File")
    text += "---\n" + GOOD.replace("site", "site, namespace: x")
    manifests, messages = parse(text)
    assert (len(manifests), messages) == (3, [])


def test_read_spec_gets_the_location_of_the_spec() -> None:
    """A problem that *read_spec* raises omits its manifest, and names its location in the spec."""

    def read_spec(kind: str, spec: Mapping[str, Any], positions: Positions, path: Path) -> Any:
        if "a" in spec:
            raise Invalid([positions.problem((*path, "a"), f"bad in {kind}")])
        return "typed"

    text = GOOD + "---\n" + GOOD.replace("site", "bad").replace("{}", "{a: 1}")
    manifests, problems = Parser(read_spec).parse(text.encode(), "f")
    assert [manifest.name for manifest in manifests] == ["site"]
    assert [manifest.typed_spec for manifest in manifests] == ["typed"]
    assert [str(problem) for problem in problems] == ["f:7:11: spec.a: bad in Exec"]
