"""What a directory declares: the last good documents of its files, joined.

1. The documents of a file with problems are added to its last good ones: a typo removes nothing.
2. If two documents have the same key, both are reported, and the last good one is kept.
3. A file that was written just now and lost documents may be half-written: the lost documents
   are kept until the file has not been written for STABLE_AFTER seconds.

Documents is a value: updated() returns a new one, so that an abandoned thread changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from reconciled.core.problems import Problem
from reconciled.core.resources import Manifest
from reconciled.watchers.listing import ReadFile

# Seconds without a write after which a file that lost documents counts as complete. Less than
# MAX_DEBOUNCE, so that an edit is reported once.
STABLE_AFTER = 0.3

DocumentId = tuple[str, str | None, str]


@attrs.frozen(eq=False)
class Documents:
    """The documents of a directory, as they are reported."""

    good: Mapping[DocumentId, Manifest] = attrs.field(factory=dict)
    problems: tuple[Problem, ...] = ()
    unstable: bool = False  # a file lost documents and may be half-written
    torn: bool = False  # something changed during the listing
    _files: Mapping[str, ReadFile] = attrs.field(factory=dict)
    _by_file: Mapping[str, tuple[Manifest, ...]] = attrs.field(factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every document that is missing here is known to be removed."""
        return not (self.problems or self.unstable or self.torn)

    def updated(self, files: Mapping[str, ReadFile], now: float, *, torn: bool) -> Documents:
        """The documents after *files* were read at *now* (seconds since the epoch).

        In a torn listing a missing file is not known to be removed: its last good documents are
        not reported, but kept for the next listing.
        """
        if not (torn or self.torn or self.unstable) and _is_unchanged(files, self._files):
            return self
        of_file: dict[str, tuple[Manifest, ...]] = {}
        problems: list[Problem] = []
        unsettled = False
        for name in sorted(files):
            file = files[name]
            lost = _missing_from(self._by_file.get(name, ()), file.manifests)
            recent = abs(now - file.modified) < STABLE_AFTER
            unsettled = unsettled or bool(lost and recent and not file.problems)
            keeps = bool(file.problems) or recent
            of_file[name] = (*file.manifests, *lost) if keeps and lost else file.manifests
            problems += file.problems
        good, doubles = self._join(of_file.values())
        if torn:
            of_file = {**self._by_file, **of_file}
        together = tuple(sorted(problems + doubles))
        return Documents(good, together, unsettled, torn, files, of_file)

    def _join(
        self, files: Iterable[tuple[Manifest, ...]]
    ) -> tuple[dict[DocumentId, Manifest], list[Problem]]:
        good: dict[DocumentId, Manifest] = {}
        doubles: dict[DocumentId, list[Manifest]] = {}
        for manifests in files:
            for manifest in manifests:
                key = document_id(manifest)
                first = good.setdefault(key, manifest)
                if first is not manifest:
                    doubles.setdefault(key, [first]).append(manifest)
        for key in doubles:
            if key in self.good:
                good[key] = self.good[key]
            else:
                del good[key]
        return good, [problem for each in doubles.values() for problem in _duplicate_problems(each)]


def document_id(manifest: Manifest) -> DocumentId:
    """What identifies a document within a directory; a controller derives the key from it."""
    return (manifest.kind, manifest.namespace, manifest.name)


def _is_unchanged(files: Mapping[str, ReadFile], known: Mapping[str, ReadFile]) -> bool:
    return files.keys() == known.keys() and all(known[name] is file for name, file in files.items())


def _missing_from(last: Iterable[Manifest], present: Iterable[Manifest]) -> tuple[Manifest, ...]:
    if last is present:
        return ()
    there = {document_id(manifest) for manifest in present}
    return tuple(manifest for manifest in last if document_id(manifest) not in there)


def _duplicate_problems(manifests: list[Manifest]) -> list[Problem]:
    problems = []
    for manifest in manifests:
        others = ", ".join(str(other.origin) for other in manifests if other is not manifest)
        problems.append(
            Problem(
                manifest.origin,
                f"{manifest.kind} {manifest.name!r} is declared at {others} too:"
                " remove one; until then the last good one is kept",
            )
        )
    return problems
