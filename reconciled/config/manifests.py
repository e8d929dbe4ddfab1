"""Parses the manifests of one file; an invalid document affects only itself.

1. A document that is not a manifest is a problem, never ignored: an empty file, a misspelt key
   and an unknown apiVersion are all reported, so that no resource goes missing silently.
2. If two documents of a file declare the same key, neither is returned: which one was meant is
   unknown. The caller keeps the last good one.
3. The spec is kept as it was written. The caller's *read_spec* makes the object of the plugin's
   class; the manifest carries it, so that validation, budgets, plans and runs share one object.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

from reconciled.config.structuring.faults import describe
from reconciled.config.structuring.structurer import Structurer
from reconciled.config.yaml.documents import Document, read_documents
from reconciled.config.yaml.positions import Path, Positions
from reconciled.core.errors import Invalid
from reconciled.core.problems import Problem
from reconciled.core.resources import NOTHING, Manifest, Origin, fingerprint_of

# The spec of a manifest of the given kind as an object; None for a kind that is not the caller's.
# The path is that of the spec within the positions. Raises Invalid.
SpecReader = Callable[[str, Mapping[str, Any], Positions, Path], Any]

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_LONGEST_NAME = 253  # RFC 1123, as Kubernetes limits it
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")


def _is_name(_: Any, attribute: Any, value: str) -> None:
    if not _NAME.fullmatch(value) or len(value) > _LONGEST_NAME:
        message = (
            f"{value[:_LONGEST_NAME]!r} is not a name: use a-z, 0-9, - and ., beginning and ending "
            "with a letter or digit"
        )
        raise ValueError(message, attribute)


def _is_namespace(_: Any, attribute: Any, value: str | None) -> None:
    if value is not None and not _NAMESPACE.fullmatch(value):
        shown = value[:_LONGEST_NAME]
        message = f"{shown!r} is not a namespace: use a-z, 0-9 and -, at most 63 characters"
        raise ValueError(message, attribute)


def _is_kind(_: Any, attribute: Any, value: str) -> None:
    if not _KIND.fullmatch(value):
        message = f"{value[:_LONGEST_NAME]!r} is not a kind: use letters and digits, as in Exec"
        raise ValueError(message, attribute)


@attrs.frozen
class _Metadata:
    name: str = attrs.field(validator=_is_name)
    namespace: str | None = attrs.field(default=None, validator=_is_namespace)
    labels: dict[str, str] = attrs.Factory(dict)
    annotations: dict[str, str] = attrs.Factory(dict)


@attrs.frozen
class _RawManifest:
    kind: str = attrs.field(validator=_is_kind)
    metadata: _Metadata
    spec: dict[str, Any]
    apiVersion: Literal["reconciled/v1"] = "reconciled/v1"  # noqa: N815 - the manifests' name


@attrs.define(eq=False)
class Parser:
    """Parses files of manifests. Reuse one instance: it caches how to read each class.

    *read_spec* gets the spec of each manifest that is valid as such; a manifest for which it
    raises Invalid is not returned.
    """

    _read_spec: SpecReader | None = None
    _structurer: Structurer = attrs.Factory(Structurer)

    def parse(self, data: bytes, file: str) -> tuple[list[Manifest], list[Problem]]:
        """The valid manifests of *data*, and the problems of the others, sorted.

        *file* is for messages. Raises nothing whatever the content; blocks for a second at most.
        """
        if not data.strip():
            message = "an empty file declares nothing: delete it, or write its manifests again"
            return [], [Problem(Origin(file), message)]
        documents, problems = read_documents(data, file)
        manifests: list[Manifest] = []
        for document in documents:
            if document.data is None:
                continue  # only comments between two ---
            try:
                manifests.append(self._manifest(document))
            except Invalid as exc:
                problems += exc.problems
        unique, repeated = _drop_duplicates(manifests)
        return unique, sorted(problems + repeated)

    def _manifest(self, document: Document) -> Manifest:
        positions = document.positions
        if not isinstance(document.data, dict):
            message = f"takes a mapping of kind, metadata and spec, got {describe(document.data)}"
            raise Invalid([positions.problem((), message)])
        written = self._structurer.structure(_RawManifest, document.data, positions)
        typed_spec = None
        if self._read_spec is not None:
            typed_spec = self._read_spec(written.kind, written.spec, positions, ("spec",))
        metadata = written.metadata
        # Thousands of manifests share few kinds and namespaces, and mostly have no labels.
        manifest = Manifest(
            kind=sys.intern(written.kind),
            name=metadata.name,
            spec=written.spec,
            origin=positions.value_origin(),
            fingerprint=fingerprint_of({"kind": written.kind, "spec": written.spec}),
            namespace=sys.intern(metadata.namespace) if metadata.namespace else None,
            labels=metadata.labels or NOTHING,
            annotations=metadata.annotations or NOTHING,
        )
        return manifest if typed_spec is None else manifest.with_typed_spec(typed_spec)


def _drop_duplicates(manifests: list[Manifest]) -> tuple[list[Manifest], list[Problem]]:
    first: dict[tuple[str, str | None, str], Manifest] = {}
    repeated = set()
    problems = []
    for manifest in manifests:
        key = (manifest.kind, manifest.namespace, manifest.name)
        if first.setdefault(key, manifest) is manifest:
            continue
        repeated.add(key)
        message = (
            f"{manifest.kind} {manifest.name} is declared twice, first at {first[key].origin}: "
            "remove or rename one"
        )
        problems.append(Problem(manifest.origin, message))
    unique = [m for m in manifests if (m.kind, m.namespace, m.name) not in repeated]
    return unique, problems
