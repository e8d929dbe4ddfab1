"""The last good documents of files, joined."""

from __future__ import annotations

from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest, Origin, fingerprint_of
from reconciled.watchers.documents import STABLE_AFTER, Documents
from reconciled.watchers.listing import ReadFile

NOW = 1000.0


def manifest(name: str, value: int, file: str) -> Manifest:
    return Manifest("Exec", name, {"value": value}, Origin(file), fingerprint_of(value))


def read(file: str, *, bad: bool = False, modified: float = 0.0, **values: int) -> ReadFile:
    return ReadFile(
        signature=None,
        digest=b"",
        modified=modified,
        manifests=tuple(manifest(name, value, file) for name, value in values.items()),
        problems=(Problem(Origin(file), "is wrong"),) if bad else (),
    )


def after(*listings: dict[str, ReadFile], torn: bool = False) -> Documents:
    documents = Documents()
    for files in listings:
        documents = documents.updated(files, NOW, torn=torn)
    return documents


def values(documents: Documents) -> dict[str, int]:
    return {name: m.spec["value"] for (_kind, _space, name), m in documents.good.items()}


def test_a_file_that_remains_invalid_keeps_its_last_good_documents() -> None:
    """While a file has faults, however many in a row, the documents that it lost are kept."""
    documents = after(
        {"a": read("a", x=1, y=1)}, {"a": read("a", bad=True, x=2)}, {"a": read("a", bad=True)}
    )
    assert values(documents) == {"x": 2, "y": 1}
    assert not documents.complete
    documents = documents.updated({"a": read("a", x=3)}, NOW, torn=False)
    assert values(documents) == {"x": 3}
    assert documents.complete


def test_the_last_good_of_two_is_kept() -> None:
    """The document from before a key was declared twice is kept, whichever file changes."""
    one, two = read("a", x=1), read("b", x=2)
    documents = after({"b": two}, {"a": one, "b": two}, {"a": one, "b": read("b", x=3)})
    assert values(documents) == {"x": 2}
    assert len(documents.problems) == 2
    assert values(documents.updated({"a": one}, NOW, torn=False)) == {"x": 1}


def test_unchanged_files_give_the_same_value() -> None:
    """The same files give the same object."""
    files = {"a": read("a", x=1)}
    documents = after(files)
    assert documents.updated(dict(files), NOW, torn=False) is documents


def test_a_torn_listing_keeps_last_good_documents() -> None:
    """A file that a torn listing lacks keeps its last good documents until it returns."""
    documents = after({"a": read("a", x=1)}).updated({}, NOW, torn=True)
    assert values(documents) == {}
    assert not documents.complete
    documents = documents.updated({"a": read("a", bad=True)}, NOW, torn=False)
    assert values(documents) == {"x": 1}
    assert documents.updated({}, NOW, torn=False).complete


def test_documents_lost_just_now_are_kept() -> None:
    """Lost documents are kept until the file has not been written for STABLE_AFTER seconds."""
    recent = {"a": read("a", modified=NOW - STABLE_AFTER / 2, x=1)}
    documents = after({"a": read("a", x=1, y=1)}, recent)
    assert values(documents) == {"x": 1, "y": 1}
    assert not documents.complete
    documents = documents.updated(recent, NOW + STABLE_AFTER, torn=False)
    assert values(documents) == {"x": 1}
    assert documents.complete


def test_a_modification_time_in_the_future_is_not_recent() -> None:
    """A file with a modification time in the future does not stay unstable until then."""
    documents = after({"a": read("a", x=1)}, {"a": read("a", modified=NOW + 1e6)})
    assert documents.complete
    assert values(documents) == {}
